"""Proof that the soak can fail: it runs with faults in shardopt, each of which it has to find in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.bars import Bar, print_bars
from benchmarks.harness.results import record
from benchmarks.soaking.driving import Failure, run_episode
from benchmarks.soaking.episode import Episode, draw
from benchmarks.soaking.sabotage import SABOTAGE
from tests.support.ranks import RankPool

__all__ = ["LIMIT_S", "Control", "find", "prove"]

LIMIT_S = 120.0
# Of a leg: a fault that lets ranks wait for each other for ever is found when it has passed.
_DEADLINE_S = 60.0
_SEED = 4711
# Others import libraries, which takes longer than to find a fault.
_RULES = ("AdamW", "AdamW fused", "Adam", "SGD", "RMSprop", "SwapAdamW")


class Control:
    """Episodes as they are, without a fault: what fails in them anyhow proves nothing."""

    def __init__(self) -> None:
        self._passed: set[int] = set()

    def check(self, pool: RankPool, number: int, patience: float) -> None:
        """Runs an episode unless it has passed already.

        Raises:
            AssertionError: it fails.
        """
        if number not in self._passed:
            try:
                run_episode(pool, _episode(number), patience=patience, deadline_s=_DEADLINE_S)
            except Failure as failure:
                raise AssertionError(f"episode {number} fails without a fault, {failure.kind}: {failure}") from failure
            self._passed.add(number)


def _episode(number: int) -> Episode:
    return draw(_SEED, number, rules=_RULES)


def find(pool: RankPool, sabotage: str, patience: float, control: Control) -> tuple[float, str]:
    """Runs episodes, each without and with a fault in shardopt, until one fails; after how many seconds, and how.

    Raises:
        AssertionError: none failed in time as that fault may make it fail, or one did without the fault.
    """
    seconds, number = 0.0, 0
    others: list[str] = []
    while seconds < LIMIT_S:
        control.check(pool, number, patience)
        begun = time.monotonic()
        failure: Failure | None = None
        try:
            run_episode(pool, _episode(number), patience=patience, deadline_s=_DEADLINE_S, sabotage=sabotage)
        except Failure as caught:
            failure = caught
        seconds += time.monotonic() - begun
        if failure is not None:
            how = f"episode {number}, {failure.kind}: {failure}"
            if failure.kind in SABOTAGE[sabotage].kinds:
                return seconds, how
            others.append(how)
        number += 1
    other = "".join(f"\nfailed otherwise: {how}" for how in others)
    raise AssertionError(f"{sabotage}: {number} episodes have not found it in {LIMIT_S:g} s{other}")


def prove(pool: RankPool, out: Path, patience: float, names: Sequence[str] = ()) -> int:
    """Finds every fault, or the named ones, and prints how; the exit status."""
    bars: list[Bar] = []
    control = Control()
    for name in names or SABOTAGE:
        seconds, how = find(pool, name, patience, control)
        first = " ".join(how.split())[:240]
        print(f"{name}: {first}", flush=True)
        record(out, "soak proof", {"fault": name}, {"seconds": round(seconds, 1), "how": first})
        bars.append(Bar(name=f"found: {name}", value=seconds, limit=LIMIT_S, at_least=False, unit=" s"))
    print()
    return print_bars(bars)
