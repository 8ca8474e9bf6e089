"""What a run is worth beside the unsharded one: how far its weights are from the oracle's, and what else went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.catalogue.sessions import Weights
from tests.support.ranks import Outcome

__all__ = ["BOUND", "Kind", "Verdict", "compare", "failure", "same_bits", "unmoved"]

BOUND = 1e-4
"""The most that a parameter may be off, as a part of the norm of its whole update."""

Kind = Literal["ok", "differs", "raises", "hangs", "cannot be saved", "cannot be loaded", "not run"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one run came to.

    Attributes:
        kind: ``ok``: within the bound of the unsharded run.
        worst: the largest difference of an element, in norms of its parameter's update; inf where a value is not
            finite or a parameter did not move; None where there are no weights to compare.
        parameter: where that is.
        same_bits: whether every element has the oracle's bits.
        detail: the error, or what was done when the run hung.
    """

    kind: Kind
    worst: float | None = None
    parameter: str = ""
    same_bits: bool = False
    detail: str = ""


def unmoved(initial: Weights, final: Weights) -> list[str]:
    """Parameters whose update is zero or not finite: such a run proves nothing."""
    norms = {name: _norm(final[name], initial[name]) for name in initial}
    return [name for name, norm in norms.items() if not 0 < norm < math.inf]


def compare(initial: Weights, oracle: Weights, got: Weights) -> Verdict:
    """Judges final weights.

    Args:
        initial: before the first step.
        oracle: the unsharded run's.
        got: the judged run's; must have the same names and shapes.
    """
    worst, where = 0.0, ""
    for name, want in oracle.items():
        moved = _norm(want, initial[name])
        with np.errstate(all="ignore"):
            off = float(np.max(np.abs(got[name].astype(np.float64) - want.astype(np.float64)), initial=0.0))
        relative = off / moved if 0 < moved < math.inf and math.isfinite(off) else math.inf
        # A weight that nobody updated is no small difference.
        if not np.any(got[name] != initial[name]):
            relative = math.inf
        if relative > worst:
            worst, where = relative, name
    kind: Kind = "ok" if worst <= BOUND else "differs"
    return Verdict(kind=kind, worst=worst, parameter=where, same_bits=same_bits(oracle, got))


def same_bits(one: Weights, other: Weights) -> bool:
    """Whether two runs have the same names and the same bits."""
    return one.keys() == other.keys() and all(value.tobytes() == other[name].tobytes() for name, value in one.items())


def failure(outcomes: Sequence[Outcome]) -> Verdict | None:
    """What a job failed with; None if every rank returned.

    A rank that raised is the cause, those that wait for it are not.
    """
    failed = [outcome for outcome in outcomes if outcome.kind != "ok"]
    if not failed:
        return None
    raised = [outcome for outcome in failed if outcome.kind == "error"]
    first = raised[0] if raised else failed[0]
    stage = first.points[-1] if first.points else "start"
    if not raised:
        return Verdict(kind="hangs" if first.kind == "hang" else "raises", detail=f"{stage}: {first.error}")
    kind: Kind = "raises"
    if stage in ("save", "load"):
        kind = "cannot be saved" if stage == "save" else "cannot be loaded"
    message = " ".join(first.error.split())
    return Verdict(kind=kind, detail=f"{stage}: {first.error_type}: {message}"[:400])


def _norm(final: np.ndarray, initial: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.linalg.norm((final.astype(np.float64) - initial.astype(np.float64)).ravel()))
