"""What a manifest says of a quantised entry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import dtype_from_name, is_dtype_name

__all__ = [
    "BLOCKWISE_FIELDS",
    "BlockwiseEntry",
    "Segment",
    "blockwise_contradictions",
    "blockwise_json",
    "overlapping_spans",
    "read_blockwise",
]

_T = TypeVar("_T")

BLOCKWISE_FIELDS = frozenset(("layout", "codec", "codes", "per_byte", "scales", "block", "table", "segments"))


@dataclass(frozen=True, slots=True)
class Segment:
    """One shard of a quantised entry whose blocks are not those of the whole parameter.

    Attributes:
        offset: of the shard in the parameter.
        size: of the shard; blocks are counted over its elements, row by row.
        at: the byte of ``blob.<fqn>`` at which its scales begin, or its values.
        block: elements of a block; None when the shard is not quantised.
        table: what its codes mean, a name in ``extra["tables"]``; None when codes are numbers.
        values: dtype of its values when it is not quantised.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    at: int
    block: int | None
    table: str | None
    values: str | None


@dataclass(frozen=True, slots=True)
class BlockwiseEntry:
    """Quantised: codes as boxes under ``state.<fqn>.<entry>``, and a scale for each block of elements.

    Scales are boxes of a tensor with a cell for each block, under ``state.<fqn>.<entry>.scale``; where the blocks of
    shards are not those of the whole parameter, they are in ``blob.<fqn>``, shard by shard.

    Attributes:
        codec: name of the quantisation.
        codes: dtype of the codes; None when there are none.
        per_byte: codes in a byte.
        scales: dtype of the scales.
        block: elements of a block; None with segments.
        table: what codes mean, a name in ``extra["tables"]``; None when codes are numbers, or with segments.
        segments: the shards, if each has blocks of its own.
    """

    layout: ClassVar[str] = "blockwise"
    codec: str
    codes: str | None
    per_byte: int
    scales: str
    block: int | None
    table: str | None
    segments: tuple[Segment, ...] = ()


def blockwise_json(entry: BlockwiseEntry) -> dict[str, Json]:
    """The entry as a manifest has it."""
    return {
        "layout": entry.layout,
        "codec": entry.codec,
        "codes": entry.codes,
        "per_byte": entry.per_byte,
        "scales": entry.scales,
        "block": entry.block,
        "table": entry.table,
        "segments": [
            [list(one.offset), list(one.size), one.at, one.block, one.table, one.values] for one in entry.segments
        ],
    }


def read_blockwise(fields: Mapping[str, Json]) -> BlockwiseEntry | str:
    """The entry of an object with ``BLOCKWISE_FIELDS``, or what is wrong with it."""
    try:
        segments = fields.get("segments")
        if not isinstance(segments, list):
            raise _Wrong("segments", segments, "a list")
        return BlockwiseEntry(
            codec=_text(fields.get("codec"), "codec"),
            codes=_maybe(_text, fields.get("codes"), "codes"),
            per_byte=_count(fields.get("per_byte"), "per_byte"),
            scales=_text(fields.get("scales"), "scales"),
            block=_maybe(_count, fields.get("block"), "block"),
            table=_maybe(_text, fields.get("table"), "table"),
            segments=tuple(map(_segment, segments)),
        )
    except _Wrong as wrong:
        return str(wrong)


class _Wrong(ValueError):
    def __init__(self, name: str, got: Json, expected: str) -> None:
        super().__init__(f"{name} is {got!r:.80}, expected {expected}")


def _segment(encoded: Json) -> Segment:
    if not isinstance(encoded, list) or len(encoded) != 6:
        raise _Wrong("a shard", encoded, "[offset, size, at, block, table, values]")
    offset, size, at, block, table, values = encoded
    return Segment(
        _counts(offset, "offset"),
        _counts(size, "size"),
        _count(at, "at"),
        _maybe(_count, block, "block"),
        _maybe(_text, table, "table"),
        _maybe(_text, values, "values"),
    )


def _text(value: Json, name: str) -> str:
    if not isinstance(value, str):
        raise _Wrong(name, value, "text")
    return value


def _count(value: Json, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Wrong(name, value, "a whole number of 0 or more")
    return value


def _counts(value: Json, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _Wrong(name, value, "a list of whole numbers")
    return tuple([_count(one, name) for one in value])


def _maybe(read: Callable[[Json, str], _T], value: Json, name: str) -> _T | None:
    return None if value is None else read(value, name)


def blockwise_contradictions(entry: BlockwiseEntry, shape: tuple[int, ...]) -> Iterator[str]:
    """What cannot be so, of an entry of a parameter of this shape."""
    dtypes = (entry.codes, entry.scales, *(one.values for one in entry.segments))
    for dtype in sorted({dtype for dtype in dtypes if dtype is not None}):
        if not is_dtype_name(dtype):
            yield f"dtype {dtype!r} is unknown to this torch; names are like 'uint8'"
    if entry.per_byte not in (1, 2):
        yield f"{entry.per_byte} codes in a byte"
    blocks = [one.block for one in entry.segments if one.values is None] or [entry.block]
    if any(block is None or block < 1 or (entry.per_byte == 2 and block % 2) for block in blocks):
        yield f"blocks of {blocks} elements"
    for one in entry.segments:
        ends = [offset + size for offset, size in zip(one.offset, one.size, strict=False)]
        if not len(one.offset) == len(one.size) == len(shape) or any(map(int.__gt__, ends, shape)):
            yield f"a shard at {one.offset} of size {one.size}, in a parameter of shape {shape}"
    if entry.segments and sum(math.prod(one.size) for one in entry.segments) != math.prod(shape):
        yield f"shards that are not together the shape {shape}"


def overlapping_spans(entries: Iterable[BlockwiseEntry]) -> bool:
    """Whether two shards of one parameter have the same bytes of its blob."""
    spans = sorted((one.at, one.at + _num_bytes(entry, one)) for entry in entries for one in entry.segments)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def _num_bytes(entry: BlockwiseEntry, one: Segment) -> int:
    dtype = one.values or entry.scales
    volume = math.prod(one.size)
    count = volume if one.values is not None or not one.block else -(-volume // one.block)
    return count * dtype_from_name(dtype, "a shard").itemsize if is_dtype_name(dtype) else 0
