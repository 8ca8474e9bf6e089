"""torchao: Adam and AdamW with 8-bit, 4-bit or fp8 state in blocks (tried with 0.18, on the CPU)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from shardopt.errors import PlacementError
from shardopt.layouts.codec import Blocks, Codec, Form, Subject

__all__ = ["codec_for"]

_SMALLEST = 4096
_QUANTISED = (OptimState4bit, OptimState8bit, OptimStateFp8)


class _TorchAO(Codec):
    name = "torchao-blockwise"

    def entries(self, subject: Subject) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if subject.group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Blocks | Tensor | None:
        value = state.get(entry)
        if isinstance(value, _QUANTISED):
            return Blocks(self._form_of(value), value.codes, value.scale)
        if value is not None and type(value) is not Tensor:
            raise PlacementError(f"state {entry!r} is a {type(value).__name__}, which this version does not know.")
        return value

    def form(self, subject: Subject, entry: str) -> Form | torch.dtype:
        block, shard = subject.optimizer.block_size, subject.shard
        if shard.numel() < _SMALLEST or shard.numel() % block:
            return shard.dtype
        # Of one block, which is enough to see how the class quantises.
        return self._form_of(self._zeros(subject.optimizer, entry, shard.new_empty(block)))

    def quantise(self, values: Tensor, form: Form) -> Blocks:
        blank = self._blank(form, values)
        blank.copy_(values)
        return Blocks(form, blank.codes, blank.scale)

    def write(self, subject: Subject, entry: str, value: Blocks | Tensor) -> Mapping[str, Any]:
        return {entry: value if isinstance(value, Tensor) else self._made(value, subject.shard)}

    def _made(self, value: Blocks, shard: Tensor) -> Tensor:
        form, codes, scales = value.form, value.codes, value.scales.reshape(-1)
        assert codes is not None
        if form.table is None:
            return OptimStateFp8(codes.view(shard.shape), scales, dtype=shard.dtype)
        table = form.table.to(shard.device)
        # A table with negative values is that of the first moment.
        signed = bool((table < 0).any())
        if form.per_byte == 2:
            return OptimState4bit(codes.reshape(-1), scales, table, signed, shard.shape, dtype=shard.dtype)
        return OptimState8bit(codes.view(shard.shape), scales, table, signed, dtype=shard.dtype)

    def _blank(self, form: Form, values: Tensor) -> Any:
        codes = torch.zeros(values.numel() // form.per_byte, dtype=form.codes, device=values.device)
        scales = torch.zeros(values.numel() // form.block, dtype=form.scales, device=values.device)
        return self._made(Blocks(form, codes if form.per_byte == 2 else codes.view(values.shape), scales), values)

    @staticmethod
    def _zeros(optimizer: Any, entry: str, shard: Tensor) -> Any:
        # The class's own way to make state: which kind it is, is known to it alone.
        return optimizer._subclass_zeros(shard, entry == "exp_avg", optimizer.block_size)

    @staticmethod
    def _form_of(value: Any) -> Form:
        return Form(
            block=value.block_size,
            codes=value.codes.dtype,
            scales=value.scale.dtype,
            table=getattr(value, "qmap", None),
            per_byte=2 if isinstance(value, OptimState4bit) else 1,
        )


_CODEC = _TorchAO()


def codec_for(optimizer: torch.optim.Optimizer) -> Codec | None:
    """The codec of the library's low-bit Adams; None for its other optimizers."""
    return _CODEC if hasattr(optimizer, "_subclass_zeros") and hasattr(optimizer, "block_size") else None
