"""Blocks of a parameter's elements in global coordinates: pure integers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardopt.geometry import Box

__all__ = ["Grid", "common_block", "covering_of_any", "flat_range"]


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks that a quantiser makes of a whole parameter: consecutive elements, row by row, ``block`` at a time.

    A tensor with a cell for each block has the parameter's shape with its last dim divided, so that a box of the
    parameter is a box of cells; where blocks cross rows, it has one dim.

    Attributes:
        param_shape: the parameter's global shape.
        block: elements of a block; the last one may have fewer.
    """

    param_shape: tuple[int, ...]
    block: int

    @property
    def by_rows(self) -> bool:
        """Whether every row is whole blocks."""
        return bool(self.param_shape) and self.param_shape[-1] > 0 and self.param_shape[-1] % self.block == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor with a cell for each block."""
        if self.by_rows:
            return (*self.param_shape[:-1], self.param_shape[-1] // self.block)
        return (-(-math.prod(self.param_shape) // self.block),)

    def covering(self, box: Box) -> Box:
        """The cells whose blocks have elements of the box, and where those are no box of cells, some more."""
        if self.by_rows:
            first, end = box.offset[-1] // self.block, -(-box.end[-1] // self.block)
            return Box((*box.offset[:-1], first), (*box.size[:-1], end - first if box.size[-1] else 0))
        if not box.volume:
            return Box((0,), (0,))
        start, stop = flat_range(self.param_shape, box) or (0, math.prod(self.param_shape))
        return Box((start // self.block,), (-(-stop // self.block) - start // self.block,))

    def holds(self, box: Box) -> bool:
        """Whether the blocks of a tensor that is this box, counted from its own first element, are these blocks."""
        if not box.volume:
            return True
        if self.by_rows and box.offset[-1] % self.block == 0 and box.size[-1] % self.block == 0:
            return True
        run = flat_range(self.param_shape, box)
        if run is None or run[0] % self.block:
            return False
        return run[1] % self.block == 0 or run[1] == math.prod(self.param_shape)


def flat_range(shape: tuple[int, ...], box: Box) -> tuple[int, int] | None:
    """First and last-but-one number of a box's elements, counted row by row; None if others lie between them."""
    split = next((dim for dim, size in enumerate(box.size) if size != 1), len(shape))
    if any(box.size[dim] != shape[dim] for dim in range(split + 1, len(shape))):
        return None
    start = 0
    for offset, length in zip(box.offset, shape, strict=True):
        start = start * length + offset
    return start, start + box.volume


def common_block(param_shape: tuple[int, ...], box: Box, framed: Iterable[tuple[Box, int]]) -> int:
    """The greatest length found with which every block of a box lies within one block of a frame.

    Args:
        param_shape: the parameter's global shape.
        box: whose blocks are asked for, counted over its own elements.
        framed: boxes that cover it, each with the length of its own blocks.

    Returns:
        A divisor of the box's number of elements; 1 for a box without any.
    """
    framed = list(framed)
    if not box.volume or not framed:
        return 1
    if all(frame == box for frame, _ in framed):
        return math.gcd(box.volume, *(block for _, block in framed))
    # By the row: blocks that never cross one. In a row, all that counts is where frames begin and end.
    by_row = 1
    if box.size:
        by_row = math.gcd(box.size[-1], *(block for _, block in framed))
        for frame, _ in framed:
            by_row = math.gcd(by_row, frame.size[-1], box.offset[-1] - frame.offset[-1])
    # In one run of numbers, if all of them are such.
    run = flat_range(param_shape, box)
    runs = [(flat_range(param_shape, frame), block) for frame, block in framed]
    if run is None or any(one is None for one, _ in runs):
        return by_row
    flat = box.volume
    for one, block in runs:
        assert one is not None
        flat = math.gcd(flat, block, one[0] - run[0])
    return max(by_row, flat)


def covering_of_any(param_shape: tuple[int, ...], cells_shape: tuple[int, ...], box: Box) -> Box | None:
    """Cells that cover a box, for whatever size of blocks there are so many of; None if there is none."""
    rows = param_shape[-1] if param_shape else 0
    if len(param_shape) > 1 and len(cells_shape) == len(param_shape):
        fits = cells_shape[:-1] == param_shape[:-1] and cells_shape[-1] and rows % cells_shape[-1] == 0
        return Grid(param_shape, rows // cells_shape[-1]).covering(box) if fits else None
    num_elements, num_cells = math.prod(param_shape), math.prod(cells_shape)
    if len(cells_shape) != 1 or not num_cells or not box.volume:
        return Box((0,), (0,)) if len(cells_shape) == 1 else None
    # Of all such sizes the least counts cells fastest, the largest slowest.
    least = -(-num_elements // num_cells)
    largest = (num_elements - 1) // (num_cells - 1) if num_cells > 1 else num_elements
    start, stop = flat_range(param_shape, box) or (0, num_elements)
    first = start // largest
    return Box((first,), (min((stop - 1) // least + 1, num_cells) - first,))
