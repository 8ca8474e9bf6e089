"""Gefen-X: 8-bit momentum in blocks, with a codebook for all parameters of a rank (tried with 0.5.0, on the CPU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gefen.partitioning
import torch
from gefen.gefen import Gefen, automatic_partition_reduce, gefen_nearest_codebook_indices
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError
from shardopt.layouts.codec import Blocks, Codec, Form, Subject
from shardopt.layouts.learnt import LearntCodec

__all__ = ["codec_for"]

_MOMENTUM, _SQUARES = "m_codebook", "vmean"
# Gefen takes no shorter blocks but those of one element.
_SHORTEST = 8


class _Gefen(LearntCodec):
    name = "gefen-x-blockwise"

    def entries(self, subject: Subject) -> tuple[str, ...]:
        # Of matrices it keeps sums of rows and columns, which are no blocks.
        factored = subject.optimizer._factored_v_2d and subject.shard.dim() == 2
        return (_MOMENTUM,) if factored else (_MOMENTUM, _SQUARES)

    def parts(self, entry: str) -> tuple[str, ...]:
        return (_MOMENTUM, "m_magnitude", "automatic_period") if entry == _MOMENTUM else (entry,)

    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Blocks | Tensor | None:
        value = state.get(entry)
        if value is None:
            return None
        scales, block = state.get("m_magnitude"), state.get("automatic_period")
        table = self.table(subject.optimizer)
        if not isinstance(block, int) or block < 1 or not isinstance(scales, Tensor) or table is None:
            lacking = {"m_magnitude": scales, "automatic_period": block, "self._gefen_codebook": table}
            raise PlacementError(
                f"state {entry!r} has no {sorted(name for name, found in lacking.items() if found is None)} beside it, "
                f"or what it has is none: 'automatic_period' is {block!r}. The state was changed by hand, or comes "
                "from another version."
            )
        if entry == _SQUARES:
            return Blocks(Form(block=block, codes=None), None, value)
        return Blocks(Form(block=block, table=table), value, scales)

    def form(self, subject: Subject, entry: str) -> Form:
        block = self.block(subject, (), 1)
        if entry == _SQUARES:
            return Form(block=block, codes=None)
        return Form(block=block, table=self.table(subject.optimizer))

    def quantise(self, values: Tensor, form: Form) -> Blocks:
        flat = values.reshape(-1)
        if form.codes is None:
            return Blocks(form, None, automatic_partition_reduce(flat, form.block, "mean"))
        assert form.table is not None
        blocks = flat.view(-1, form.block)
        scales = automatic_partition_reduce(flat.abs(), form.block, "max") if flat.numel() else blocks.new_empty(0, 1)
        # As its step does: of a block of zeros every coefficient is 0.
        normed = (blocks / scales).masked_fill_(scales == 0, 0.0)
        return Blocks(form, gefen_nearest_codebook_indices(form.table.to(flat.device), normed), scales)

    def write(self, subject: Subject, entry: str, value: Blocks | Tensor) -> Mapping[str, Any]:
        assert isinstance(value, Blocks)  # no form is a dtype
        if value.codes is None:
            return {entry: value.scales.view(-1, 1)}
        block = value.form.block
        return {
            _MOMENTUM: value.codes.view(-1, block),
            "m_magnitude": value.scales.view(-1, 1),
            "automatic_period": block,
        }

    def table(self, optimizer: Any) -> Tensor | None:
        return optimizer._gefen_codebook

    def adopt(self, optimizer: Any, table: Tensor | None) -> None:
        optimizer._gefen_codebook = table
        optimizer._gefen_codebook_by_device.clear()
        optimizer._gefen_codebook_lut_by_device.clear()

    def block(self, subject: Subject, saved: Sequence[int], common: int) -> int:
        if saved and (common >= _SHORTEST or common == min(saved)):
            return common
        shard = subject.shard
        # What Gefen takes where gradients do not tell it more.
        return gefen.partitioning.memory_safe_fallback_period(shard.numel(), tuple(shard.shape))

    def refuse(self, optimizer: torch.optim.Optimizer) -> str | None:
        if vars(optimizer)["capturable"]:
            return "with capturable=True its counters are in tensors that steps share; leave it out."
        if vars(optimizer)["_period_one_substrings"]:
            return (
                "period_one_substrings= finds parameters by their place in a group, and while it steps the optimizer "
                "may see fewer; use force_1d_period_one or force_2d_period_one."
            )
        return None

    def why_not_local(self, optimizer: torch.optim.Optimizer) -> str | None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        sharded = [param for param in params if isinstance(param, DTensor)]
        if vars(optimizer)["_factored_v_2d"] and any(param.dim() == 2 for param in sharded):
            return (
                "of a shard it would keep sums over the shard's rows and columns, as if that were a matrix of its "
                "own; pass factored_v_2d=False, which is what Gefen makes of sharded matrices"
            )
        # Where ranks hold copies of one parameter, but not of all, their codebooks move the copies apart.
        if len({_copies(param) for param in params}) > 1:
            return (
                "some ranks hold copies of some parameters and not of all, so that each would step its copy with a "
                "codebook of its own, and copies would drift apart; shard all parameters over the same ranks"
            )
        return None

    def constants(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        # Saved as tables of what they quantise, made of that, or noted for messages.
        return (
            "_gefen_codebook",
            "_gefen_codebook_by_device",
            "_gefen_codebook_lut_by_device",
            "_lr_scalar_cache",
            "_param_names",
            "_synthesized_param_names",
        )

    def is_scratch(self, item: str) -> bool:
        # Names that it gives, memory that its step writes before it reads it, and keys for torch's own state dicts.
        return item in ("name", "param_names_synthesized", "stepsize", "_h_buf") or item.startswith("_gefen_")

    def attributes(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        return ("_gefen_global_step",)


def _copies(param: Tensor) -> tuple[Any, ...]:
    """What says which ranks hold a copy of this rank's shard: its mesh, and along which dims of it there are copies."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    alike = tuple(dim for dim, placement in enumerate(param.placements) if placement.is_replicate())
    return tuple(mesh.mesh.reshape(-1).tolist()), tuple(mesh.shape), alike


_CODEC = _Gefen()


def codec_for(optimizer: torch.optim.Optimizer) -> Codec | None:
    """The codec of Gefen; None for GefenMuon, which is made of it and keeps more, and for Gefen without the X."""
    muon = any(kind.__module__ == "gefen.gefen_muon" for kind in type(optimizer).__mro__)
    return None if muon or not isinstance(optimizer, Gefen) or "_factored_v_2d" not in vars(optimizer) else _CODEC
