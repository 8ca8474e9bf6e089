"""The page of the fault table, as the table says it: ``python -m tests.faults.page`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kinds import DIFFERS, KILLED, KINDS, RAISED, STOPPED
from tests.faults.points import POINTS, Point
from tests.faults.table import OPERATIONS, filled, reason, signal_cells

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[2] / "docs" / "fault-table.md"

_HEAD = """\
# The fault table

One rank fails at a point of an operation. This page is written by `python -m tests.faults.page` from the table that
`tests/faults` runs, on 2 ranks and on 4, over gloo; a test holds it to be the same.

{count}

| kind | what it is |
|---|---|
{kinds}

What the cells say:

* **all**: every rank raises `RankFailureError`, which names the rank, the operation and the cause; on the rank itself
  the original exception is its `__cause__`, or is raised itself (a `KeyboardInterrupt` always is). Parameters,
  gradients, state, groups, random numbers and files are the same bit for bit. An `all_reduce` works afterwards, and the
  next step equals that of a run without the failure, bit for bit. (Of an overflow the error does not know the rank.)
* **half**: the operation had begun to write. The rank itself raises; every rank refuses the next step and save with the
  reason, until a good load, after which the next step is right again.
* **half, all**: the same, and every rank raises at once.
* **late**: the others raise what names the rank within the deadline and 2 s; nothing has changed. A rank that comes
  back gets the same error, and then all go on as above.
* **next**: what was begun is finished on every rank that lives; the next step names the rank as **late** does.
* **skip**: nobody raises; every rank skips the step and halves its scale.
* **agree**: nobody raises; the step is right, and no rank says that nobody has the gradient.
* **torch**: torch's own error on every rank; the optimizer's state is the same bit for bit.
* a number: there is no such cell, for the reason below the table.

Of 2 ranks each is at fault, of 4 the first and the last in turn. Killed is the first of 2 or, at every third point, the
last of 4; stopped is the first of 2 and, at every other point, the last of 4. `dcp.load` reads into the model before
anybody is asked; only the optimizer is covered.
"""


def render() -> str:
    """The page."""
    reasons = list(dict.fromkeys(reason(point, kind) for point in POINTS for kind in KINDS if reason(point, kind)))
    lines = [_HEAD.format(count=_count(), kinds="\n".join(f"| {kind} | {text} |" for kind, text in KINDS.items()))]
    lines.append(f"| operation | point | what fails | {' | '.join(KINDS)} |")
    lines.append("|---" * (3 + len(KINDS)) + "|")
    for point in POINTS:
        cells = [_says(point, kind, reasons) for kind in KINDS]
        lines.append(f"| {point.operation} | {point.name} | {point.fails} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {why[0].upper()}{why[1:]}." for number, why in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def _count() -> str:
    live = sum(len(filled(operation, world_size)) for operation in OPERATIONS for world_size in (2, 4))
    lost = sum(len(signal_cells(kind, world_size)) for kind in (KILLED, STOPPED) for world_size in (2, 4))
    entries = [reason(point, kind) for point in POINTS for kind in KINDS]
    there = entries.count("")
    return (
        f"{there} of its {len(entries)} entries are filled, by {live} runs in which all ranks live and {lost} in which "
        f"one is\nkilled or stopped; {len(entries) - there} have a reason instead."
    )


def _says(point: Point, kind: str, reasons: list[str]) -> str:
    why = reason(point, kind)
    if why:
        return str(reasons.index(why) + 1)
    if point.own in ("torch", "skip", "agree"):
        return point.own
    if point.half_written and not point.votes_after:
        return "half" if kind in RAISED else "next"
    if point.half_written:
        return "half, all"
    return "all" if kind in RAISED or kind == DIFFERS else "late"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
