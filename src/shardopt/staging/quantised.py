"""Planning the load of a quantised entry: its own bits where blocks are where they were, else its exact values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import FormatError, PlacementError
from shardopt.geometry import Box
from shardopt.layouts.codec import Blocks, Codec, Form, Subject
from shardopt.layouts.grid import Grid
from shardopt.layouts.quantised import CODES_PER_BYTE, Piece, Stored, together, unpacked, values_of
from shardopt.layouts.tracked import Tracked
from shardopt.portable.blockwise import TABLES, saved_form
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import blob_key, scale_key, state_key
from shardopt.portable.manifest import AbsentEntry, ElementwiseEntry, Entry
from shardopt.portable.scratch import Scratch
from shardopt.portable.segments import BlockwiseEntry, Segment
from shardopt.portable.tensor_bytes import dtype_from_name, dtype_name
from shardopt.presentation.inventory import Inventory
from shardopt.staging.plan import ParameterPlan, bytes_of, judge_values
from shardopt.staging.report import Report
from shardopt.staging.source import Source

__all__ = ["plan_quantised"]


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Cells of one tensor that a load has brought, or that another optimizer lends.

    Attributes:
        cells: which.
        tensor: what they hold.
        scratch: whose memory it is; None of what is lent.
    """

    cells: Box
    tensor: Tensor
    scratch: Scratch | None


class _Problem(Exception):
    """Why an entry cannot be loaded, for the report."""


def plan_quantised(
    plan: ParameterPlan, tracked: Tracked, inventory: Inventory, codec: Codec, source: Source, report: Report
) -> None:
    """Plans the entries of a parameter that its codec takes apart; problems go to the report."""
    subject = inventory.subject(tracked)
    live = inventory.quantised(tracked)
    saved = source.record(tracked).entries
    names = codec.entries(subject)
    there = [name for name in names if not isinstance(saved.get(name, AbsentEntry()), AbsentEntry)]
    planning = _Planning(plan, tracked, subject, codec, source, report)
    for name in names:
        label = f"{tracked.fqn}: state {name!r}"
        try:
            if name in there:
                value = planning.value(label, name, saved[name], live.get(name))
            elif there:
                value = planning.backfilled(label, name, there)
            else:
                continue
            planning.place(name, value, live.get(name))
            report.restored.append(state_key(tracked.fqn, name))
        except (_Problem, FormatError, PlacementError) as problem:
            report.problems.append(str(problem) if str(problem).startswith(label) else f"{label}: {problem}")


@dataclass(slots=True)
class _Planning:
    plan: ParameterPlan
    tracked: Tracked
    subject: Subject
    codec: Codec
    source: Source
    report: Report
    # Of the entry that is being planned: scratch whose memory it would make its own.
    taking: list[Scratch] = field(default_factory=list)

    def value(self, label: str, name: str, entry: Entry, live: Blocks | Tensor | None) -> Blocks | Tensor:
        """What the optimizer will hold."""
        box = self.tracked.state_box
        assert box is not None  # state that is elsewhere is planned elsewhere
        wanted = self._wanted(name, live)
        if isinstance(entry, ElementwiseEntry):
            dtype = dtype_from_name(entry.dtype, label)
            values = self._arrived(label, state_key, name, self.tracked.shape, box, dtype)
            judge_values(label, values.tensor, self.source.options, self.report)
            if dtype == wanted:
                return self._own(values)
            return self._kept(name, values.tensor, wanted, "was not quantised")
        if not isinstance(entry, BlockwiseEntry):
            raise _Problem(f"{label} is stored as {entry.layout}, and {self.codec.name} keeps numbers or codes there.")
        if entry.codec != self.codec.name:
            raise _Problem(
                f"{label} was quantised by {entry.codec!r}, this optimizer by {self.codec.name!r}; what their codes "
                "mean is not known to be the same."
            )
        return (
            self._from_shards(label, name, entry, wanted)
            if entry.segments
            else self._from_grid(label, name, entry, wanted)
        )

    def backfilled(self, label: str, name: str, there: list[str]) -> Blocks | Tensor:
        """What stands for an entry that was not saved beside others that were."""
        wanted = self._wanted(name, None)
        values = self.codec.backfill(self.subject, name)
        if values is None:
            raise _Problem(
                f"{label} is not in the checkpoint, which has {there}, and nothing says what it would be; build the "
                f"optimizer with the options it was saved with, or start the parameter anew: "
                f"fresh=[{self.tracked.fqn!r}]."
            )
        self.report.notes.append(f"{label} is not in the checkpoint; it is filled by the rule of {self.codec.name}.")
        return self.codec.quantise(values.float(), wanted) if isinstance(wanted, Form) else values.to(wanted)

    def place(self, name: str, value: Blocks | Tensor, live: Blocks | Tensor | None) -> None:
        """Puts it into live memory where that is alike, so that tensors keep their identity; else publishes it."""
        items = self.codec.write(self.subject, name, value)
        pairs: list[tuple[Tensor, Tensor]] | None = None
        if isinstance(value, Tensor) and isinstance(live, Tensor):
            pairs = [(live, value)]
        elif isinstance(value, Blocks) and isinstance(live, Blocks) and live.form.is_like(value.form):
            pairs = [(live.scales, value.scales)]
            if live.codes is not None and value.codes is not None:
                pairs.append((live.codes, value.codes))
        pairs = None if pairs is None else [(mine, new.reshape(mine.shape)) for mine, new in pairs]
        if pairs is not None and all(self.source.takes(mine, new) for mine, new in pairs):
            self.plan.fill += pairs
        else:
            self.plan.publish.update(items)
            self.plan.taken_over += self.taking
        self.taking = []
        self.plan.keep += [part for part in items if part not in self.plan.keep]

    def _wanted(self, name: str, live: Blocks | Tensor | None) -> Form | torch.dtype:
        """How this optimizer keeps the entry: as it does now, else as it would make it."""
        if live is None:
            return self.codec.form(self.subject, name)
        return live.dtype if isinstance(live, Tensor) else live.form

    def _kept(self, name: str, values: Tensor, wanted: Form | torch.dtype, why: str) -> Blocks | Tensor:
        """Values as the optimizer keeps them; the report says what became of them."""
        if isinstance(wanted, Form):
            self.report.requantise(self.tracked.fqn, name, why)
            return self.codec.quantise(values.float().contiguous(), wanted)
        if values.dtype == wanted:
            return values
        self.report.requantise(self.tracked.fqn, name, f"{why} and is kept as {dtype_name(wanted)}")
        return values.to(wanted)

    def _from_grid(self, label: str, name: str, entry: BlockwiseEntry, wanted: Form | torch.dtype) -> Blocks | Tensor:
        shape, box = self.tracked.shape, self.tracked.state_box
        assert box is not None  # state that is elsewhere is planned elsewhere
        assert entry.block is not None  # without segments there is one, or the manifest was refused
        form = saved_form(entry, entry.block, entry.table, self._tables(), label)
        grid = Grid(shape, entry.block)
        scales = self._arrived(label, scale_key, name, grid.shape, grid.covering(box), form.scales)
        judge_values(label, scales.tensor, self.source.options, self.report)
        codes = None if form.codes is None else self._codes(label, name, entry, form.codes)
        if isinstance(wanted, Form) and wanted.is_like(form) and grid.holds(box):
            return Blocks(wanted, self._own(codes), self._own(scales, grid.covering(box)))
        source = Stored(form, Box.whole(shape), scales.tensor, grid, scales.cells)
        values = values_of(box, self._unpacked(entry, codes), [Piece(box, source)])
        return self._kept(name, values, wanted, "had blocks that lie otherwise here")

    def _from_shards(self, label: str, name: str, entry: BlockwiseEntry, wanted: Form | torch.dtype) -> Blocks | Tensor:
        box = self.tracked.state_box
        assert box is not None
        own = next((one for one in entry.segments if (one.offset, one.size) == (box.offset, box.size)), None)
        data = self._blob(label, own)
        codes = None if entry.codes is None else self._codes(label, name, entry, dtype_from_name(entry.codes, label))
        pieces: list[Piece] = []
        for one in entry.segments:
            frame = Box(one.offset, one.size)
            if frame.intersect(box) is None and frame != box:
                continue
            if self._lends and one is not own:
                raise _Problem(f"{label}: the state dict was made for another sharding; save it with dcp.save first.")
            held = _held(label, one, entry, data)
            judge_values(label, held, self.source.options, self.report)
            if one.values is not None or one.block is None:
                pieces.append(Piece(frame, held.view(one.size)))
            else:
                pieces.append(
                    Piece(frame, Stored(saved_form(entry, one.block, one.table, self._tables(), label), frame, held))
                )
        if own is not None and len(pieces) == 1:
            kept = self._as_it_was(pieces[0].source, codes, wanted)
            if kept is not None:
                return kept
        values = values_of(box, None if codes is None else codes.tensor, pieces)
        return self._kept(name, values, wanted, "had blocks of its own on each rank")

    def _as_it_was(
        self, source: Stored | Tensor, codes: _Arrived | None, wanted: Form | torch.dtype
    ) -> Blocks | Tensor | None:
        """The shard's own codes and scales, or values, if this optimizer keeps such."""
        if isinstance(source, Tensor):
            return source.clone() if source.dtype == wanted else None
        if not isinstance(wanted, Form) or not wanted.is_like(_with_pairs(source.form, wanted)):
            return None
        own = self._own(codes)
        if own is not None:
            own = together(own, wanted.per_byte)
        return Blocks(wanted, own, source.scales.clone())

    def _codes(self, label: str, name: str, entry: BlockwiseEntry, dtype: torch.dtype) -> _Arrived:
        box = self.tracked.state_box
        assert box is not None
        if entry.per_byte == 1:
            return self._arrived(label, state_key, name, self.tracked.shape, box, dtype)
        pairs = Grid(self.tracked.shape, CODES_PER_BYTE)
        return self._arrived(label, state_key, name, pairs.shape, pairs.covering(box), dtype)

    def _unpacked(self, entry: BlockwiseEntry, codes: _Arrived | None) -> Tensor | None:
        box = self.tracked.state_box
        if codes is None or entry.per_byte == 1 or box is None:
            return None if codes is None else codes.tensor
        return unpacked(Grid(self.tracked.shape, CODES_PER_BYTE), codes.cells, codes.tensor, box)

    def _own(self, arrived: _Arrived | None, cells: Box | None = None) -> Any:
        """The memory of what has arrived, for this optimizer alone."""
        if arrived is None:
            return None
        part = arrived.tensor if cells is None else _part(arrived, cells)
        if arrived.scratch is None or part.is_inference() or part is not arrived.tensor:
            return part.clone()
        self.taking.append(arrived.scratch)
        return part

    @property
    def _lends(self) -> bool:
        return not self.source.from_storage

    def _tables(self) -> Any:
        return self.source.manifest.extra.get(TABLES)

    def _blob(self, label: str, own: Segment | None) -> Tensor:
        handle = self.source.handles.get(blob_key(self.tracked.fqn))
        problems = Report()
        data = bytes_of(handle, label, self.source.from_storage, problems) if isinstance(handle, BytesHandle) else None
        expected = self.source.record(self.tracked).blob
        if data is None or data.numel() != expected:
            found = "; ".join(problems.problems) or f"its blob is not {expected} bytes"
            raise _Problem(f"{label}: {found}; use prepare_load(path), or load another checkpoint.")
        return data

    def _arrived(
        self, label: str, key: Any, name: str, shape: tuple[int, ...], cells: Box, dtype: torch.dtype
    ) -> _Arrived:
        """The cells of a tensor, all of them.

        Raises:
            _Problem: they are not there.
        """
        handle = self.source.handles.get(key(self.tracked.fqn, name))
        if not isinstance(handle, Handle):
            raise _Problem(f"{label} is in the checkpoint, and this load did not ask for it; use prepare_load(path).")
        if self._lends:
            return _lent(label, handle, cells, dtype)
        if not handle.was_read:
            raise _Problem(f"{label} was not read: the load skipped its key.")
        if handle.saved_size is not None and handle.saved_size != shape:
            raise _Problem(
                f"{label} was saved with shape {handle.saved_size}, expected {shape}: the checkpoint is damaged."
            )
        (scratch,) = handle.scratch or [None]
        if scratch is None or not scratch.box.contains(cells):
            raise _Problem(f"{label} was read for other elements than this rank's; use prepare_load(path).")
        gap = scratch.missing()
        if scratch.wrong_dtype is not None or (scratch.delivered and scratch.dtype != dtype):
            found = dtype_name(scratch.wrong_dtype or scratch.dtype)
            raise _Problem(f"{label} is stored as {found}, and the manifest says {dtype_name(dtype)}: it is damaged.")
        if gap is not None:
            raise _Problem(f"{label}: the cells at {gap.offset} of size {gap.size} were not delivered.")
        if scratch.taken_over:
            raise _Problem(f"{label}: what was read has been taken over by an earlier load; read it again.")
        if not scratch.delivered:
            scratch.convert(dtype)
        self.plan.read.append(scratch)
        return _Arrived(scratch.box, scratch.tensor(), scratch)


def _lent(label: str, handle: Handle, cells: Box, dtype: torch.dtype) -> _Arrived:
    for offset, tensor in zip(handle.offsets, handle.tensors, strict=True):
        if (offset, tuple(tensor.shape)) == (cells.offset, cells.size) and tensor.dtype == dtype:
            return _Arrived(cells, tensor, None)
    if not cells.volume:
        return _Arrived(cells, torch.empty(cells.size, dtype=dtype), None)
    raise _Problem(f"{label}: the state dict was made for another sharding; save it with dcp.save to move it.")


def _held(label: str, one: Segment, entry: BlockwiseEntry, data: Tensor) -> Tensor:
    """The scales of a shard, or its values, 1-D."""
    dtype = dtype_from_name(one.values or entry.scales, label)
    volume = Box(one.offset, one.size).volume
    count = volume if one.values is not None or one.block is None else -(-volume // one.block)
    end = one.at + count * dtype.itemsize
    if end > data.numel():
        raise _Problem(f"{label}: its blob of {data.numel()} bytes ends before {end}: the checkpoint is damaged.")
    # A copy, since it may begin anywhere.
    return data[one.at : end].clone().view(dtype)


def _with_pairs(form: Form, wanted: Form) -> Form:
    """The form as it was before codes that share bytes were stored apart."""
    return Form(block=form.block, codes=form.codes, scales=form.scales, table=form.table, per_byte=wanted.per_byte)


def _part(arrived: _Arrived, cells: Box) -> Tensor:
    if arrived.cells == cells:
        return arrived.tensor
    part = arrived.tensor
    for dim, (offset, size) in enumerate(zip(cells.offset, cells.size, strict=True)):
        part = part.narrow(dim, offset - arrived.cells.offset[dim], size)
    return part
