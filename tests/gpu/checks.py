"""The list of checks, and how one is run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from tests.gpu.target import Target

__all__ = ["CHECKS", "Check", "Figure", "check", "run_check"]

Figure: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that must hold.

    Attributes:
        name: of it; those of rows of the list of bugs end with the row.
        run: raises if it does not hold; what it returns is what was measured, or counted.
        needs_gpu: whether it says nothing on a simulated device.
    """

    name: str
    run: Callable[[Target], Figure]
    needs_gpu: bool


CHECKS: list[Check] = []


def check(name: str, *, needs_gpu: bool = False) -> Callable[[Callable[[Target], Figure]], Callable[[Target], Figure]]:
    """Puts a function on the list."""

    def put(run: Callable[[Target], Figure]) -> Callable[[Target], Figure]:
        CHECKS.append(Check(name=name, run=run, needs_gpu=needs_gpu))
        return run

    return put


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check has ended.

    Attributes:
        name: of the check.
        passed: whether it holds.
        figure: what was measured.
        seconds: that it took.
        error: why it does not hold.
    """

    name: str
    passed: bool
    figure: Figure
    seconds: float
    error: str | None


def run_check(one: Check, target: Target) -> dict[str, Any]:
    """Runs it; whatever it raises is its error."""
    begun = time.perf_counter()
    figure: Figure = {}
    error = None
    try:
        figure = one.run(target)
        target.forget()
    except Exception:  # one that fails must not keep the others from running
        error = traceback.format_exc(limit=-6)
    seconds = round(time.perf_counter() - begun, 3)
    return asdict(Outcome(name=one.name, passed=error is None, figure=figure, seconds=seconds, error=error))
