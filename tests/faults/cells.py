"""The job that fills cells of the fault table, on one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from tests.faults.breaking import broken
from tests.faults.kinds import KILLED, RAISED, STOPPED, make_error
from tests.faults.stage import LONG_S, SHORT_S, Caught, Stage, caught
from tests.faults.table import Cell, point_of
from tests.support.ranks import reached, wait_until_reached
from tests.support.snapshot import snapshot

__all__ = ["Seen", "at_point", "fill", "given_up"]


@dataclass(kw_only=True)
class Seen:
    """What a cell came to on one rank.

    Attributes:
        error: what the operation raised.
        changes: how optimizer, model, gradients and random numbers differ from before.
        next: half-written cells: what the next step raised; where a rank was killed or stopped, instead of ``error``.
        refused: half-written cells: what saves raised, shardopt's.
        scale: by what GradScaler has multiplied its scale.
        without: parameters that are said to have had no gradient in a first step.
        unchanged: the save target has the same files as before.
        ranks: what an ``all_reduce`` of ones gives afterwards.
        step: how a correct step afterwards differs from that of an undisturbed run.
        mended: how weights and state differ after a good load, where one was needed.
    """

    error: Caught
    changes: list[str] = field(default_factory=list)
    next: Caught | None = None
    refused: Caught | None = None
    scale: float = 1.0
    without: list[str] = field(default_factory=list)
    unchanged: bool = True
    ranks: float = 0.0
    step: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)


def at_point(cell: Cell) -> str:
    """Where the rank of a cell is killed or stopped."""
    return f"at {cell.label}"


def given_up(cell: Cell) -> str:
    """Where the others have their error."""
    return f"given up {cell.label}"


def fill(directory: str, cells: Sequence[Cell], timeout_s: float | None = None) -> list[Seen]:
    """Fills the cells one after the other, on one stage."""
    signals = any(cell.kind in (KILLED, STOPPED) for cell in cells)
    stage = Stage(directory, timeout_s or (SHORT_S if signals else LONG_S))
    return [_fill_one(stage, cell) for cell in cells]


def _fill_one(stage: Stage, cell: Cell) -> Seen:
    point = point_of(cell)
    faulty = dist.get_rank() == cell.faulty
    signalled = cell.kind in (KILLED, STOPPED)
    stage.set_up(cell.operation)
    files = sorted(os.listdir(os.path.join(stage.directory, "target")))
    reached(cell.label)  # for whoever reads of a hang which cell it was
    dist.barrier()
    fault = _Fault(cell)
    with broken(stage, cell.operation, cell.point, cell.kind, fault, faulty=faulty), stage.deadlines():
        before = snapshot(stage.optimizer, stage.model)
        fault.armed = True
        error = caught(lambda: stage.perform(cell.operation))
        fault.armed = False
        seen = Seen(error=error, changes=before.diff(snapshot(stage.optimizer, stage.model)))
        seen.scale, seen.without = stage.scale, stage.without
        if signalled and point.half_written and not point.votes_after:
            seen.next = caught(stage.optimizer.step)
    if cell.kind == KILLED:
        return seen
    if cell.kind == STOPPED:
        reached(given_up(cell))
        wait_until_reached(given_up(cell), count=cell.world_size)
    _look_after(stage, cell, seen, files)
    return seen


class _Fault:
    """What happens at the point, on the rank at fault, while the operation runs."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.armed = False

    def __call__(self) -> None:
        if not self.armed:
            return
        if self.cell.kind in RAISED:
            raise make_error(self.cell.kind)
        self.armed = False
        reached(at_point(self.cell))


def _look_after(stage: Stage, cell: Cell, seen: Seen, files: list[str]) -> None:
    point = point_of(cell)
    stage.set_up("")
    poisoned = point.half_written and (cell.kind != STOPPED or point.votes_after)
    if poisoned:
        seen.next = caught(stage.optimizer.step)
        target = os.path.join(stage.directory, "half")
        seen.refused = caught(lambda: shardopt_save(stage, target))
    dist.barrier()
    seen.unchanged = sorted(os.listdir(os.path.join(stage.directory, "target"))) == files
    if point.half_written or point.own == "agree" or cell.operation == "dcp.load":
        stage.mend()
        seen.mended = stage.differences()
    seen.ranks = stage.reduced()
    seen.step = stage.step_both()


def shardopt_save(stage: Stage, target: str) -> None:
    """A save that must be refused."""
    stage.target = target
    stage.perform("save")
