"""Every element of every parameter is in one chunk, once, where its state is; chunks keep their size and alignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardopt.swap.chunks import ALIGNMENT, Chunk, Part, cut_chunks, plan_layout
from shardopt.swap.spans import Spans, dense_strides, spans_of

BLOCK = 64
# Two float32 moments; two of bf16 and a remainder.
BYTES = {"wide": 8, "narrow": 6}


def flat(numel: int) -> Spans:
    return spans_of((numel,), (1,), (0,), (numel,), indexed=True)


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    """Of shards cut along some dim, of memory with gaps, in any order of dims."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1) + (draw(st.integers(0, 2)) if step > 1 else 0)
    before = [draw(st.integers(0, 3)) for _ in shape]
    whole = [size + start + draw(st.integers(0, 3)) for size, start in zip(shape, before, strict=True)]
    indexed = draw(st.booleans())
    dense = math.prod(shape) > 0 and 1 in strides
    return spans_of(shape, strides, before, whole, indexed=indexed) if dense else flat(draw(st.integers(0, 700)))


PARTS = st.lists(st.builds(Part, st.sampled_from(sorted(BYTES)), spans()), max_size=12)


def cut(parts: Sequence[Part], chunk_bytes: int, block: int = BLOCK) -> tuple[list[int], list[Chunk]]:
    layout = plan_layout([part.kind for part in parts], [part.numel for part in parts])
    return layout.starts, cut_chunks(parts, layout, element_bytes=BYTES, chunk_bytes=chunk_bytes, block=block)


def elements(row: np.void) -> Iterator[tuple[int, int, int, int]]:
    """Of each element of a row: where it is in the parameter's memory, in dense memory, in the chunk, in the whole."""
    for at in range(int(row["numel"])):
        index = row["index_start"] + at // row["index_run"] * row["index_stride"] + at % row["index_run"]
        yield int(row["param_offset"]) + at, int(row["dense_offset"]) + at, int(row["offset"]) + at, int(index)


def wanted(part: Part) -> dict[int, tuple[int, int]]:
    """Of each element, by its place in dense memory: where it is in the parameter's memory, and in the whole."""
    one = part.spans
    return {
        int(dense) + at: (int(offset) + at, int(start) + at // one.run * one.stride + at % one.run)
        for offset, dense, start in zip(one.param_offsets, one.state_offsets, one.starts, strict=True)
        for at in range(one.numel)
    }


@settings(deadline=None, max_examples=150)
@given(PARTS, st.integers(8 * BLOCK, 8 * BLOCK * 5))
def test_each_element_is_in_one_chunk_where_its_state_is(parts: list[Part], chunk_bytes: int) -> None:
    starts, chunks = cut(parts, chunk_bytes)
    found: list[dict[int, tuple[int, int]]] = [{} for _ in parts]
    for chunk in chunks:
        for row in chunk.rows:
            param = int(row["param"])
            assert parts[param].kind == chunk.kind
            for in_param, dense, in_chunk, index in elements(row):
                assert chunk.start + in_chunk == starts[param] + dense < chunk.end
                assert dense not in found[param]
                found[param][dense] = in_param, index
    assert found == [wanted(part) for part in parts]


@settings(deadline=None, max_examples=150)
@given(PARTS, st.integers(8 * BLOCK, 8 * BLOCK * 5))
def test_chunks_are_apart_aligned_and_as_large_as_they_may_be(parts: list[Part], chunk_bytes: int) -> None:
    starts, chunks = cut(parts, chunk_bytes)
    for kind, size in BYTES.items():
        own = [chunk for chunk in chunks if chunk.kind == kind]
        most = chunk_bytes // size
        for chunk in own:
            assert 0 < chunk.end - chunk.start <= most
            assert chunk.start % ALIGNMENT == 0
            first = chunk.rows[0]
            # A parameter's first row in a chunk is as aligned as the parameter is.
            assert first["offset"] == 0
            assert first["dense_offset"] % BLOCK == 0
        for left, right in itertools.pairwise(own):
            assert left.end <= right.start
            # The next one's first block, or all of its parameter, would have been too much.
            param = int(right.rows[0]["param"])
            rest = starts[param] + parts[param].numel - right.start
            assert right.start + min(rest, BLOCK) - left.start > most


def of_model(shapes: Sequence[tuple[int, ...]]) -> float:
    """Bytes that the layout takes, by those that are needed."""
    numels = [math.prod(shape) for shape in shapes]
    return plan_layout(["one"] * len(numels), numels).lengths["one"] / sum(numels)


def test_gaps_are_at_most_one_percent_of_models() -> None:
    assert of_model([(64, 64)] * 300) == 1.0
    block = [(4096, 4096)] * 4 + [(11008, 4096)] * 3 + [(4096,)] * 2
    assert of_model([(32000, 4096), *block * 4, (4096,)]) == 1.0
    # Of odd sizes: 7 ranks' shards of a small vision model with biases, a class head, a temperature.
    odd = [(110, 768), (110,), (439, 768), (439,), (143, 768), (1,)] * 12
    assert 1.0 < of_model(odd) < 1.01
    # The price of alignment, where nothing else is there.
    assert of_model([(1,)] * 5000) > 30


def test_several_small_parameters_share_a_chunk_and_kinds_do_not() -> None:
    parts = [Part("wide", flat(40)), Part("narrow", flat(10)), Part("wide", flat(20)), Part("wide", flat(1))]
    _, chunks = cut(parts, 8 * BLOCK * 10)
    assert [(chunk.kind, chunk.rows["param"].tolist(), chunk.end) for chunk in chunks] == [
        ("wide", [0, 2, 3], 97),
        ("narrow", [1], 10),
    ]
    assert chunks[0].rows["offset"].tolist() == [0, 64, 96]


def test_a_run_that_is_cut_goes_on_in_a_row_of_its_own() -> None:
    # A matrix of 4 rows of 50 that is columns 10 to 60 of another one.
    part = Part("wide", spans_of((4, 50), (50, 1), (0, 10), (4, 100), indexed=True))
    assert (part.spans.run, part.spans.stride) == (50, 100)
    _, chunks = cut([part], 8 * BLOCK)
    second: NDArray[np.void] = chunks[1].rows
    assert second["dense_offset"].tolist() == [64, 100]
    assert second["index_start"].tolist() == [100 + 10 + 14, 200 + 10]
    assert second["numel"].tolist() == [36, 28]


def test_memory_in_another_order_is_told_by_its_dense_order() -> None:
    shape, strides = (3, 4, 5), (1, 20, 4)
    one = spans_of(shape, strides, (0, 0, 0), shape, indexed=True)
    assert (one.state_offsets == np.arange(len(one.starts)) * one.numel).all()
    assert dense_strides(shape, strides) != strides


def test_what_no_chunk_can_hold_is_refused() -> None:
    parts = [Part("wide", flat(40)), Part("narrow", flat(10))]
    with pytest.raises(ValueError, match=r"is 383; 64 elements of wide take 512[^\n]*\n[^\n]*narrow take 384"):
        cut(parts, 6 * BLOCK - 1)
    with pytest.raises(ValueError, match="block is 48; it must be a multiple of 32"):
        cut(parts, 6 * BLOCK * 10, block=48)


def test_a_parameter_without_elements_is_in_no_chunk() -> None:
    parts = [Part("wide", flat(0)), Part("wide", flat(5)), Part("wide", flat(0))]
    _, chunks = cut(parts, 8 * BLOCK)
    assert [chunk.rows["param"].tolist() for chunk in chunks] == [[1]]
    assert cut(parts[:1], 8 * BLOCK)[1] == []
