"""The fault table: every operation, each point at which it can fail on one rank, and every kind of failure."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.kinds import DIFFERS, KILLED, RAISED, STOPPED
from tests.faults.points import POINTS, Point

__all__ = ["OPERATIONS", "Cell", "filled", "point_of", "reason", "signal_cells"]

OPERATIONS = tuple(dict.fromkeys(point.operation for point in POINTS))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of the table, on so many ranks, with one of them at fault."""

    operation: str
    point: str
    kind: str
    world_size: int
    faulty: int

    @property
    def label(self) -> str:
        """For the id of a test."""
        return f"{self.operation}/{self.point}/{self.kind}/{self.faulty} of {self.world_size}"


def point_of(cell: Cell) -> Point:
    """The point a cell is at."""
    return next(one for one in POINTS if (one.operation, one.name) == (cell.operation, cell.point))


def reason(point: Point, kind: str) -> str:
    """Why there is no cell of this kind at the point; empty if there is one."""
    if kind in point.absent:
        return point.absent[kind]
    if kind in (KILLED, STOPPED) and point.same_wait:
        return f"the others wait as at `{point.same_wait}`"
    return ""


def filled(operation: str, world_size: int) -> list[Cell]:
    """The cells of an operation in which all live: of 2 ranks each is at fault, of 4 first and last in turn."""
    cells: list[Cell] = []
    for point in POINTS:
        for kind in (*RAISED, DIFFERS):
            if point.operation != operation or reason(point, kind):
                continue
            faulty = (0, 1) if world_size == 2 else (3,) if len(cells) % 2 else (0,)
            cells += [
                Cell(operation=operation, point=point.name, kind=kind, world_size=world_size, faulty=rank)
                for rank in ((0,) if point.first_only else faulty)
            ]
    return cells


def signal_cells(kind: str, world_size: int) -> list[Cell]:
    """The cells in which a rank is killed or stopped: the first rank of 2, the last of 4.

    A killed rank takes its processes with it, so that two points in three have that on 2 ranks, the third on 4. All
    have a stopped one on 2 ranks, every other point on 4 too.
    """
    points = [point for point in POINTS if not reason(point, kind)]
    if kind == KILLED:
        points = [point for place, point in enumerate(points) if (place % 3 == 2) == (world_size == 4)]
    elif world_size == 4:
        points = points[::2]
    last = 0 if world_size == 2 else 3
    return [
        Cell(
            operation=point.operation,
            point=point.name,
            kind=kind,
            world_size=world_size,
            faulty=0 if point.first_only else last,
        )
        for point in points
    ]
