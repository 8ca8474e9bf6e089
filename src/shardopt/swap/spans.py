"""A shard as flat spans of memory, and where each of its elements is in the unsharded tensor. Pure integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Spans", "dense_strides", "spans_of"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Contiguous pieces of a shard, all of one length.

    Element i of a piece is element ``start + i // run * stride + i % run`` of the unsharded tensor, row-major.

    Attributes:
        param_offsets: of each piece in the parameter's memory, in elements.
        state_offsets: the same in memory that is dense, as state and gradients have it.
        starts: index of each piece's first element in the unsharded tensor.
        numel: elements of a piece.
        run: neighbours of a piece that are neighbours in the unsharded tensor.
        stride: from one run to the next there.
    """

    param_offsets: NDArray[np.int64]
    state_offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    numel: int
    run: int
    stride: int


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of more than one element, or several that are like one.

    Attributes:
        size: elements along it.
        param: stride in the parameter's memory.
        state: stride in dense memory.
        index: stride in the unsharded tensor, row-major.
    """

    size: int
    param: int
    state: int
    index: int


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dims follow each other in memory as those of the given one do."""
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim] == 1, -dim))
    dense = [0] * len(shape)
    step = 1
    for dim in order:
        dense[dim] = step
        step *= max(shape[dim], 1)
    return tuple(dense)


def spans_of(
    shape: Sequence[int],
    strides: Sequence[int],
    offset: Sequence[int],
    whole: Sequence[int],
    *,
    indexed: bool,
) -> Spans:
    """The spans of one shard.

    Args:
        shape: of the shard.
        strides: of its memory; no two elements share any.
        offset: of its first element in the unsharded tensor.
        whole: shape of that tensor.
        indexed: whether it matters which element is which. Then memory in another order than row-major is cut where
            its index has no such form: a transposed matrix has a span for each of its columns.

    Raises:
        ValueError: no two elements are neighbours in memory.
    """
    index_strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    start = sum(at * stride for at, stride in zip(offset, index_strides, strict=True))
    dims = [
        _Dim(*sizes)
        for sizes in zip(shape, strides, dense_strides(shape, strides), index_strides, strict=True)
        if sizes[0] != 1
    ]
    if not all(shape):
        none = np.empty(0, np.int64)
        return Spans(none, none, none, 0, 1, 0)
    # Outermost in memory first.
    dims.sort(key=lambda dim: -dim.param)
    if dims and dims[-1].param != 1:
        raise ValueError("no two elements of it are neighbours in memory")
    flat: list[_Dim] = []
    while dims and dims[-1].param == (flat[0].param * flat[0].size if flat else 1):
        flat.insert(0, dims.pop())
    inner = _inner(flat) if indexed else flat
    loops = [*dims, *flat[: len(flat) - _num_dims(flat, inner)]]
    numel = math.prod(dim.size for dim in flat[len(loops) - len(dims) :])
    run, stride = _run_of(inner, numel) if indexed else (numel, 0)
    return Spans(
        _offsets([(dim.size, dim.param) for dim in loops]),
        _offsets([(dim.size, dim.state) for dim in loops]),
        _offsets([(dim.size, dim.index) for dim in loops]) + start,
        numel,
        max(run, 1),
        stride,
    )


def _inner(flat: Sequence[_Dim]) -> list[_Dim]:
    """The innermost dims that one run and one stride can tell, merged where they are like one: at most two of them."""
    merged: list[_Dim] = []
    for dim in reversed(flat):
        if merged and dim.index == merged[0].index * merged[0].size:
            first = merged[0]
            merged[0] = _Dim(first.size * dim.size, first.param, first.state, first.index)
            continue
        # Of elements that are no neighbours, each is a run of its own, and the stride leads to the next.
        if merged and len(merged) == (2 if merged[-1].index == 1 else 1):
            break
        merged.insert(0, dim)
    return merged


def _num_dims(flat: Sequence[_Dim], inner: Sequence[_Dim]) -> int:
    """How many of the flat dims, from the innermost, have gone into ``inner``."""
    size, count = math.prod(dim.size for dim in inner), 0
    covered = 1
    while covered < size:
        count += 1
        covered *= flat[-count].size
    return count


def _run_of(inner: Sequence[_Dim], numel: int) -> tuple[int, int]:
    if not inner:
        return numel, 0
    if inner[-1].index != 1:
        return 1, inner[-1].index
    return inner[-1].size, inner[0].index if len(inner) == 2 else 0


def _offsets(loops: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Of all combinations, the outermost dim slowest."""
    found = np.zeros(1, np.int64)
    for size, stride in loops:
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return found
