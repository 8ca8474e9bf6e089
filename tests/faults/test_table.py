"""The fault table: one rank fails at a point of an operation; what every rank is told, and what is left afterwards."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.cells import Seen, at_point, fill, given_up
from tests.faults.expect import late_by, problems
from tests.faults.kinds import KILLED, STOPPED
from tests.faults.table import OPERATIONS, Cell, filled, signal_cells
from tests.support.ranks import RankPool, Signal

# Jobs at a time: they wait for deadlines more than they compute.
_JOBS = 4
LIVE = [(operation, world_size) for operation in OPERATIONS for world_size in (2, 4) if filled(operation, world_size)]


@pytest.mark.parametrize(("operation", "world_size"), LIVE)
def test_one_rank_fails_and_all_live_E1_E3_E4_E6_T2(
    operation: str, world_size: int, ranks: RankPool, tmp_path: Path
) -> None:
    cells = filled(operation, world_size)
    by_rank = ranks.run(world_size, fill, str(tmp_path), cells)
    seen = zip(*by_rank, strict=True)
    assert [problem for cell, one in zip(cells, seen, strict=True) for problem in problems(cell, one)] == []


def run_stopped(directory: Path, cells: list[Cell]) -> list[tuple[Cell, list[Seen | None]]]:
    """Cells in which a rank is stopped and comes back: one after the other, in the same processes."""
    planned = [
        one
        for cell in cells
        for one in (
            Signal(rank=cell.faulty, signal=signal.SIGSTOP, at=at_point(cell)),
            Signal(rank=cell.faulty, signal=signal.SIGCONT, at=given_up(cell), by=cell.world_size - 1 - cell.faulty),
        )
    ]
    directory.mkdir()
    with RankPool(cells[0].world_size) as pool:
        by_rank = pool.run(cells[0].world_size, fill, str(directory), cells, signals=planned)
    return [(cell, [*seen]) for cell, seen in zip(cells, zip(*by_rank, strict=True), strict=True)]


def run_killed(directory: Path, cells: list[Cell]) -> list[tuple[Cell, list[Seen | None]]]:
    """A cell in which a rank is killed, and its processes with it."""
    (cell,) = cells
    planned = [Signal(rank=cell.faulty, signal=signal.SIGKILL, at=at_point(cell))]
    directory.mkdir()
    with RankPool(cell.world_size) as pool:
        outcomes = pool.outcomes(cell.world_size, fill, str(directory), cells, signals=planned)
    assert outcomes[cell.faulty].kind == "died"
    assert [one for one in outcomes if one.kind not in ("ok", "died")] == []
    return [(cell, [None if one.value is None else one.value[0] for one in outcomes])]


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, list[Seen | None]]:
    """Every cell in which a rank is killed or stopped, by rank what it came to."""
    directory = tmp_path_factory.mktemp("signalled")
    jobs = [(run_killed, [cell]) for world_size in (2, 4) for cell in signal_cells(KILLED, world_size)]
    for world_size in (4, 2):
        cells = signal_cells(STOPPED, world_size)
        jobs = [(run_stopped, cells[: len(cells) // 2]), (run_stopped, cells[len(cells) // 2 :]), *jobs]
    with ThreadPoolExecutor(_JOBS) as threads:
        running = [threads.submit(job, directory / str(n), cells) for n, (job, cells) in enumerate(jobs)]
        return dict(one for job in running for one in job.result())


@pytest.mark.slow
@pytest.mark.timeout(200)  # the first of them waits for all
@pytest.mark.parametrize(
    "cell",
    [cell for kind in (KILLED, STOPPED) for world_size in (2, 4) for cell in signal_cells(kind, world_size)],
    ids=lambda cell: cell.label,
)
def test_a_rank_is_lost_and_the_others_are_told_in_time_E4_E9_E10(
    cell: Cell, signalled: dict[Cell, list[Seen | None]]
) -> None:
    assert problems(cell, signalled[cell]) == []
    assert late_by(cell, signalled[cell]) == []
