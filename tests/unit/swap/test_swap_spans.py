"""Spans cover every element of a shard once, and say which element of the unsharded tensor it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.swap.spans import Spans, dense_strides, spans_of


def elements(spans: Spans) -> list[tuple[int, int, int]]:
    """Offset in the parameter, offset in dense memory and global index of every element."""
    return [
        (int(param) + i, int(state) + i, int(start) + i // spans.run * spans.stride + i % spans.run)
        for param, state, start in zip(spans.param_offsets, spans.state_offsets, spans.starts, strict=True)
        for i in range(spans.numel)
    ]


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Shape, strides, offset and whole shape of a box of a tensor in memory of any order, with gaps or without."""
    whole = draw(st.lists(st.integers(1, 4), min_size=0, max_size=5))
    offset = [draw(st.integers(0, size - 1)) for size in whole]
    shape = [draw(st.integers(0, size - at)) for size, at in zip(whole, offset, strict=True)]
    strides, step = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        # Not of the innermost one, of which neighbours are asked.
        gap = draw(st.integers(0, 2)) if step > 1 or shape[dim] > 1 else 0
        step *= shape[dim] + gap if shape[dim] > 1 else max(shape[dim], 1)
    return shape, strides, offset, whole


@pytest.mark.parametrize("indexed", [True, False])
@given(case=shards())
def test_every_element_is_covered_once_in_both_memories(
    case: tuple[list[int], list[int], list[int], list[int]], indexed: bool
) -> None:
    shape, strides, offset, whole = case
    dense = dense_strides(shape, strides)
    wanted = []
    for place in np.ndindex(*shape):
        index = 0
        for at, start, size in zip(place, offset, whole, strict=True):
            index = index * size + at + start
        flat = [sum(at * stride for at, stride in zip(place, by, strict=True)) for by in (strides, dense)]
        wanted.append((*flat, index))
    got = elements(spans_of(shape, strides, offset, whole, indexed=indexed))
    if not indexed:
        wanted, got = ([pair[:2] for pair in listed] for listed in (wanted, got))
    assert sorted(got) == sorted(wanted)
    assert sorted(state for _, state, *_ in got) == list(range(math.prod(shape)))


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "whole", "count", "run", "stride"),
    [
        ((6, 5), (5, 1), (0, 0), (6, 5), 1, 30, 0),
        ((3, 5), (5, 1), (3, 0), (6, 5), 1, 15, 0),
        ((6, 2), (2, 1), (0, 2), (6, 5), 1, 2, 5),
        ((2, 6, 2), (12, 2, 1), (0, 0, 2), (2, 6, 5), 1, 2, 5),
        ((2, 3, 2), (6, 2, 1), (0, 1, 2), (2, 6, 5), 2, 2, 5),
        ((6, 5), (1, 6), (0, 0), (6, 5), 5, 1, 5),
        ((6, 5), (8, 1), (0, 0), (6, 5), 6, 5, 0),
        ((), (), (), (), 1, 1, 0),
    ],
    ids=["whole", "rows", "columns", "columns of 3 dims", "two dims cut", "transposed", "gaps", "0-d"],
)
def test_usual_shards_take_few_spans(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: tuple[int, ...],
    whole: tuple[int, ...],
    count: int,
    run: int,
    stride: int,
) -> None:
    spans = spans_of(shape, strides, offset, whole, indexed=True)
    assert (len(spans.starts), spans.run, spans.stride) == (count, run, stride)


def test_without_an_index_dense_memory_of_any_order_is_one_span() -> None:
    assert len(spans_of((6, 5, 3), (1, 18, 6), (0, 0, 0), (6, 5, 3), indexed=False).starts) == 1


def test_elements_without_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="no two elements"):
        spans_of((4,), (2,), (0,), (4,), indexed=False)


def test_an_empty_shard_has_no_spans_G21() -> None:
    assert len(spans_of((0, 5), (5, 1), (0, 0), (6, 5), indexed=True).starts) == 0
