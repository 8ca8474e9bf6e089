"""What becomes of parameters when a rule is tried on parts of them, and how that differs from whole ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardopt.layouts.declared import ATTRIBUTE

__all__ = ["TriedPart", "TriedRun", "first_difference"]


@dataclass(frozen=True, slots=True)
class TriedPart:
    """A parameter, or what one rank holds of it."""

    index: int
    dim: int | None = None
    start: int = 0
    length: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True, slots=True)
class TriedRun:
    """What became of parts of parameters: values after each step, state and group values after the last one."""

    parts: list[TriedPart]
    history: list[list[Tensor]]
    states: list[Mapping[str, Any]]
    groups: list[Mapping[str, Any]]
    beside: Mapping[Any, Any]
    drew: bool

    def attributes(self) -> frozenset[str]:
        """Attributes with plain values that the steps have changed."""
        told = (key for key in self.beside if isinstance(key, str) and key.startswith(ATTRIBUTE))
        return frozenset(key.removeprefix(ATTRIBUTE) for key in told)

    def tensors(self) -> set[str]:
        """Entries that are tensors with dimensions."""
        return {
            name for state in self.states for name, value in state.items() if isinstance(value, Tensor) and value.dim()
        }

    def elementwise(self) -> set[str]:
        """Entries with the shape of their parameter wherever that has dimensions to tell it by."""
        shaped: dict[str, bool] = {}
        for value, state in zip(self.history[-1], self.states, strict=True):
            for name, entry in state.items():
                if value.dim() and isinstance(entry, Tensor):
                    shaped[name] = shaped.get(name, True) and entry.shape == value.shape
        return {name for name, all_are in shaped.items() if all_are}


def first_difference(run: TriedRun, whole: TriedRun) -> str | None:
    """What a run of parts has other than the run of whole parameters, in words; None for nothing."""
    for step, values in enumerate(run.history):
        for part, got in zip(run.parts, values, strict=True):
            if not _same(got, part.of(whole.history[step][part.index])):
                return f"get other bits than the whole at step {step + 1}"
    for part, state in zip(run.parts, run.states, strict=True):
        entry = _unlike(part, state, whole.states[part.index], whole.history[-1][part.index].shape)
        if entry is not None:
            return f"keep a state {entry!r} that is no part of the whole one's"
    for group, other in zip(run.groups, whole.groups, strict=True):
        name = _unlike(TriedPart(0), group, other)
        if name is not None:
            return f"have another value of {name!r} in their groups"
    name = _unlike(TriedPart(0), run.beside, whole.beside)
    return None if name is None else f"have another value of {name!r} in the state of the optimizer"


def _unlike(
    part: TriedPart, state: Mapping[Any, Any], whole: Mapping[Any, Any], shape: tuple[int, ...] = ()
) -> str | None:
    """An entry of a part that is neither that part of the whole one nor the same as it; None if there is none."""
    if part.dim is not None and not part.length:
        return None
    for name in {**state, **whole}:
        one, other = state.get(name), whole.get(name)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            # Blocks of a quantised entry, say, are not cut where the parameter is.
            cut = part.dim is not None and one.shape != other.shape and tuple(other.shape) == shape
            alike = _same(one, part.of(other) if cut else other)
        else:
            # What holds tensors, or may hold any, is cut by nobody.
            held = part.dim is not None and not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves((one, other)))
            alike = not held and _alike(one, other)
        if not alike:
            return name
    return None


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors in them bit by bit; of objects that say nothing of it, only the kind."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one).__eq__ is object.__eq__ or bool(one == other) or (one != one and other != other)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
