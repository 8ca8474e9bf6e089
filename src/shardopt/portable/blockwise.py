"""Quantised state -> portable state: what each rank has of it, what all ranks have, and handles for it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardopt.errors import PlacementError
from shardopt.geometry import Box
from shardopt.layouts.codec import Blocks, Codec, Form
from shardopt.layouts.grid import Grid
from shardopt.layouts.quantised import CODES_PER_BYTE, apart
from shardopt.layouts.tracked import Tracked
from shardopt.portable.grid_handles import codes_handle, scales_handle
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import blob_key, scale_key, state_key
from shardopt.portable.manifest import AbsentEntry, ElementwiseEntry, Entry, ParameterRecord
from shardopt.portable.segments import BlockwiseEntry, Segment
from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import dtype_from_name, dtype_name
from shardopt.presentation.inventory import Inventory

__all__ = ["TABLES", "Quantised", "combined", "describe_quantised", "put_quantised", "saved_form", "saved_table"]

TABLES = "tables"
"""In the manifest's ``extra``: what codes mean, fp32 as base64, by name."""


@dataclass(slots=True)
class Quantised:
    """What this rank has of one parameter's quantised entries.

    Attributes:
        box: of the parameter.
        values: by entry; None of those that are not there.
        tables: what codes mean, by name.
    """

    box: Box
    values: dict[str, Blocks | Tensor | None]
    tables: dict[str, str] = field(default_factory=dict)

    @property
    def says_nothing(self) -> bool:
        """Whether it holds no element, of a parameter that has some."""
        return not self.box.volume


def describe_quantised(tracked: Tracked, inventory: Inventory, codec: Codec) -> tuple[Quantised, dict[str, Entry]]:
    """This rank's part of the quantised entries, and what it says of them alone.

    Raises:
        PlacementError: the parts of an entry contradict each other.
    """
    subject = inventory.subject(tracked)
    state = inventory.state_of(tracked)
    box = tracked.state_box
    assert box is not None  # state that is elsewhere is described elsewhere
    own = Quantised(box, {})
    entries: dict[str, Entry] = {}
    for name in codec.entries(subject):
        value = None if state is None else codec.read(subject, state, name)
        _check(tracked, name, value, box)
        own.values[name] = value
        entries[name] = _said(tracked, codec, value, own)
    return own, entries


def _check(tracked: Tracked, name: str, value: Blocks | Tensor | None, box: Box) -> None:
    """Refuses what does not fit the shard: it was made for another sharding, or for the whole parameter."""
    if value is None:
        return
    if isinstance(value, Tensor):
        fits, found = tuple(value.shape) == box.size, f"shape {tuple(value.shape)}"
    else:
        form = value.form
        scales = -(-box.volume // form.block)
        codes = None if form.codes is None else box.volume // form.per_byte
        have = None if value.codes is None else value.codes.numel()
        fits = have == codes and value.scales.numel() == scales
        found = f"{have} codes and {value.scales.numel()} scales of {form.block} elements"
    if not fits:
        raise PlacementError(
            f"{tracked.fqn}: state {name!r} has {found}, and this rank's part of the parameter has shape {box.size}. "
            "It was made for another sharding; rebuild the optimizer and load its state."
        )


def _said(tracked: Tracked, codec: Codec, value: Blocks | Tensor | None, own: Quantised) -> Entry:
    if value is None:
        return AbsentEntry()
    if isinstance(value, Tensor):
        return ElementwiseEntry(dtype_name(value.dtype))
    form = value.form
    table = None
    if form.table is not None:
        raw = form.table.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
        table = hashlib.blake2b(raw, digest_size=8).hexdigest()
        own.tables[table] = base64.b64encode(raw).decode()
    codes = None if form.codes is None else dtype_name(form.codes)
    entry = BlockwiseEntry(codec.name, codes, form.per_byte, dtype_name(form.scales), form.block, table)
    if Grid(tracked.shape, form.block).holds(own.box):
        return entry
    return replace(entry, segments=(Segment(own.box.offset, own.box.size, 0, form.block, table, None),))


def combined(
    fqn: str, shape: tuple[int, ...], told: Sequence[tuple[Box, Mapping[str, Entry]]]
) -> tuple[dict[str, Entry], int | None]:
    """The entries of one parameter, of what all ranks say of their shards; and the length of its blob, if it has one.

    Raises:
        PlacementError: shards contradict each other.
    """
    boxes: dict[Box, Mapping[str, Entry]] = {}
    for box, entries in told:
        if boxes.setdefault(box, entries) != entries:
            raise PlacementError(
                f"{fqn}: ranks that hold copies of one shard, {box.offset}+{box.size}, keep its quantised state "
                f"differently: {dict(entries)!s:.300} and {dict(boxes[box])!s:.300}."
            )
    result: dict[str, Entry] = {}
    at = 0
    for name in next(iter(boxes.values())):
        result[name], at = _combined_entry(
            f"{fqn}: state {name!r}", shape, {box: entries[name] for box, entries in boxes.items()}, at
        )
    return result, at or None


def _combined_entry(label: str, shape: tuple[int, ...], said: Mapping[Box, Entry], at: int) -> tuple[Entry, int]:
    kinds = set(said.values())
    first = next(iter(said.values()))
    if len(kinds) == 1 and not (isinstance(first, BlockwiseEntry) and first.segments):
        return first, at
    quantised = [one for one in said.values() if isinstance(one, BlockwiseEntry)]
    alike = {(one.codec, one.codes, one.scales) for one in quantised}
    dense = {one.dtype for one in said.values() if isinstance(one, ElementwiseEntry)}
    if any(isinstance(one, AbsentEntry) for one in kinds) or len(alike) != 1 or len(dense) > 1:
        parts = "; ".join(f"{box.offset}+{box.size}: {one!s:.200}" for box, one in said.items())
        raise PlacementError(f"{label} is kept by some shards as by others it is not: {parts}.")
    segments: list[Segment] = []
    for box, one in sorted(said.items(), key=lambda item: item[0].offset):
        if isinstance(one, BlockwiseEntry):
            own = one.segments[0] if one.segments else None
            block, table = (own.block, own.table) if own else (one.block, one.table)
            segments.append(Segment(box.offset, box.size, at, block, table, None))
            at += -(-box.volume // (block or 1)) * dtype_from_name(one.scales, label).itemsize
        elif isinstance(one, ElementwiseEntry):
            segments.append(Segment(box.offset, box.size, at, None, None, one.dtype))
            at += box.volume * dtype_from_name(one.dtype, label).itemsize
    # Codes that share bytes are stored apart: shards need not begin at a whole byte.
    told = replace(quantised[0], per_byte=1, block=None, table=None, segments=tuple(segments))
    return told, at


def put_quantised(
    tracked: Tracked, inventory: Inventory, codec: Codec, record: ParameterRecord, own: Quantised | None
) -> dict[str, Handle]:
    """The handles of a parameter's quantised entries, of what ``combined`` has made of them.

    Args:
        tracked: the parameter.
        inventory: of its optimizer.
        codec: of it.
        record: of all ranks.
        own: this rank's part; None when its state is elsewhere.
    """
    subject = inventory.subject(tracked)
    handles: dict[str, Handle] = {}
    chunks: list[tuple[int, Tensor]] = []
    has_segments = False
    for name in codec.entries(subject):
        entry = record.entries[name]
        # An empty shard has nothing to write; an empty parameter has its key.
        silent = own is None or (own.says_nothing and 0 not in tracked.shape)
        value = None if own is None or silent else own.values[name]
        box = Box.whole(()) if own is None else own.box
        codes = _codes_parts(tracked, entry, value, box)
        handles[state_key(tracked.fqn, name)] = codes_handle(tracked, *codes)
        scales = _scales_parts(tracked, entry, value, box)
        handles[scale_key(tracked.fqn, name)] = scales_handle(tracked, *scales)
        if isinstance(entry, BlockwiseEntry) and entry.segments:
            has_segments = True
            chunks += _own_segments(entry, value, box)
    if has_segments:
        handles[blob_key(tracked.fqn)] = BytesHandle.make(chunks, record.blob or 0)
    return handles


_Parts = tuple["tuple[int, ...] | None", "torch.dtype | None", list[tuple[Box, Tensor]]]
_NONE: _Parts = (None, None, [])


def _codes_parts(tracked: Tracked, entry: Entry, value: Blocks | Tensor | None, box: Box) -> _Parts:
    if isinstance(entry, ElementwiseEntry):
        parts = [(box, value)] if isinstance(value, Tensor) else []
        return tracked.shape, dtype_from_name(entry.dtype, tracked.fqn), parts
    if not isinstance(entry, BlockwiseEntry) or entry.codes is None:
        return _NONE
    dtype = dtype_from_name(entry.codes, tracked.fqn)
    if isinstance(value, Blocks) and value.codes is not None:
        if entry.per_byte == 1:
            return tracked.shape, dtype, [(box, apart(value.codes, value.form.per_byte).view(box.size))]
        pairs = Grid(tracked.shape, CODES_PER_BYTE)
        cells = pairs.covering(box)
        return pairs.shape, dtype, [(cells, value.codes.view(cells.size))]
    shape = tracked.shape if entry.per_byte == 1 else Grid(tracked.shape, CODES_PER_BYTE).shape
    # Every element of the tensor must be written by somebody: of a shard that is not quantised, zeros.
    return shape, dtype, [(box, torch.zeros(box.size, dtype=dtype))] if isinstance(value, Tensor) else []


def _scales_parts(tracked: Tracked, entry: Entry, value: Blocks | Tensor | None, box: Box) -> _Parts:
    if not isinstance(entry, BlockwiseEntry) or entry.segments or entry.block is None:
        return _NONE
    grid = Grid(tracked.shape, entry.block)
    dtype = dtype_from_name(entry.scales, tracked.fqn)
    if not isinstance(value, Blocks):
        return grid.shape, dtype, []
    cells = grid.covering(box)
    return grid.shape, dtype, [(cells, value.scales.reshape(cells.size))]


def _own_segments(entry: BlockwiseEntry, value: Blocks | Tensor | None, box: Box) -> list[tuple[int, Tensor]]:
    if value is None:
        return []
    at = next(one.at for one in entry.segments if (one.offset, one.size) == (box.offset, box.size))
    data = value if isinstance(value, Tensor) else value.scales
    return [(at, data.detach().contiguous().view(-1).view(torch.uint8))]


def saved_form(entry: BlockwiseEntry, block: int, table: str | None, tables: Json, path: str) -> Form:
    """What codes and scales of a saved entry mean.

    Raises:
        PlacementError: the checkpoint lacks the table, or has another one under its name.
    """
    meaning = None if table is None else saved_table(tables, table, path)
    return Form(
        block=block,
        codes=None if entry.codes is None else dtype_from_name(entry.codes, path),
        scales=dtype_from_name(entry.scales, path),
        table=meaning,
        per_byte=entry.per_byte,
    )


def saved_table(tables: Json, name: str, path: str) -> Tensor:
    """What codes mean, fp32, in memory of its own.

    Raises:
        PlacementError: the checkpoint lacks the table, or has another one under its name.
    """
    text = tables.get(name) if isinstance(tables, dict) else None
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        raw = b""
    # The name says what it is.
    if not raw or len(raw) % 4 or hashlib.blake2b(raw, digest_size=8).hexdigest() != name:
        raise PlacementError(
            f"{path}: the table {name!r} of its codes is lacking or changed: the checkpoint is damaged."
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).clone()
