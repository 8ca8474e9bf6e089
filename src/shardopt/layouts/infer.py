"""Deciding the layout of a live state entry from its value; what cannot be placed is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError
from shardopt.layouts.objects import fields_of_object, saved_as
from shardopt.layouts.tracked import Tracked
from shardopt.torch_compat import local_shard, same_spec

__all__ = ["Elementwise", "Layout", "Value", "Whole", "infer"]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The parameter's global shape, placed like it. ``local`` is this rank's part, never a copy."""

    local: Tensor


@dataclass(frozen=True, slots=True)
class Value:
    """A scalar (python value or 0-d tensor), the same on every rank: kept in the manifest."""

    value: Any


@dataclass(frozen=True, slots=True)
class Whole:
    """Any structure of whole tensors, of a parameter whose state is whole: kept in the parameter's blob."""

    value: Any


Layout = Elementwise | Value | Whole


def infer(tracked: Tracked, entry: str, value: Any, *, elementwise: bool) -> Layout:
    """The layout of ``state[param][entry]``.

    Args:
        tracked: the parameter.
        entry: the entry's key.
        value: its live value.
        elementwise: whether the class is known to keep this entry in the parameter's shape.

    Raises:
        PlacementError: the value has no known place.
    """
    if isinstance(value, DTensor):
        return _infer_dtensor(tracked, entry, value)
    if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_quantized or value.is_meta):
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
        raise PlacementError(
            f"{tracked.fqn}: state {entry!r} is a {kind} tensor of shape {tuple(value.shape)}, whose bytes have no "
            "known place; keep dense tensors in state."
        )
    if hasattr(value, "__tensor_flatten__"):
        raise PlacementError(
            f"{tracked.fqn}: state {entry!r} is a {type(value).__module__}.{type(value).__qualname__}, which is made "
            "of tensors; say what they are with shardopt.register_codec, or keep them in state themselves."
        )
    if isinstance(value, Tensor):
        return _infer_tensor(tracked, entry, value, elementwise)
    if not _holds_tensor(value):
        return Value(value)
    if isinstance(tracked.param, DTensor) and not tracked.has_whole_state:
        raise PlacementError(
            f"{tracked.fqn}: state {entry!r} is a {type(value).__name__} that holds tensors; nothing says how they are "
            f"sharded over {tracked.param.placements}. Keep such state as DTensors placed like the parameter; or "
            f"declare layouts={{{entry!r}: 'rank_local'}}, each rank's own and for the same shards only."
        )
    return Whole(value)


def _infer_dtensor(tracked: Tracked, entry: str, value: DTensor) -> Layout:
    param = tracked.param
    if (
        isinstance(param, DTensor)
        and not tracked.has_whole_state
        and tuple(value.shape) == tracked.shape
        and same_spec(value, param)
    ):
        return Elementwise(local_shard(value))
    where = param.placements if isinstance(param, DTensor) else "not sharded"
    raise PlacementError(
        f"{tracked.fqn}: state {entry!r} is a DTensor of shape {tuple(value.shape)} placed {value.placements}; the "
        f"parameter has shape {tracked.shape} placed {where}. Only state of the parameter's shape and placement can be "
        "resharded; keep it so, or keep scalars as 0-d plain tensors."
    )


def _infer_tensor(tracked: Tracked, entry: str, value: Tensor, elementwise: bool) -> Layout:
    shape = tuple(value.shape)
    if elementwise:
        box = tracked.state_box
        if box is not None and shape == box.size:
            return Elementwise(value)
        if tracked.has_whole_state and isinstance(tracked.param, DTensor):
            return Whole(value)
        raise PlacementError(
            f"{tracked.fqn}: state {entry!r} has shape {shape}, expected this rank's shard {tracked.box.size} of the "
            f"global shape {tracked.shape}. It was made for another sharding; rebuild the optimizer and load its state."
        )
    if shape == ():
        return Value(value)
    if not isinstance(tracked.param, DTensor) or tracked.has_whole_state:
        return Whole(value)
    hint = " That is the parameter's global shape: it was made on every rank in full." * (shape == tracked.shape)
    raise PlacementError(
        f"{tracked.fqn}: state {entry!r} is a plain tensor of shape {shape} beside a parameter of global shape "
        f"{tracked.shape} sharded {tracked.param.placements}; nothing says which part of the state it is.{hint} "
        "Keep it as a DTensor placed like the parameter."
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return any(_holds_tensor(item) for item in value)
    return saved_as(type(value)) is not None and _holds_tensor(fields_of_object(value))
