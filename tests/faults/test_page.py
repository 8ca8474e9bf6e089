"""The page of the fault table says what the table says."""

from __future__ import annotations

from tests.faults.kinds import KINDS
from tests.faults.page import PAGE, render
from tests.faults.points import POINTS
from tests.faults.table import OPERATIONS, filled, reason, signal_cells


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "write it anew: python -m tests.faults.page"


def test_every_entry_is_filled_or_has_a_reason() -> None:
    cells = [
        *(cell for operation in OPERATIONS for world_size in (2, 4) for cell in filled(operation, world_size)),
        *(cell for kind in ("killed", "stopped") for world_size in (2, 4) for cell in signal_cells(kind, world_size)),
    ]
    there = {(cell.operation, cell.point, cell.kind) for cell in cells}
    empty = [
        (point.operation, point.name, kind)
        for point in POINTS
        for kind in KINDS
        if ((point.operation, point.name, kind) in there) == bool(reason(point, kind))
    ]
    assert empty == []
    assert len({(point.operation, point.name) for point in POINTS}) == len(POINTS)


def test_reasons_that_name_a_point_name_one_that_is_filled() -> None:
    for point in POINTS:
        if point.same_wait:
            (other,) = [one for one in POINTS if (one.operation, one.name) == (point.operation, point.same_wait)]
            assert reason(other, "killed") == reason(other, "stopped") == ""
