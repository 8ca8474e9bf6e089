"""One parameter that SwapAdamW updates, and the memory of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.layouts.tracked import Kind
from shardopt.staging.filling import can_be_filled
from shardopt.swap.slabs import Slabs
from shardopt.swap.spans import Spans, dense_strides, spans_of
from shardopt.torch_compat import local_box, local_shard, placed_like

__all__ = [
    "MASTER",
    "MAX",
    "MOMENTS",
    "REMAINDER",
    "STEP",
    "Held",
    "Keeps",
    "check_param",
    "hold",
    "shard_of",
    "sharing_spans",
]

STEP = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX = "max_exp_avg_sq"
MASTER = "master"
REMAINDER = "master_lo"

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """What is kept for each parameter.

    Attributes:
        moment_dtype: of all moments.
        master: what stands behind a bf16 parameter: ``"fp32"``, ``"remainder16"`` or None.
    """

    moment_dtype: torch.dtype = torch.float32
    master: str | None = None

    def __post_init__(self) -> None:
        if self.moment_dtype not in _DTYPES:
            raise ValueError(f"moment_dtype is {self.moment_dtype}; expected torch.float32 or torch.bfloat16")
        if self.master not in (None, "fp32", "remainder16"):
            raise ValueError(f"master is {self.master!r}; expected None, 'fp32' or 'remainder16'")

    def entries(self, dtype: torch.dtype, *, amsgrad: bool) -> dict[str, torch.dtype]:
        """The tensors of a parameter of this dtype, by name."""
        found = dict.fromkeys(MOMENTS, self.moment_dtype)
        if amsgrad:
            found[MAX] = self.moment_dtype
        if dtype == torch.bfloat16 and self.master == "fp32":
            found[MASTER] = torch.float32
        if dtype == torch.bfloat16 and self.master == "remainder16":
            found[REMAINDER] = torch.int16
        return found


@dataclass(slots=True, eq=False)
class Held:
    """One parameter and its state.

    Attributes:
        param: the user's own object.
        name: what errors call it.
        stream: tells its random bits from those of other parameters.
        shard: this rank's part of it when it was last looked at.
        kind: what that must keep being.
        spans: its memory as the kernel takes it.
        counters: of the steps of all parameters that were added with this one.
        place: of its own among them.
        pieces: this rank's part of each entry.
        own: the entries as ``state[param]`` has them: the counter, and the pieces or DTensors over them.
    """

    param: Tensor
    name: str
    stream: int
    shard: Tensor
    spans: Spans
    counters: NDArray[np.float32]
    place: int
    pieces: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        self.kind = Kind.of(self.shard)

    @property
    def master(self) -> Tensor | None:
        """This rank's part of the fp32 values, or of what bf16 lacks of them; None if there is neither."""
        return self.pieces.get(MASTER, self.pieces.get(REMAINDER))

    def take(self, flat: Mapping[str, Tensor]) -> None:
        """Takes its pieces of memory: [numel] each, in which elements lie as the parameter's, without gaps."""
        strides = dense_strides(self.shard.shape, self.shard.stride())
        self.pieces = {name: piece.as_strided(self.shard.shape, strides) for name, piece in flat.items()}
        # float32 whatever torch's default dtype is: bf16 would stop counting at 256.
        step = torch.frombuffer(self.counters, dtype=torch.float32, count=1, offset=self.counters.itemsize * self.place)
        self.own = {STEP: step.reshape(())}
        self.own.update((name, _as_param(self.param, piece)) for name, piece in self.pieces.items())

    @torch.no_grad()
    def reset(self) -> None:
        """The state of before the first step."""
        self.counters[self.place] = 0
        for piece in self.pieces.values():
            piece.zero_()
        if MASTER in self.pieces:
            self.pieces[MASTER].copy_(self.shard)


def shard_of(param: Tensor) -> Tensor:
    """This rank's part of a parameter, without autograd: the very tensor it holds, or a plain one's own memory."""
    return local_shard(param) if isinstance(param, DTensor) else param


def check_param(param: Tensor, device: torch.device) -> str | None:
    """Why the kernel cannot update the parameter on that device; None if it can."""
    shard = shard_of(param)
    if isinstance(param, DTensor) and any(one.is_partial() for one in param.placements):
        return f"it is placed {param.placements}, which is not one tensor; shard or replicate it"
    if shard.is_meta:
        return "it is on the meta device; materialise it (to_empty) before the optimizer is made"
    if shard.device != device:
        return (
            f"it is on {shard.device}, and this optimizer's parameters are on {device}; make one optimizer for each "
            "device"
        )
    # Exact types: a subclass may hold no memory, or not the memory it seems to.
    if type(shard) not in (Tensor, nn.Parameter) or shard.layout != torch.strided:
        return f"its memory is a {type(shard).__name__} of layout {shard.layout}; expected a dense tensor"
    if shard.dtype not in _DTYPES:
        return f"its dtype is {shard.dtype}; expected torch.float32 or torch.bfloat16"
    if not can_be_filled(shard):
        return "elements of it share memory, or it was made in inference mode; give it memory of its own (clone())"
    return _check_place(param, shard)


def _check_place(param: Tensor, shard: Tensor) -> str | None:
    if isinstance(param, DTensor):
        _, size = local_box(param)
        if tuple(shard.shape) != size:
            return (
                f"this rank's shard has shape {tuple(shard.shape)}, but {param.placements} of {tuple(param.shape)} "
                f"gives it {size}; let distribute_tensor or fully_shard cut it"
            )
    try:
        _spans(param, shard, indexed=False)
    except ValueError as error:
        return f"{error}; make it contiguous"
    return None


def _spans(param: Tensor, shard: Tensor, *, indexed: bool) -> Spans:
    offset = local_box(param)[0] if isinstance(param, DTensor) else (0,) * param.dim()
    return spans_of(shard.shape, shard.stride(), offset, param.shape, indexed=indexed)


def sharing_spans(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Which parameters lie in each other's memory; of two columns of one matrix neither does.

    Args:
        named: name and parameter, of those that ``check_param`` has found to be good.
    """
    starts: list[NDArray[np.int64]] = []
    ends: list[NDArray[np.int64]] = []
    for _, param in named:
        shard = shard_of(param)
        spans, item = _spans(param, shard, indexed=False), shard.element_size()
        starts.append(shard.data_ptr() + spans.param_offsets * item)
        ends.append(starts[-1] + spans.numel * item)
    owners = np.repeat(np.arange(len(named)), [len(one) for one in starts])
    if not len(owners):
        return []
    start, end = np.concatenate(starts), np.concatenate(ends)
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    # Whose span it is that reaches so far.
    furthest = np.maximum.accumulate(np.where(end[order] == reach, np.arange(len(order)), 0))
    found = {
        tuple(sorted((int(owners[order[furthest[place - 1]]]), int(owners[order[place]]))))
        for place in np.flatnonzero(start[order][1:] < reach[:-1]) + 1
    }
    return [
        f"{named[left][0]} and {named[right][0]} share memory, which two updates would write; give each its own, or "
        "pass one of them."
        for left, right in sorted(found)
    ]


def hold(
    named: Sequence[tuple[str, Tensor]], amsgrad: Sequence[bool], keeps: Keeps, slabs: Slabs, *, first_stream: int
) -> list[Held]:
    """Makes the memory of parameters that ``check_param`` has found to be good, all in one slab; counters beside it.

    The memory is zeros that nobody has touched; masters are not filled yet.
    """
    made = without_memory(named, keeps, first_stream=first_stream)
    wanted = [keeps.entries(one.shard.dtype, amsgrad=flag) for one, flag in zip(made, amsgrad, strict=True)]
    names = dict.fromkeys(name for entries in wanted for name in entries)
    # Entry by entry, wide ones first: each is read as one stream, and no gap comes between tiny pieces.
    order = [
        (one, name, entries[name])
        for name in sorted(names, key=lambda name: -_width(name, wanted))
        for one, entries in zip(made, wanted, strict=True)
        if name in entries
    ]
    flat = slabs.make([(one.shard.numel(), dtype) for one, _, dtype in order])
    pieces: dict[int, dict[str, Tensor]] = {id(one): {} for one in made}
    for (one, name, _), piece in zip(order, flat, strict=True):
        pieces[id(one)][name] = piece
    for one, entries in zip(made, wanted, strict=True):
        one.take({name: pieces[id(one)][name] for name in entries})
    return made


def without_memory(named: Sequence[tuple[str, Tensor]], keeps: Keeps, *, first_stream: int) -> list[Held]:
    """The same, but no pieces yet: counters alone."""
    indexed = keeps.moment_dtype == torch.bfloat16
    counters = np.zeros(len(named), np.float32)
    return [
        Held(param, name, first_stream + place, shard, _spans(param, shard, indexed=indexed), counters, place)
        for place, (name, param, shard) in enumerate((name, param, shard_of(param)) for name, param in named)
    ]


def _width(name: str, wanted: Sequence[Mapping[str, torch.dtype]]) -> int:
    return next(entries[name].itemsize for entries in wanted if name in entries)


def _as_param(param: Tensor, piece: Tensor) -> Tensor:
    return placed_like(param, piece) if isinstance(param, DTensor) else piece
