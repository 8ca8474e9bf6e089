"""Planning the load of a quantised entry: its own bits where blocks are where they were, else its exact values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import FormatError, PlacementError
from shardopt.geometry import Box, missing
from shardopt.layouts.codec import Blocks, Codec, Form, Subject
from shardopt.layouts.grid import Grid, common_block
from shardopt.layouts.learnt import LearntCodec
from shardopt.layouts.quantised import CODES_PER_BYTE, Piece, Stored, memory_of, together, unpacked, values_of
from shardopt.layouts.tracked import Tracked
from shardopt.portable.blockwise import TABLES, saved_form
from shardopt.portable.keys import scale_key, state_key
from shardopt.portable.manifest import AbsentEntry, ElementwiseEntry, Entry
from shardopt.portable.scratch import Scratch
from shardopt.portable.segments import BlockwiseEntry
from shardopt.portable.tensor_bytes import dtype_from_name, dtype_name
from shardopt.presentation.inventory import Inventory
from shardopt.staging.arrivals import Arrivals, Arrived, Problem, held, part_of
from shardopt.staging.plan import ParameterPlan, judge_values
from shardopt.staging.report import Report
from shardopt.staging.source import Source

__all__ = ["plan_quantised"]

# A box in which blocks were counted, and their form.
_Framed = tuple[Box, Form]


def plan_quantised(
    plan: ParameterPlan,
    tracked: Tracked,
    inventory: Inventory,
    codec: Codec,
    source: Source,
    report: Report,
    values: Mapping[str, Any],
) -> None:
    """Plans the entries of a parameter that its codec takes apart; problems go to the report.

    Args:
        plan: gets them.
        tracked: the parameter.
        inventory: of its optimizer.
        codec: of it.
        source: what is loaded.
        report: gets what is found.
        values: of the parameter's group, as they are after the load: they may say how state is quantised.
    """
    before = inventory.subject(tracked)
    subject = replace(before, group=values)
    live = inventory.quantised(tracked)
    saved = source.record(tracked).entries
    names = codec.entries(subject)
    there = [name for name in names if not isinstance(saved.get(name, AbsentEntry()), AbsentEntry)]
    memory = set(chain.from_iterable(map(memory_of, (inventory.state_of(tracked) or {}).values())))
    arrivals = Arrivals(plan, tracked, source, report)
    planning = _Planning(plan, tracked, before, subject, codec, source, report, memory, arrivals)
    if there:
        plan.keep += [item for item in inventory.state_of(tracked) or {} if codec.is_scratch(item)]
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
        except (Problem, FormatError, PlacementError) as problem:
            report.problems.append(str(problem) if str(problem).startswith(label) else f"{label}: {problem}")


@dataclass(slots=True)
class _Planning:
    plan: ParameterPlan
    tracked: Tracked
    before: Subject
    subject: Subject
    codec: Codec
    source: Source
    report: Report
    memory: set[int]
    arrivals: Arrivals
    # Of the entry that is being planned: scratch whose memory it would make its own.
    taking: list[Scratch] = field(default_factory=list)
    # Of an optimizer that learns how long its blocks are, those of the parameter: the same for all entries.
    block: int | None = None

    def value(self, label: str, name: str, entry: Entry, live: Blocks | Tensor | None) -> Blocks | Tensor:
        """What the optimizer will hold."""
        box = self.tracked.state_box
        assert box is not None  # state that is elsewhere is planned elsewhere
        if isinstance(entry, ElementwiseEntry):
            wanted = self._wanted(name, live)
            dtype = dtype_from_name(entry.dtype, label)
            if not dtype.is_floating_point:
                raise Problem(f"{label} is stored as numbers of {entry.dtype}, which no optimizer averages: damaged.")
            values = self.arrivals.cells(label, state_key, name, self.tracked.shape, box, dtype)
            judge_values(label, values.tensor, self.source.options, self.report)
            if dtype == wanted:
                return self._own(values)
            if not isinstance(wanted, Form) and self.source.options.dtype != "live":
                raise Problem(
                    f"{label} was saved as {entry.dtype}, this optimizer keeps {dtype_name(wanted)}; dtype='live' "
                    "converts floating-point state."
                )
            # A copy: it may be another optimizer's live memory, and nobody knows what quantising does to it.
            return self._kept(label, name, values.tensor.to(torch.float32, copy=True), wanted, "was not quantised")
        if not isinstance(entry, BlockwiseEntry):
            raise Problem(f"{label} is stored as {entry.layout}, and {self.codec.name} keeps numbers or codes there.")
        if entry.codec != self.codec.name:
            raise Problem(
                f"{label} was quantised by {entry.codec!r}, this optimizer by {self.codec.name!r}; what their codes "
                "mean is not known to be the same."
            )
        return (
            self._from_shards(label, name, entry, live) if entry.segments else self._from_grid(label, name, entry, live)
        )

    def backfilled(self, label: str, name: str, there: list[str]) -> Blocks | Tensor:
        """What stands for an entry that was not saved beside others that were."""
        wanted = self._wanted(name, None)
        values = self.codec.backfill(self.subject, name)
        if values is None:
            raise Problem(
                f"{label} is not in the checkpoint, which has {there}, and nothing says what it would be; build the "
                f"optimizer with the options it was saved with, or start the parameter anew: "
                f"fresh=[{self.tracked.fqn!r}]."
            )
        if tuple(values.shape) != tuple(self.subject.shard.shape):
            raise Problem(
                f"{label}: the rule of {self.codec.name} fills it with shape {tuple(values.shape)}, this rank's part "
                f"of the parameter has {tuple(self.subject.shard.shape)}."
            )
        self.report.notes.append(f"{label} is not in the checkpoint; it is filled by the rule of {self.codec.name}.")
        if isinstance(wanted, Form):
            return self._quantised(label, values.to(torch.float32, copy=True), wanted)
        return values.to(wanted, copy=True)

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
        if pairs is not None and all(
            mine.numel() == new.numel() and mine.data_ptr() in self.memory for mine, new in pairs
        ):
            pairs = [(mine, new.reshape(mine.shape)) for mine, new in pairs]
        else:
            # Another size, or copies that the codec has made: filling those would change nothing.
            pairs = None
        if pairs is not None and all(self.source.takes(mine, new) for mine, new in pairs):
            self.plan.fill += pairs
        else:
            self.plan.publish.update(items)
            self.plan.taken_over += self.taking
        self.taking = []
        self.plan.keep += [part for part in items if part not in self.plan.keep]

    def _wanted(self, name: str, live: Blocks | Tensor | None, framed: Sequence[_Framed] = ()) -> Form | torch.dtype:
        """How this optimizer keeps the entry: as it does now, or if it has none yet, or new options, as it would.

        One that learns that, as it was saved: in boxes of ``framed``, each with its form.
        """
        after = self.codec.form(self.subject, name)
        if isinstance(self.codec, LearntCodec):
            return self._learnt(self.codec, after, framed)
        if live is None or not _alike(after, self.codec.form(self.before, name)):
            return after
        return live.dtype if isinstance(live, Tensor) else live.form

    def _learnt(self, codec: LearntCodec, form: Form | torch.dtype, framed: Sequence[_Framed]) -> Form:
        assert isinstance(form, Form)  # what is learnt is how to quantise
        box = self.tracked.state_box
        assert box is not None
        if self.block is None:
            blocks = [(frame, saved.block) for frame, saved in framed]
            common = common_block(self.tracked.shape, box, blocks)
            self.block = codec.block(self.subject, [block for _, block in blocks], common)
        table = None if form.codes is None else self.source.tables.get(self.tracked.optimizer)
        return replace(form, block=self.block, table=table)

    def _kept(self, label: str, name: str, values: Tensor, wanted: Form | torch.dtype, why: str) -> Blocks | Tensor:
        """Values, which nobody else has, as the optimizer keeps them; the report says what became of them."""
        if isinstance(wanted, Form):
            self.report.requantise(self.tracked.fqn, name, why)
            return self._quantised(label, values, wanted)
        saved = self.source.record(self.tracked).entries[name]
        was = saved.dtype if isinstance(saved, ElementwiseEntry) else "codes and scales"
        self.report.convert(self.tracked.fqn, name, f"was saved as {was}, and is kept as {dtype_name(wanted)} here")
        return values.to(wanted)

    def _quantised(self, label: str, values: Tensor, form: Form) -> Blocks:
        made = self.codec.quantise(values.contiguous(), form)
        codes = None if made.codes is None else made.codes.numel() * made.form.per_byte
        whole = -(-values.numel() // form.block)
        if codes != (None if form.codes is None else values.numel()) or made.scales.numel() != whole:
            raise Problem(
                f"{label}: {self.codec.name} has made {codes} codes and {made.scales.numel()} scales of "
                f"{values.numel()} values in blocks of {form.block}; shardopt.testing.check_codec finds out why."
            )
        return made

    def _from_grid(self, label: str, name: str, entry: BlockwiseEntry, live: Blocks | Tensor | None) -> Blocks | Tensor:
        shape, box = self.tracked.shape, self.tracked.state_box
        assert box is not None  # state that is elsewhere is planned elsewhere
        assert entry.block is not None  # without segments there is one, or the manifest was refused
        form = saved_form(entry, entry.block, entry.table, self._tables(), label)
        wanted = self._wanted(name, live, [(Box.whole(shape), form)])
        _refuse_other_kind(label, form, wanted)
        grid = Grid(shape, entry.block)
        scales = self.arrivals.cells(label, scale_key, name, grid.shape, grid.covering(box), form.scales)
        judge_values(label, scales.tensor, self.source.options, self.report)
        codes = None if form.codes is None else self._codes(label, name, entry, form.codes)
        if isinstance(wanted, Form) and wanted.is_like(form) and grid.holds(box):
            return Blocks(wanted, self._own(codes), self._own(scales, grid.covering(box)))
        source = Stored(form, Box.whole(shape), scales.tensor, grid, scales.cells)
        numbers = self._unpacked(entry, codes)
        _refuse_unknown_codes(label, numbers, form)
        pieces = [Piece(box, source)]
        return self._finer(numbers, pieces, wanted) or self._kept(
            label, name, values_of(box, numbers, pieces), wanted, "had blocks that lie otherwise here"
        )

    def _from_shards(
        self, label: str, name: str, entry: BlockwiseEntry, live: Blocks | Tensor | None
    ) -> Blocks | Tensor:
        box = self.tracked.state_box
        assert box is not None
        own = next((one for one in entry.segments if (one.offset, one.size) == (box.offset, box.size)), None)
        data = self.arrivals.blob(label)
        codes = None if entry.codes is None else self._codes(label, name, entry, dtype_from_name(entry.codes, label))
        pieces: list[Piece] = []
        for one in entry.segments:
            frame = Box(one.offset, one.size)
            if frame.intersect(box) is None and frame != box:
                continue
            if self.arrivals.lends and one is not own:
                raise Problem(f"{label}: the state dict was made for another sharding; save it with dcp.save first.")
            kept_there = held(label, one, entry, data)
            judge_values(label, kept_there, self.source.options, self.report)
            if one.values is not None or one.block is None:
                pieces.append(Piece(frame, kept_there.view(one.size)))
                continue
            form = saved_form(entry, one.block, one.table, self._tables(), label)
            _refuse_unknown_codes(label, None if codes is None else codes.tensor, form)
            pieces.append(Piece(frame, Stored(form, frame, kept_there)))
        stored = [piece.source for piece in pieces if isinstance(piece.source, Stored)]
        wanted = self._wanted(name, live, [(one.frame, one.form) for one in stored])
        for one in stored:
            _refuse_other_kind(label, one.form, wanted)
        if own is not None and len(pieces) == 1:
            kept = self._as_it_was(pieces[0].source, codes, wanted)
            if kept is not None:
                return kept
        if missing(box, [piece.box for piece in pieces]) is not None or _overlap(box, pieces):
            raise Problem(f"{label}: its shards overlap, or leave a part of it out: the checkpoint is damaged.")
        numbers = None if codes is None else codes.tensor
        return self._finer(numbers, pieces, wanted) or self._kept(
            label, name, values_of(box, numbers, pieces), wanted, "had blocks of its own on each rank"
        )

    def _finer(self, codes: Tensor | None, pieces: Sequence[Piece], wanted: Form | torch.dtype) -> Blocks | None:
        """The codes as they are, with a scale for each of the blocks that were made of longer ones; None if some are
        not of one block.
        """
        box = self.tracked.state_box
        assert box is not None
        if not isinstance(self.codec, LearntCodec) or not isinstance(wanted, Form):
            return None
        for piece in pieces:
            if not isinstance(piece.source, Stored) or not replace(piece.source.form, block=wanted.block).is_like(
                wanted
            ):
                return None
        scales = values_of(box, None, pieces).view(-1, wanted.block)
        if not bool((scales == scales[:, :1]).all()):
            return None
        return Blocks(
            wanted, None if codes is None else codes.clone(), scales[:, 0].clone(memory_format=torch.contiguous_format)
        )

    def _as_it_was(
        self, source: Stored | Tensor, codes: Arrived | None, wanted: Form | torch.dtype
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

    def _codes(self, label: str, name: str, entry: BlockwiseEntry, dtype: torch.dtype) -> Arrived:
        box = self.tracked.state_box
        assert box is not None
        shape = self.tracked.shape
        if entry.per_byte != 1:
            pairs = Grid(shape, CODES_PER_BYTE)
            shape, box = pairs.shape, pairs.covering(box)
        codes = self.arrivals.cells(label, state_key, name, shape, box, dtype)
        if dtype.is_floating_point:
            # Codes that are numbers may be none. Torch cannot ask them itself.
            judge_values(label, codes.tensor.float(), self.source.options, self.report)
        return codes

    def _unpacked(self, entry: BlockwiseEntry, codes: Arrived | None) -> Tensor | None:
        box = self.tracked.state_box
        if codes is None or entry.per_byte == 1 or box is None:
            return None if codes is None else codes.tensor
        return unpacked(Grid(self.tracked.shape, CODES_PER_BYTE), codes.cells, codes.tensor, box)

    def _own(self, arrived: Arrived | None, cells: Box | None = None) -> Any:
        """The memory of what has arrived, for this optimizer alone."""
        if arrived is None:
            return None
        part = arrived.tensor if cells is None else part_of(arrived, cells)
        if arrived.scratch is None or part.is_inference() or part is not arrived.tensor:
            return part.clone()
        self.taking.append(arrived.scratch)
        return part

    def _tables(self) -> Any:
        return self.source.manifest.extra.get(TABLES)


def _alike(one: Form | torch.dtype, other: Form | torch.dtype) -> bool:
    if isinstance(one, Form) and isinstance(other, Form):
        return one.is_like(other)
    return one == other


def _refuse_other_kind(label: str, saved: Form, wanted: Form | torch.dtype) -> None:
    """Refuses codes that are saved as something else than this optimizer's are."""
    if isinstance(wanted, Form) and (saved.table is None, saved.codes is None) != (
        wanted.table is None,
        wanted.codes is None,
    ):
        raise Problem(f"{label}: what its codes mean is not in the checkpoint, or not as it was: it is damaged.")


def _refuse_unknown_codes(label: str, codes: Tensor | None, form: Form) -> None:
    """Refuses codes that the table has no meaning for."""
    if codes is None or form.table is None or not codes.numel() or form.table.numel() >= 256:
        return
    if int(codes.max()) >= form.table.numel():
        raise Problem(f"{label}: code {int(codes.max())} of {form.table.numel()} meanings: the checkpoint is damaged.")


def _overlap(box: Box, pieces: list[Piece]) -> bool:
    parts = [box.intersect(piece.box) for piece in pieces]
    return sum(part.volume for part in parts if part is not None) != box.volume


def _with_pairs(form: Form, wanted: Form) -> Form:
    """The form as it was before codes that share bytes were stored apart."""
    return Form(block=form.block, codes=form.codes, scales=form.scales, table=form.table, per_byte=wanted.per_byte)
