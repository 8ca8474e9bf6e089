"""bitsandbytes: 8-bit state in blocks of 256, fp32 where a parameter is small (tried with 0.50, on the CPU)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bitsandbytes.functional
import torch
from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State, Optimizer8bit
from torch import Tensor

from shardopt.errors import PlacementError
from shardopt.layouts.codec import Blocks, Codec, Form, Subject

__all__ = ["codec_for"]

_BLOCK = 256
# Those that norm, or scale by, a whole parameter, and one that keeps two moments in one tensor.
_NOT_ELEMENTWISE = frozenset({"lamb", "lars"})
_OTHER_STATE = frozenset({"ademamix"})


class _BitsAndBytes(Codec):
    name = "bitsandbytes-blockwise"

    def entries(self, subject: Subject) -> tuple[str, ...]:
        return ("state1", "state2") if isinstance(subject.optimizer, Optimizer2State) else ("state1",)

    def parts(self, entry: str) -> tuple[str, ...]:
        number = entry.removeprefix("state")
        return entry, f"qmap{number}", f"absmax{number}"

    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Blocks | Tensor | None:
        codes, table, scales = (state.get(part) for part in self.parts(entry))
        if codes is None:
            return None
        if codes.dtype == torch.float32:
            return codes
        if codes.dtype != torch.uint8 or table is None or scales is None:
            raise PlacementError(
                f"state {entry!r} is {codes.dtype}, with {sorted(state)} beside it; of 8-bit state there must be codes "
                "(uint8), 'qmap' and 'absmax'. The state was changed by hand, or comes from another version."
            )
        return Blocks(Form(block=_BLOCK, table=table), codes, scales)

    def form(self, subject: Subject, entry: str) -> Form | torch.dtype:
        args = subject.optimizer.args
        if args.optim_bits != 8 or subject.shard.numel() < args.min_8bit_size:
            return torch.float32
        return Form(block=_BLOCK, table=self._table(subject.optimizer, entry))

    def quantise(self, values: Tensor, form: Form) -> Blocks:
        codes, how = bitsandbytes.functional.quantize_blockwise(values, code=form.table, blocksize=form.block)
        return Blocks(form, codes, how.absmax)

    def write(self, subject: Subject, entry: str, value: Blocks | Tensor) -> Mapping[str, Any]:
        codes, table, scales = self.parts(entry)
        if isinstance(value, Tensor) or value.codes is None:
            return {codes: value}
        # The optimizer's own table, of which each state holds the same object.
        own = self._table(subject.optimizer, entry).to(subject.shard.device)
        return {codes: value.codes.view(subject.shard.shape), table: own, scales: value.scales.reshape(-1)}

    def refuse(self, optimizer: torch.optim.Optimizer) -> str | None:
        if getattr(optimizer, "is_paged", False):
            return (
                "paged state lies in memory that bitsandbytes manages itself, and a load would put it elsewhere; use "
                "the class without 'Paged'."
            )
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        overridden = {id(getattr(module, name)) for module, name, _ in manager.module_weight_config_triple}
        if manager.index2config or params & (manager.pid2config.keys() | overridden):
            return (
                "GlobalOptimManager overrides options by parameter or by its position, and while it steps the "
                "optimizer sees other parameters at other positions, so that overrides would not be found; give the "
                "parameters with other options an optimizer of their own."
            )
        odd = [
            tuple(param.shape)
            for group in optimizer.param_groups
            for param in group["params"]
            if not param.is_contiguous()
        ]
        if odd:
            return (
                f"parameters of shapes {odd[:5]} are not contiguous, and bitsandbytes would step copies of them; make "
                "them contiguous."
            )
        return None

    def constants(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        return ("name2qmap",)

    def quantises(self, optimizer: torch.optim.Optimizer) -> bool:
        return vars(optimizer)["args"].optim_bits == 8

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        return vars(optimizer)["optimizer_name"] not in _NOT_ELEMENTWISE and not vars(optimizer)["args"].max_unorm

    @staticmethod
    def _table(optimizer: torch.optim.Optimizer, entry: str) -> Tensor:
        tables = vars(optimizer)["name2qmap"]
        # As Optimizer1State and Optimizer2State choose: the first moment has a sign, the second has none.
        return tables["dynamic" if entry == "state1" else "udynamic"]


_CODEC = _BitsAndBytes()


def codec_for(optimizer: torch.optim.Optimizer) -> Codec | None:
    """The codec of the library's optimizers; None for those whose state is none of one or two moments."""
    known = isinstance(optimizer, (Optimizer1State, Optimizer2State))
    if not (known and isinstance(optimizer, Optimizer8bit)) or vars(optimizer)["optimizer_name"] in _OTHER_STATE:
        return None
    return _CODEC
