"""Planning what an optimizer that learns how to quantise will have learnt after a load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt.errors import PlacementError
from shardopt.geometry import Box
from shardopt.layouts.learnt import LearntCodec
from shardopt.layouts.tracked import Tracked
from shardopt.portable.blockwise import TABLES, saved_table
from shardopt.portable.segments import BlockwiseEntry
from shardopt.presentation.inventory import Inventory, Part
from shardopt.staging.report import Report, say_names
from shardopt.staging.source import Source

__all__ = ["LearntPlan", "plan_learnt"]


@dataclass(frozen=True, slots=True)
class LearntPlan:
    """What codes of one optimizer will mean.

    Attributes:
        inner: the optimizer.
        codec: of it.
        table: fp32; None makes it learn one in its next step.
    """

    inner: torch.optim.Optimizer
    codec: LearntCodec
    table: Tensor | None

    def commit(self) -> None:
        """Puts it in place."""
        self.codec.adopt(self.inner, self.table)


def plan_learnt(inventory: Inventory, source: Source, report: Report) -> dict[int, LearntPlan]:
    """By number of the optimizer, what each that learns will have learnt; problems go to the report.

    That is the table with which most of the elements were saved that this rank will have state of: its own, on the
    ranks that wrote it. Where each rank sees all parameters, all choose the same.
    """
    plans: dict[int, LearntPlan] = {}
    for index, part in enumerate(inventory.parts):
        if isinstance(part.codec, LearntCodec):
            try:
                table = _chosen(index, part, part.codec, inventory, source)
            except PlacementError as error:
                report.problems.append(f"{type(part.inner).__name__}: {error}")
                continue
            plans[index] = LearntPlan(part.inner, part.codec, table)
    return plans


def _chosen(index: int, part: Part, codec: LearntCodec, inventory: Inventory, source: Source) -> Tensor | None:
    own = [item for item in inventory.tracked if item.optimizer == index]
    counts: dict[str, int] = {}
    for item in own:
        if item.fqn in source.saved_as and not source.options.is_fresh(item.name):
            for table, num_elements in _tables_of(item, codec, source):
                counts[table] = counts.get(table, 0) + num_elements
    live = codec.table(part.inner)
    # The first of equals: manifests are read in one order.
    most = max(counts, key=counts.__getitem__) if counts else None
    label = type(part.inner).__name__
    table = None if most is None else saved_table(source.manifest.extra.get(TABLES), most, label)
    keeping = [item.fqn for item in own if item.fqn not in source.saved_as and not source.options.is_fresh(item.name)]
    if live is None or not keeping:
        return None if table is None else table.to(own[0].local.device)
    if table is not None and not torch.equal(table, live.cpu()):
        raise PlacementError(
            f"{say_names(keeping)}: not in the checkpoint, so that their state stays, and what its codes mean would be "
            "changed by the load; start them anew with fresh=, or load into a new optimizer."
        )
    return live


def _tables_of(item: Tracked, codec: LearntCodec, source: Source) -> Iterator[tuple[str, int]]:
    """Names of tables, and for how many elements each was used that are this rank's."""
    box = item.state_box or Box.whole(item.shape)
    for entry in source.record(item).entries.values():
        if not isinstance(entry, BlockwiseEntry) or entry.codec != codec.name:
            continue
        if entry.table is not None and box.volume:
            yield entry.table, box.volume
        for one in entry.segments:
            shared = Box(one.offset, one.size).intersect(box)
            if one.table is not None and shared is not None and shared.volume:
                yield one.table, shared.volume
