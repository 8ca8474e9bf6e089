"""What every cell of the fault table has to show on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.faults.cells import Seen
from tests.faults.kinds import DIFFERS, KILLED, RAISED, STOPPED
from tests.faults.points import Point
from tests.faults.stage import LONG_S, SHORT_S, Caught
from tests.faults.table import Cell, point_of

__all__ = ["late_by", "problems"]

_GRACE_S = 2.0
_POISONED = "failed after it had begun to write"


def problems(cell: Cell, seen: Sequence[Seen | None]) -> list[str]:
    """What is wrong with a cell, a sentence each.

    Args:
        cell: of the table.
        seen: by rank; None of a rank that was killed.
    """
    found: list[str] = []
    for rank, one in enumerate(seen):
        if one is not None:
            found += [f"{cell.label}: rank {rank}: {problem}" for problem in _problems_on(cell, rank, one)]
        elif cell.kind != KILLED or rank != cell.faulty:
            found.append(f"{cell.label}: rank {rank} did not come back")
    verdicts = {one.error.text for one in seen if one is not None and one.error.kind == "RankFailureError"}
    if len(verdicts) > 1:
        found.append(f"{cell.label}: a split: {sorted(verdicts)}")
    return found


def _problems_on(cell: Cell, rank: int, seen: Seen) -> Iterator[str]:
    point = point_of(cell)
    signalled = cell.kind in (KILLED, STOPPED)
    half_done = point.half_written and not point.votes_after
    if point.own in ("torch", "skip", "agree"):
        yield from _of_its_own(point, seen)
    elif signalled and half_done:
        yield from [] if seen.error.kind == "" else [f"what was begun is finished, but: {seen.error}"]
        assert seen.next is not None
        yield from _missing("step", cell, seen.next)
    elif signalled:
        yield from _missing(point.voted_as, cell, seen.error)
    elif cell.kind == DIFFERS:
        yield from _differing(point, cell, seen.error)
    elif half_done:
        yield from _half_done(cell, rank, seen)
    else:
        yield from _failed(point, cell, rank, seen.error)
    yield from _effects(point, cell, seen)


def _of_its_own(point: Point, seen: Seen) -> Iterator[str]:
    """Points at which no verdict of shardopt's is raised."""
    if point.own == "torch" and (seen.error.kind != "CheckpointException" or "on purpose" not in seen.error.text):
        yield f"torch raised {seen.error}"
    if point.own in ("skip", "agree") and seen.error.kind:
        yield f"raised {seen.error}"
    if point.own == "skip" and seen.scale != 0.5:
        yield f"did not skip as the others: its scale is {seen.scale} of what it was"
    if point.own == "agree" and seen.without:
        yield f"says of {seen.without} that no rank has a gradient"


def _effects(point: Point, cell: Cell, seen: Seen) -> Iterator[str]:
    # torch reads a model into its own memory before anybody is asked; who skips a step has divided gradients.
    meant = "parameter." if cell.operation == "dcp.load" else "gradient." if point.own == "skip" else None
    changes = [change for change in seen.changes if meant is None or not change.startswith(meant)]
    if changes and not point.half_written and point.own != "agree":
        yield f"changed: {changes[:3]}"
    if cell.kind == KILLED:
        return
    if point.half_written and (cell.kind != STOPPED or point.votes_after):
        for what, caught in (("step", seen.next), ("save", seen.refused)):
            if caught is None or caught.kind != "RankFailureError" or _POISONED not in caught.text:
                yield f"a {what} of half-written state: {caught}"
    if seen.mended:
        yield f"after a good load: {seen.mended[:3]}"
    # The first rank, once it runs again, goes on with publishing what it has begun to.
    if not seen.unchanged and (cell.point, cell.kind) != ("finish", STOPPED):
        yield "the files in the directory are others"
    if seen.ranks != cell.world_size:
        yield f"all_reduce afterwards gives {seen.ranks}"
    if seen.step:
        yield f"a step afterwards differs: {seen.step[:3]}"


def _failed(point: Point, cell: Cell, rank: int, error: Caught) -> Iterator[str]:
    """All ranks raise what names the rank, the operation and the cause."""
    if error.seconds >= LONG_S:
        yield f"waited {error.seconds:.1f} s"
    own = _own(point, cell) if rank == cell.faulty else "cause"
    if own != "cause":
        told = RAISED[cell.kind]
        kind = told.partition(":")[0] if own == "itself" else own
        if error.kind != kind or (own == "itself" and not f"{error.kind}: {error.text}".startswith(told)):
            yield f"raised {error}, expected {kind}, {told}"
        return
    told = "" if _is_value(point, cell) else RAISED[cell.kind]
    start = f"{point.voted_as} failed on rank {cell.faulty}: "
    said = (error.kind, error.operation, error.failures, error.missing)
    if said != ("RankFailureError", point.voted_as, (cell.faulty,), ()):
        yield f"raised {error}, expected {start}{told}"
    if not error.text.startswith(start) or told not in error.text:
        yield f"says {error.text!r}, expected {start}{told}"
    # The others are told the beginning of it, in one line.
    if rank == cell.faulty and (not error.cause or told not in error.cause or error.cause[:20] not in error.text):
        yield f"its cause is {error.cause!r}, expected {told}; the others are told {error.text!r}"


def _own(point: Point, cell: Cell) -> str:
    """What the rank at fault raises itself: the name of a class, the original exception or the verdict it causes."""
    if cell.kind == "interrupted":
        return "KeyboardInterrupt"
    if point.own == "LoadError or cause":  # what is an Exception is taken for a damaged file
        return "cause" if cell.kind == "no Exception" else "LoadError"
    return point.own


def _is_value(point: Point, cell: Cell) -> bool:
    """Whether what is raised is shardopt's own refusal of a value."""
    return cell.kind == "raises" and "cannot be pickled" in point.absent and point.own != "torch"


def _half_done(cell: Cell, rank: int, seen: Seen) -> Iterator[str]:
    """Only the rank at fault raises; what it has done to the others, the next step tells."""
    kind, _, text = RAISED[cell.kind].partition(": ")
    expected = (kind, text) if rank == cell.faulty else ("", "")
    if (seen.error.kind, seen.error.text.strip()) != expected:
        yield f"raised {seen.error}, expected {expected}"
    start = f"step failed on rank {cell.faulty}: ShardoptError: an earlier "
    if seen.next is None or not seen.next.text.startswith(start) or kind not in seen.next.text:
        yield f"the next step raised {seen.next}, expected {start}...{kind}"


def _missing(voted_as: str, cell: Cell, error: Caught) -> Iterator[str]:
    if voted_as == "construct":
        kind, text = "ScopeError", f"rank {cell.faulty} did not construct it within {SHORT_S:g} s"
        wrong = text not in error.text
    else:
        kind, text = "RankFailureError", f"{voted_as}: rank {cell.faulty} did not arrive within {SHORT_S:g} s"
        wrong = not error.text.startswith(text) or error.missing != (cell.faulty,) or error.operation != voted_as
    if wrong or error.kind != kind:
        yield f"raised {error}, expected {text}"


def _differing(point: Point, cell: Cell, error: Caught) -> Iterator[str]:
    if point.name == "overflow":
        # Ranks give each other what they know in one number, which does not say who knows it.
        if error.kind != "RankFailureError" or "overflowed on some ranks and not on others" not in error.text:
            yield f"raised {error}"
        return
    if error.kind != "RankFailureError" or error.operation != point.voted_as or (cell.faulty,) not in error.disagree:
        yield f"raised {error}, expected {point.voted_as} of ranks that differ"
    if f"rank {cell.faulty}" not in error.text:
        yield f"does not name rank {cell.faulty}: {error.text}"


def late_by(cell: Cell, seen: Sequence[Seen | None]) -> list[str]:
    """The survivors of a dead or stopped rank that had to wait too long."""
    point = point_of(cell)
    found: list[str] = []
    for rank, one in enumerate(seen):
        if one is None or rank == cell.faulty:
            continue
        error = one.next if one.next is not None and point.half_written and not point.votes_after else one.error
        if error.seconds > SHORT_S + _GRACE_S:
            found.append(f"{cell.label}: rank {rank} waited {error.seconds:.1f} s")
    return found
