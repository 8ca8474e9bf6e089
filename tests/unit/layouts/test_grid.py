"""Blocks in global coordinates, against a count of every element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardopt.geometry import Box
from shardopt.layouts.codec import Form
from shardopt.layouts.grid import Grid, common_block, flat_range
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


@given(boxes(), st.data())
def test_blocks_of_the_common_length_lie_within_one_block_each(
    given: tuple[tuple[int, ...], Box], data: st.DataObject
) -> None:
    shape, box = given
    # The parameter cut in two along a dim, each part with blocks of its own; any box of it.
    dim = data.draw(st.integers(0, max(0, len(shape) - 1)))
    frames = [Box.whole(shape)]
    if shape:
        cut = data.draw(st.integers(0, shape[dim]))
        first = [*shape[:dim], cut, *shape[dim + 1 :]]
        rest = [*shape[:dim], shape[dim] - cut, *shape[dim + 1 :]]
        start = tuple(cut if one == dim else 0 for one in range(len(shape)))
        frames = [Box((0,) * len(shape), tuple(first)), Box(start, tuple(rest))]
    framed = [(frame, data.draw(st.integers(1, 12))) for frame in frames if frame.volume]
    owner = torch.full(shape, -1)
    for number, (frame, block) in enumerate(framed):
        own = (torch.arange(frame.volume) // block).view(frame.size) + 1000 * number
        part(owner, frame).copy_(own)
    touching = [(frame, block) for frame, block in framed if frame.intersect(box) is not None]
    common = common_block(shape, box, touching)
    if not box.volume:
        assert common == 1
        return
    assert box.volume % common == 0
    blocks = part(owner, box).reshape(-1, common)
    assert bool((blocks == blocks[:, :1]).all())


@pytest.mark.parametrize(
    ("shape", "box", "framed", "expected"),
    [
        ((16, 24), Box((4, 0), (4, 24)), [(Box((0, 0), (8, 24)), 96)], 96),  # a half of whole blocks
        ((16, 24), Box((0, 0), (16, 24)), [(Box((0, 0), (8, 24)), 96), (Box((8, 0), (8, 24)), 64)], 32),
        ((16, 24), Box((0, 12), (16, 12)), [(Box((0, 0), (16, 24)), 8)], 4),  # a block ends within the row
        ((101,), Box((26,), (26,)), [(Box((0,), (51,)), 17), (Box((51,), (50,)), 10)], 1),
        ((9, 8), Box((0, 0), (3, 8)), [(Box((0, 0), (3, 8)), 24)], 24),  # the same shard
        ((8, 9), Box((0, 3), (8, 3)), [(Box((0, 3), (8, 3)), 24)], 24),  # which need be no run
        ((), Box((), ()), [(Box((), ()), 1)], 1),
    ],
)
def test_the_common_length_is_as_great_as_can_be(
    shape: tuple[int, ...], box: Box, framed: list[tuple[Box, int]], expected: int
) -> None:
    assert common_block(shape, box, framed) == expected
