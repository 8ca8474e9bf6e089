"""Values that state is to be filled with: whether they fit the memory that is there, and where they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.staging.filling import overlapping
from shardopt.swap.held import MASTER, REMAINDER, STEP, Held
from shardopt.torch_compat import local_shard, same_spec

__all__ = ["Fill", "copy_all", "fit", "fit_step", "missing_masters", "staged"]

Fill = tuple[Tensor, Tensor]
"""Memory of state, and what is copied into it."""


def fit(held: Held, name: str, value: object) -> Fill | str:
    """Where a value goes, or why it does not fit."""
    if name == STEP:
        return fit_step(held, value)
    piece = held.pieces.get(name)
    if piece is None:
        return (
            f"state {name!r} has no memory here, where {sorted(held.own)} are kept; build the optimizer with the "
            "amsgrad, master and moment_dtype that the state was made with"
        )
    if not isinstance(value, Tensor):
        return f"state {name!r} is a {type(value).__name__}; expected a tensor"
    if isinstance(value, DTensor) and (not isinstance(held.param, DTensor) or not same_spec(value, held.param)):
        placed = f"placed {held.param.placements}" if isinstance(held.param, DTensor) else "a plain tensor"
        return (
            f"state {name!r} is a DTensor placed {value.placements} on {value.device_mesh}, the parameter {placed}; "
            "ShardedStateOptimizer moves state between shardings"
        )
    local = local_shard(value) if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor) and isinstance(held.param, DTensor) and value.shape != held.param.shape:
        return (
            f"state {name!r} is a plain tensor of shape {tuple(value.shape)}, the parameter a DTensor of shape "
            f"{tuple(held.param.shape)} placed {held.param.placements}; state is loaded as DTensors placed like it"
        )
    if local.shape != piece.shape:
        return f"state {name!r} has shape {tuple(local.shape)} on this rank; expected {tuple(piece.shape)}"
    if local.dtype != piece.dtype:
        return f"state {name!r} is {local.dtype}; this optimizer keeps {piece.dtype}, and nothing is converted"
    if type(local) not in (Tensor, nn.Parameter) or local.layout != torch.strided or local.is_meta:
        return (
            f"state {name!r} is a {type(local).__name__} of layout {local.layout} on {local.device}; it has no values"
        )
    return piece, local.detach()


def fit_step(held: Held, value: object) -> Fill | str:
    """The same for the counter: numbers of any kind, as versions of torch have saved it."""
    if isinstance(value, DTensor):
        value = local_shard(value)
    if isinstance(value, Tensor):
        if value.is_meta or value.numel() != 1 or value.is_complex():
            return f"state 'step' is a {value.dtype} tensor of shape {tuple(value.shape)}; expected one number"
        number = value.detach().reshape(()).item()
    elif isinstance(value, (int, float)):
        number = value
    else:
        return f"state 'step' is a {type(value).__name__}; expected one number"
    if not 0 <= number < float("inf") or number != int(number):
        return f"state 'step' is {number!r}; expected a number of steps"
    return held.own[STEP], torch.tensor(float(number), dtype=torch.float32, device="cpu")


def missing_masters(held: Held, given: Mapping[str, Any]) -> list[Fill]:
    """Fills for masters of which nothing is given: they are the parameter's own value."""
    fills: list[Fill] = []
    if MASTER in held.pieces and MASTER not in given:
        fills.append((held.pieces[MASTER], held.shard.detach()))
    if REMAINDER in held.pieces and REMAINDER not in given:
        fills.append((held.pieces[REMAINDER], held.pieces[REMAINDER].new_zeros(()).expand_as(held.pieces[REMAINDER])))
    return fills


@torch.no_grad()
def staged(fills: Sequence[Fill]) -> list[Fill]:
    """The same, such that copying one changes no other's source and none has to come from another device.

    What is in host memory already is not copied once more.
    """
    ready = [(target, source if source.device.type == "cpu" else source.cpu()) for target, source in fills]
    moving = [pair for pair in ready if pair[0].data_ptr() != pair[1].data_ptr() or not _alike(*pair)]
    shared = overlapping([source for _, source in moving], [target for target, _ in ready])
    return [(target, source.clone() if id(source) in shared else source) for target, source in moving]


def _alike(target: Tensor, source: Tensor) -> bool:
    return target.stride() == source.stride() and target.dtype == source.dtype


@torch.no_grad()
def copy_all(fills: Sequence[Fill]) -> None:
    """Copies; after ``staged`` nothing of it can fail on bad input."""
    for target, source in fills:
        target.copy_(source)
