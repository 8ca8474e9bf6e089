"""Tensors in the formats that the host kernel takes, and the tables that point to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shardopt.swap.host_kernel import HYPER, ROW, DtypeCode, MasterKind, Table, adamw_hyper

ParamKind = Literal["fp32", "fp32 with a copy", "bf16", "bf16 over fp32", "bf16 with a remainder"]

# Whatever an optimizer is made with; a test changes what it is about.
SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 7}
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Format:
    """One of the combinations that the kernel has a loop for."""

    param: ParamKind
    grad: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32
    amsgrad: bool = False

    def __str__(self) -> str:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        parts = [self.param, f"grad {names[self.grad]}", f"moments {names[self.moments]}"]
        return ", ".join([*parts, "amsgrad"] if self.amsgrad else parts)


PARAM_KINDS: tuple[ParamKind, ...] = ("fp32", "fp32 with a copy", "bf16", "bf16 over fp32", "bf16 with a remainder")
DTYPES = (torch.float32, torch.bfloat16)
FORMATS = [
    Format(param=param, grad=grad, moments=moments, amsgrad=amsgrad)
    for param, grad, moments, amsgrad in itertools.product(PARAM_KINDS, DTYPES, DTYPES, (False, True))
]


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """One parameter's memory; what the row of the same name points to."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    master: Tensor | None = None
    out: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def clone(self) -> Buffers:
        return replace(self, **{name: tensor.clone() for name, tensor in self.named().items()})

    def part(self, first: int, numel: int) -> Buffers:
        return replace(self, **{name: tensor[first : first + numel] for name, tensor in self.named().items()})

    def value(self) -> Tensor:
        """The parameter in float32, exactly."""
        if self.master is None:
            return self.param.float()
        if self.master.dtype == torch.float32:
            return self.master
        return ((self.param.view(torch.int16).int() << 16) + self.master.int()).view(torch.float32)


def split_remainder(value: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as bf16, ties away from zero, and the int16 that is missing of it."""
    bits = value.view(torch.int32)
    low = bits.to(torch.int16)
    return ((bits - low.int()) >> 16).to(torch.int16).view(torch.bfloat16), low


def signed(numel: int, generator: torch.Generator, *, low: float = -9, high: float = 3) -> Tensor:
    """Normal numbers over 12 decades; their squares are well above float32's smallest normal."""
    scale = 10.0 ** torch.empty(numel).uniform_(low, high, generator=generator)
    return torch.randn(numel, generator=generator) * scale


def made(numel: int, kind: Format, *, seed: int = 0) -> Buffers:
    generator = torch.Generator().manual_seed(seed)
    value = signed(numel, generator)
    grad, exp_avg, square, largest = (signed(numel, generator) for _ in range(4))
    param, master, out = value, None, None
    if kind.param == "fp32 with a copy":
        out = torch.full((numel,), -1.0, dtype=torch.bfloat16)
    elif kind.param == "bf16":
        param = value.bfloat16()
    elif kind.param == "bf16 over fp32":
        param, master = value.bfloat16(), value.clone()
    elif kind.param == "bf16 with a remainder":
        param, master = split_remainder(value)
    return Buffers(
        param=param,
        grad=grad.to(kind.grad),
        exp_avg=exp_avg.to(kind.moments),
        exp_avg_sq=square.square().to(kind.moments),
        max_exp_avg_sq=largest.square().to(kind.moments) if kind.amsgrad else None,
        master=master,
        out=out,
    )


class KeepingTable(np.ndarray):
    """A table that keeps what it points to."""

    kept: tuple[Buffers, ...] = ()


def rows_of(
    buffers: Sequence[Buffers],
    *,
    hyper: Sequence[int] | None = None,
    stream: Sequence[int] | None = None,
    index_start: Sequence[int] | None = None,
) -> Table:
    """A table with a row for each; element i of a span is element ``index_start + i`` of the whole."""
    rows = np.zeros(len(buffers), ROW).view(KeepingTable)
    rows.kept = tuple(buffers)
    for row, one in zip(rows, buffers, strict=True):
        for name, tensor in one.named().items():
            assert tensor.is_contiguous()
            row[name] = tensor.data_ptr()
        row["numel"] = one.param.numel()
        row["index_run"] = max(1, one.param.numel())
        for name, tensor in (("param", one.param), ("grad", one.grad), ("moment", one.exp_avg)):
            row[f"{name}_dtype"] = DtypeCode.BF16 if tensor.dtype == torch.bfloat16 else DtypeCode.FP32
        if one.master is not None:
            row["master_kind"] = MasterKind.FP32 if one.master.dtype == torch.float32 else MasterKind.REMAINDER16
    for name, values in (("hyper", hyper), ("stream", stream), ("index_start", index_start)):
        if values is not None:
            rows[name] = values
    return rows


def hypers_of(*changes: dict[str, float]) -> Table:
    """A table with a row for each set of changes to ``SETTINGS``; without any, one row."""
    return np.array([adamw_hyper(**{**SETTINGS, **change}) for change in changes or ({},)], HYPER)


def assert_same_bits(got: Buffers, expected: Buffers) -> None:
    for name, tensor in got.named().items():
        one, other = (of.view(_BITS[tensor.element_size()]) for of in (tensor, expected.named()[name]))
        differ = int((one != other).sum())
        where = (one != other).nonzero()[0].item() if differ else None
        assert not differ, f"{name} differs in {differ} of {one.numel()} elements, first in {where}"
