"""How state memory is laid out and cut into chunks that stream to a device. Pure integers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardopt.swap.spans import Spans

__all__ = ["ALIGNMENT", "CHUNK_ROW", "Chunk", "Layout", "Part", "cut_chunks", "plan_layout"]

# Elements: 64 bytes of the narrowest entry (bf16, int16), 128 of float32. A parameter of any other number of elements
# is followed by a gap, of 31 elements at most.
ALIGNMENT = 32

# A flat span of a parameter's elements, all of it in one chunk. In elements, but for the parameter's number.
CHUNK_ROW = np.dtype(
    [
        ("param", np.int64),  # which of the parameters
        ("param_offset", np.int64),  # in the parameter's memory
        ("dense_offset", np.int64),  # in dense memory, as the gradient's
        ("offset", np.int64),  # in each entry of the chunk
        ("numel", np.int64),
        ("index_start", np.int64),  # these three as in kernel_rows.ROW
        ("index_run", np.int64),
        ("index_stride", np.int64),
    ]
)


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's state.

    Attributes:
        kind: what all rows of a launch must have in common; state of one kind has one memory.
        spans: of the parameter.
    """

    kind: Hashable
    spans: Spans

    @property
    def numel(self) -> int:
        """Elements of each of its entries."""
        return len(self.spans.starts) * self.spans.numel


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the state of each parameter lies in the memory of its kind.

    Every entry (exp_avg, ...) of a kind has a memory of its own, and in each of them a parameter's piece begins at the
    same element: a range of elements is one contiguous range of each entry.

    Attributes:
        starts: the first element of each parameter, a multiple of ``ALIGNMENT``.
        lengths: elements of each kind, gaps included.
    """

    starts: list[int]
    lengths: dict[Hashable, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of elements of one kind's memory that is on the device at one time.

    Attributes:
        kind: whose memory it is.
        start: its first element there, a multiple of ``ALIGNMENT``.
        end: behind its last one.
        rows: [num_rows], CHUNK_ROW: what lies in it, gaps left out, in the order of memory.
    """

    kind: Hashable
    start: int
    end: int
    rows: NDArray[np.void]


def plan_layout(kinds: Sequence[Hashable], numels: Sequence[int]) -> Layout:
    """Lays out the state of parameters, in their order.

    Gaps are left only behind parameters whose number of elements is no multiple of ``ALIGNMENT``: none at all for 300
    tensors of 64x64, less than 1 % where such parameters have 3,100 elements or more on average.

    Args:
        kinds: of each parameter.
        numels: elements of each parameter.
    """
    starts: list[int] = []
    lengths: dict[Hashable, int] = {}
    for kind, numel in zip(kinds, numels, strict=True):
        start = -(-lengths.get(kind, 0) // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        lengths[kind] = start + numel
    return Layout(starts, lengths)


def cut_chunks(
    parts: Sequence[Part],
    layout: Layout,
    *,
    element_bytes: Mapping[Hashable, int],
    chunk_bytes: int,
    block: int,
) -> list[Chunk]:
    """Cuts all memory into chunks, each as large as may be: of several small parameters, or of pieces of large ones.

    A parameter is cut at multiples of ``block`` elements from its own start, so that its pieces are aligned as it is.

    Args:
        parts: the parameters.
        layout: of their state.
        element_bytes: of each kind, one element of all its entries together.
        chunk_bytes: at most, in all entries together.
        block: a multiple of ``ALIGNMENT``.

    Raises:
        ValueError: a chunk cannot hold one block, or ``block`` is no multiple; all problems are listed.
    """
    problems = [
        f"chunk_bytes is {chunk_bytes}; {block} elements of {kind} take {block * element_bytes[kind]}, the least there "
        "can be in a chunk"
        for kind in layout.lengths
        if chunk_bytes < block * element_bytes[kind]
    ]
    if block < 1 or block % ALIGNMENT:
        problems.append(f"block is {block}; it must be a multiple of {ALIGNMENT}")
    if problems:
        raise ValueError("\n".join(problems))
    members: dict[Hashable, list[int]] = {kind: [] for kind in layout.lengths}
    for index, part in enumerate(parts):
        members[part.kind].append(index)
    return [
        _chunk(kind, cuts, parts, layout)
        for kind, indices in members.items()
        for cuts in _cuts(indices, parts, layout, most=chunk_bytes // element_bytes[kind], block=block)
    ]


def _cuts(
    indices: Sequence[int], parts: Sequence[Part], layout: Layout, *, most: int, block: int
) -> Iterator[list[tuple[int, int, int]]]:
    """What each chunk of a kind holds: a parameter's number, and the range of its elements."""
    held: list[tuple[int, int, int]] = []
    first = 0
    for index in indices:
        done, numel = 0, parts[index].numel
        while done < numel:
            place = layout.starts[index] + done
            if not held:
                first = place
            room = most - (place - first)
            # What is left of a parameter goes in as a whole, or as blocks.
            taken = numel - done if numel - done <= room else room // block * block
            if taken > 0:
                held.append((index, done, done + taken))
                done += taken
            if done < numel:
                yield held
                held = []
    if held:
        yield held


def _chunk(kind: Hashable, cuts: Sequence[tuple[int, int, int]], parts: Sequence[Part], layout: Layout) -> Chunk:
    first, begin, _ = cuts[0]
    last, _, end = cuts[-1]
    start = layout.starts[first] + begin
    rows = [
        _rows(index, parts[index].spans, low, high, offset=layout.starts[index] - start) for index, low, high in cuts
    ]
    return Chunk(kind, start, layout.starts[last] + end, np.concatenate(rows))


def _rows(index: int, spans: Spans, begin: int, end: int, *, offset: int) -> NDArray[np.void]:
    """Rows of a range of a parameter's elements, counted in dense memory.

    Args:
        index: the parameter's number.
        spans: of the parameter.
        begin: first element.
        end: behind the last one.
        offset: of the parameter's own first element in the chunk; negative where that is in an earlier one.
    """
    which = np.arange(begin // spans.numel, -(-end // spans.numel))
    low = np.maximum(begin - which * spans.numel, 0)
    high = np.minimum(end - which * spans.numel, spans.numel)
    # A row begins with a whole run or lies within one: what is left of a cut run is a row of its own.
    run_end = -(-low[0] // spans.run) * spans.run
    if low[0] < run_end < high[0]:
        which = np.insert(which, 0, which[0])
        low, high = np.insert(low, 1, run_end), np.insert(high, 0, run_end)
    rows = np.zeros(len(which), CHUNK_ROW)
    rows["param"] = index
    rows["param_offset"] = spans.param_offsets[which] + low
    rows["dense_offset"] = spans.state_offsets[which] + low
    rows["offset"] = rows["dense_offset"] + offset
    rows["numel"] = high - low
    rows["index_start"] = spans.starts[which] + low // spans.run * spans.stride + low % spans.run
    rows["index_run"], rows["index_stride"] = spans.run, spans.stride
    return rows
