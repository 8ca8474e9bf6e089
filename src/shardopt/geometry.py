"""Boxes in a tensor's global coordinates: pure integers, no tensors, no ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "missing"]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box of elements of a global tensor.

    Attributes:
        offset: first element along each dim.
        size: number of elements along each dim, same length as ``offset``; 0-d tensors use ``()``.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise ValueError(f"box offset {self.offset} and size {self.size} differ in length")
        if any(o < 0 for o in self.offset) or any(s < 0 for s in self.size):
            raise ValueError(f"box offset {self.offset} and size {self.size} must not be negative")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element along each dim."""
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The elements both boxes hold, or None when there are none."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        size = tuple(e - s for s, e in zip(start, stop, strict=True))
        if any(s <= 0 for s in size):
            return None
        return Box(start, size)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box; true for an empty ``other``."""
        return other.volume == 0 or self.intersect(other) == other

    def minus(self, other: Box) -> list[Box]:
        """What is left of this box without ``other``: at most two boxes a dim, none of them empty."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.volume else []
        rest: list[Box] = []
        offset, size = list(self.offset), list(self.size)
        for dim in range(len(offset)):
            before = common.offset[dim] - offset[dim]
            after = offset[dim] + size[dim] - common.end[dim]
            if before:
                rest.append(Box(tuple(offset), (*size[:dim], before, *size[dim + 1 :])))
            if after:
                start = (*offset[:dim], common.end[dim], *offset[dim + 1 :])
                rest.append(Box(start, (*size[:dim], after, *size[dim + 1 :])))
            offset[dim], size[dim] = common.offset[dim], common.size[dim]
        return rest


def missing(box: Box, delivered: Sequence[Box]) -> Box | None:
    """The first part of ``box`` that no delivered box holds, or None when all of it is there.

    Delivered boxes may overlap and may reach outside ``box``.
    """
    if box.volume == 0 or any(piece.contains(box) for piece in delivered):
        return None
    rest = [box]
    for piece in delivered:
        rest = [left for part in rest for left in part.minus(piece)]
        if not rest:
            return None
    return min(rest, key=lambda part: part.offset)
