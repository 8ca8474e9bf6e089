"""Blocks in global coordinates, against a count of every element."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardopt.geometry import Box
from shardopt.layouts.codec import Form
from shardopt.layouts.grid import Grid, flat_range
from shardopt.layouts.quantised import Piece, Stored, apart, looked_up, together, unpacked, values_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    size = tuple(draw(st.integers(0, whole - start)) for whole, start in zip(shape, offset, strict=True))
    return shape, Box(offset, size)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def part(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))]


@given(boxes())
def test_a_range_is_all_of_the_boxs_elements_and_no_others(given: tuple[tuple[int, ...], Box]) -> None:
    shape, box = given
    found = sorted(part(numbered(shape), box).reshape(-1).tolist())
    run = flat_range(shape, box)
    if found:
        assert run == ((found[0], found[-1] + 1) if found[-1] - found[0] + 1 == len(found) else None)


@given(boxes(), st.integers(1, 7))
def test_the_cells_that_are_asked_for_cover_the_box(given: tuple[tuple[int, ...], Box], block: int) -> None:
    shape, box = given
    grid = Grid(shape, block)
    cells = numbered(grid.shape)
    asked = part(cells, grid.covering(box))
    needed = {number // block for number in part(numbered(shape), box).reshape(-1).tolist()}
    assert needed <= set(asked.reshape(-1).tolist())
    if box.volume:
        assert torch.equal(looked_up(grid, grid.covering(box), asked, box), part(numbered(shape), box) // block)


@given(boxes(), st.integers(1, 7))
def test_a_box_is_held_when_its_own_blocks_are_the_grids(given: tuple[tuple[int, ...], Box], block: int) -> None:
    shape, box = given
    grid = Grid(shape, block)
    numbers = part(numbered(shape), box).reshape(-1).tolist()
    own = [numbers[start : start + block] for start in range(0, len(numbers), block)]
    whole = numbered(shape).reshape(-1).tolist()
    blocks = [whole[start : start + block] for start in range(0, len(whole), block)]
    if grid.holds(box):
        assert all(one in blocks for one in own)
        assert math.prod(grid.covering(box).size) == len(own)
    elif all(one in blocks for one in own):
        # Blocks of one element, and blocks that lie well by chance in several rows, are still stored shard by shard.
        assert len(shape) > 1


@given(boxes(), boxes(), st.integers(1, 7), st.booleans())
def test_values_are_those_of_the_blocks_wherever_they_are_asked_for(
    given: tuple[tuple[int, ...], Box], other: tuple[tuple[int, ...], Box], block: int, has_codes: bool
) -> None:
    shape, frame = given
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, frame.size, dtype=torch.uint8, generator=generator)
    scales = torch.rand(-(-frame.volume // block), generator=generator)
    table = torch.randn(256, generator=generator)
    flat = (torch.arange(frame.volume) // block).view(frame.size)
    expected = table[codes.int()] * scales[flat] if has_codes else scales[flat]
    form = Form(block=block, codes=torch.uint8 if has_codes else None, table=table if has_codes else None)
    box = frame.intersect(other[1]) if shape == other[0] else frame
    if box is None:
        return
    inner = Box(tuple(a - b for a, b in zip(box.offset, frame.offset, strict=True)), box.size)
    own = part(codes, inner)
    got = values_of(box, own if has_codes else None, [Piece(frame, Stored(form, frame, scales))])
    assert torch.equal(got, part(expected, inner))


@given(boxes())
def test_pairs_come_apart_wherever_they_are_asked_for(given: tuple[tuple[int, ...], Box]) -> None:
    shape, box = given
    if math.prod(shape) % 2:
        return
    codes = (numbered(shape) * 7 % 16).to(torch.uint8)
    grid = Grid(shape, 2)
    packed = together(codes, 2).view(grid.shape)
    assert torch.equal(apart(packed, 2), codes.reshape(-1))
    cells = grid.covering(box)
    assert torch.equal(unpacked(grid, cells, part(packed, cells), box), part(codes, box))
