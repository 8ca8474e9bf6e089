"""What a manifest says of a quantised entry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import is_dtype_name

__all__ = [
    "BLOCKWISE_FIELDS",
    "BlockwiseEntry",
    "Segment",
    "blockwise_contradictions",
    "blockwise_json",
    "read_blockwise",
]

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
    codec, codes, scales, table = (fields.get(name) for name in ("codec", "codes", "scales", "table"))
    per_byte, block, segments = (fields.get(name) for name in ("per_byte", "block", "segments"))
    if not isinstance(codec, str) or not isinstance(scales, str) or not _is_text(codes) or not _is_text(table):
        return f"codec {codec!r:.80}, codes {codes!r:.80}, scales {scales!r:.80}, table {table!r:.80}: expected text"
    if type(per_byte) is not int or not _is_count(block) or not isinstance(segments, list):
        return f"per_byte {per_byte!r:.80}, block {block!r:.80}, segments {segments!r:.80}: expected numbers and a list"
    read: list[Segment] = []
    for one in segments:
        segment = _read_segment(one)
        if segment is None:
            return f"a shard {one!r:.160}: expected [offset, size, at, block, table, values]"
        read.append(segment)
    return BlockwiseEntry(codec, codes, per_byte, scales, block, table, tuple(read))


def _read_segment(encoded: Json) -> Segment | None:
    if not isinstance(encoded, list) or len(encoded) != 6:
        return None
    offset, size, at, block, table, values = encoded
    boxes = [
        tuple(one) if isinstance(one, list) and all(_is_number(x) for x in one) else None for one in (offset, size)
    ]
    fits = _is_number(at) and _is_count(block) and _is_text(table) and _is_text(values)
    if boxes[0] is None or boxes[1] is None or not fits:
        return None
    return Segment(boxes[0], boxes[1], at, block, table, values)


def _is_number(value: Json) -> bool:
    return type(value) is int and value >= 0


def _is_count(value: Json) -> bool:
    return value is None or _is_number(value)


def _is_text(value: Json) -> bool:
    return value is None or isinstance(value, str)


def blockwise_contradictions(entry: BlockwiseEntry, shape: tuple[int, ...]) -> Iterator[str]:
    """What cannot be so, of an entry of a parameter of this shape."""
    dtypes = (entry.codes, entry.scales, *(one.values for one in entry.segments))
    for dtype in sorted({dtype for dtype in dtypes if dtype is not None}):
        if not is_dtype_name(dtype):
            yield f"dtype {dtype!r} is unknown to this torch; names are like 'uint8'"
    if entry.per_byte not in (1, 2):
        yield f"{entry.per_byte} codes in a byte"
    blocks = [one.block for one in entry.segments if one.values is None] or [entry.block]
    if any(block is None or block < 1 for block in blocks):
        yield f"blocks of {blocks} elements"
    for one in entry.segments:
        ends = [offset + size for offset, size in zip(one.offset, one.size, strict=False)]
        if not len(one.offset) == len(one.size) == len(shape) or any(map(int.__gt__, ends, shape)):
            yield f"a shard at {one.offset} of size {one.size}, in a parameter of shape {shape}"
    if entry.segments and sum(math.prod(one.size) for one in entry.segments) != math.prod(shape):
        yield f"shards that are not together the shape {shape}"
