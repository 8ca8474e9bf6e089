"""Optimizers whose state has every layout of format 1. Never change them: ``format1_kinds`` was made of them.

All numbers are small integers times powers of two, or written down: any torch and any CPU makes the same bits.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardopt import Blocks, Codec, Form, Subject, declare_saved, register_codec, register_layouts

# Codes of four bits that mean eighths, in two orders.
EIGHTHS = torch.arange(-8, 8) / 8.0
TABLES: dict[str, Tensor] = {"pairs": EIGHTHS, "apart": EIGHTHS.flip(0)}


class Side(enum.Enum):
    """Is saved by its member's name."""

    LEFT = 1
    RIGHT = 2


class Projector:
    """Is saved by its attributes."""

    def __init__(self, side: Side, basis: Any) -> None:
        self.side = side
        self.basis = basis


declare_saved(Side, Projector)


def numbers(shape: tuple[int, ...], largest: int, first: int = 0) -> Tensor:
    """Integers between ``-largest`` and ``largest``, in no order that a block of them would repeat."""
    count = int(np.prod(shape))
    return (((torch.arange(count) + first) * 37) % (2 * largest + 1) - largest).reshape(shape).float()


def plain_values() -> dict[str, Any]:
    """Every typed value."""
    return {
        "none, bool, ints": [None, True, 7, -(2**63), 2**64, -(2**200)],
        "floats": [0.1, -0.0, float("inf"), struct.unpack("<d", bytes.fromhex("0100000000c0f87f"))[0]],
        "complex": complex(1.5, float("-inf")),
        "texts": ["schön", "\ud800", b"\x00\xff"],
        "tuple": (1, (2.0, "three"), ()),
        "sets": [{3, "a", None}, frozenset({(1, 2), 0.5})],
        "size": torch.Size([2, 3]),
        "deques": [deque([1, 2], maxlen=3), deque()],
        "dicts": [{"!": 1}, {1: "one", (2, "b"): None}],
        "dtype, devices": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
        "numpy": [np.float32(0.5), np.int64(-3), np.bool_(True)],
        "tensors": [torch.tensor(2.5), torch.arange(6, dtype=torch.int16).reshape(2, 3).t(), torch.ones(0, 2)],
        "needs a gradient": torch.ones(1, requires_grad=True),
        "objects": [Side.RIGHT, Projector(Side.LEFT, (1, None))],
    }


class _Filled(torch.optim.Optimizer):
    """One step makes all state, out of the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Without a closure."""
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                self.state[param].update(self.made(group, param, param.grad))
                param.sub_(param.grad, alpha=0.5)

    def made(self, group: Mapping[str, Any], param: Tensor, grad: Tensor) -> dict[str, Any]:
        """The parameter's state."""
        raise NotImplementedError


class Factors(_Filled):
    """Keeps factors of whole matrices, structures of tensors, typed values, and state that is no parameter's."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, {"lr": 0.5, "plain": None, **options})
        self.seen = 0
        self.moving = torch.zeros(3)
        self.fixed = torch.arange(5.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """State of parameters, and what belongs to none."""
        super().step()
        self.seen = 3
        self.moving.copy_(torch.tensor([0.5, 0.25, -2.0]))
        self.state["average"] = torch.tensor([4.0, 8.0])

    def made(self, group: Mapping[str, Any], param: Tensor, grad: Tensor) -> dict[str, Any]:
        if grad.dim() != 2:
            return {"step": torch.tensor(2.0), "momentum": grad.to(torch.float64)}
        row, column = grad.sum(1), grad.sum(0)
        entries: dict[str, Any] = {"calls": 2, "momentum": grad.clone(), "row": row, "column": column}
        if group["plain"] is not None:
            # The row factor again: one tensor. Bytes of odd lengths, and one that is too long to be copied with others.
            entries["tree"] = [{"row": row, "bytes": torch.arange(67, dtype=torch.uint8)}, (torch.tensor(True), 0.5)]
            entries["columns"] = torch.arange(15, dtype=torch.bfloat16).reshape(3, 5).t()
            entries["large"] = torch.arange(16 * 1024 + 1, dtype=torch.int64).to(torch.uint8)
            entries["object"] = Projector(Side.RIGHT, torch.ones(3, requires_grad=True))
            entries["none"] = [torch.ones(0, 4)]
            entries["plain"] = plain_values()
        # A load puts entries in the order of their names, and leaves of a blob are in the order of entries.
        return dict(sorted(entries.items()))


register_layouts(Factors, {"self.seen": "saved", "self.moving": "saved", "self.fixed": "constant"})


class Own(_Filled):
    """Keeps what means something to its rank only."""

    def __init__(self, params: Iterable[Any], rank: int) -> None:
        super().__init__(params, {"lr": 0.5})
        self._rank = str(rank)

    def made(self, group: Mapping[str, Any], param: Tensor, grad: Tensor) -> dict[str, Any]:
        rank = int(self._rank)
        return {"sketch": [torch.full((rank + 2,), 1.0 + rank), torch.arange(5 + rank), {"rank": (rank, None)}]}


class Coded(_Filled):
    """Momentum in blocks, as the group's ``kind`` says; fp32 for less than ``smallest`` elements."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.5, "kind": "numbers", "block": 8, "smallest": 0})

    def made(self, group: Mapping[str, Any], param: Tensor, grad: Tensor) -> dict[str, Any]:
        wanted = form_of(group, grad)
        value = grad.clone() if wanted is None else quantised(grad, wanted)
        return {"step": torch.tensor(2.0), **written(grad, value)}


def form_of(group: Mapping[str, Any], shard: Tensor) -> Form | None:
    """How the group's options make the momentum of a shard be kept; None is fp32."""
    kind, block = group["kind"], group["block"]
    if shard.numel() < group["smallest"]:
        return None
    if kind == "means":
        return Form(block=block, codes=None)
    if kind == "numbers":
        return Form(block=block, codes=torch.int8)
    if kind == "bf16":
        return Form(block=block, codes=torch.int8, scales=torch.bfloat16)
    return Form(block=block, table=TABLES[kind], per_byte=2 if kind == "pairs" else 1)


def quantised(values: Tensor, form: Form) -> Blocks:
    """Exact for integers up to 127, or up to 7 with a table, whatever the blocks: scales are powers of two."""
    blocks = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % form.block)).view(-1, form.block)
    if form.codes is None:
        return Blocks(form, None, blocks[:, 0].clone())
    exponents = torch.frexp(blocks.abs().amax(1))[1]
    scales = torch.ldexp(torch.ones(len(blocks)), exponents - 7 if form.table is None else exponents)
    parts = (blocks / scales[:, None]).reshape(-1)[: values.numel()]
    if form.table is None:
        return Blocks(form, parts.to(torch.int8), scales.to(form.scales))
    codes = (parts[:, None] - form.table).abs().argmin(1).to(torch.uint8)
    return Blocks(form, codes if form.per_byte == 1 else (codes[::2] << 4) | codes[1::2], scales)


def meant(value: Blocks | Tensor) -> Tensor:
    """The values, one dim."""
    if isinstance(value, Tensor):
        return value.reshape(-1)
    form, codes = value.form, value.codes
    scales = value.scales.reshape(-1).float().repeat_interleave(form.block)
    if codes is None:
        return scales
    flat = codes.reshape(-1)
    if form.per_byte == 2:
        flat = torch.stack((flat >> 4, flat & 15), 1).view(-1)
    return (flat.float() if form.table is None else form.table[flat.long()]) * scales[: flat.numel()]


def written(shard: Tensor, value: Blocks | Tensor) -> dict[str, Any]:
    """Items of the state."""
    if isinstance(value, Tensor):
        return {"momentum": value.view(shard.shape)}
    codes = {} if value.codes is None else {"momentum": value.codes.reshape(-1)}
    return {**codes, "scale": value.scales.reshape(-1)}


class CodedCodec(Codec):
    """How ``Coded`` keeps its state."""

    name = "golden"

    def entries(self, subject: Subject) -> tuple[str, ...]:
        return ("momentum",)

    def parts(self, entry: str) -> tuple[str, ...]:
        return "momentum", "scale"

    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Blocks | Tensor | None:
        if "scale" not in state:
            return state.get("momentum")
        form = form_of({**subject.group, "smallest": 0}, subject.shard)
        assert form is not None
        return Blocks(form, state.get("momentum"), state["scale"])

    def form(self, subject: Subject, entry: str) -> Form | torch.dtype:
        return form_of(subject.group, subject.shard) or torch.float32

    def quantise(self, values: Tensor, form: Form) -> Blocks:
        return quantised(values, form)

    def write(self, subject: Subject, entry: str, value: Blocks | Tensor) -> Mapping[str, Any]:
        return written(subject.shard, value)


register_codec(Coded, CodedCodec())
