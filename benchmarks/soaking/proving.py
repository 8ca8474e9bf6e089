"""Proof that the soak can fail: it runs with faults in shardopt, each of which it has to find in time."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.harness.bars import Bar, print_bars
from benchmarks.harness.results import record
from benchmarks.soaking.driving import Failure, run_episode
from benchmarks.soaking.episode import draw
from benchmarks.soaking.sabotage import SABOTAGE
from tests.support.ranks import RankPool

__all__ = ["LIMIT_S", "find", "prove"]

LIMIT_S = 120.0
# Of a leg: a fault that lets ranks wait for each other for ever is found when it has passed.
_DEADLINE_S = 60.0
_SEED = 4711
# Others import libraries, which takes longer than to find a fault.
_RULES = ("AdamW", "AdamW fused", "Adam", "SGD", "RMSprop", "SwapAdamW")


def find(pool: RankPool, sabotage: str, patience: float) -> tuple[float, str]:
    """Runs episodes with a fault in shardopt until one fails; after how many seconds, and how.

    Raises:
        AssertionError: none failed in time, or the soak's own code did.
    """
    begun = time.monotonic()
    number = 0
    while time.monotonic() < begun + LIMIT_S:
        try:
            episode = draw(_SEED, number, rules=_RULES)
            run_episode(pool, episode, patience=patience, deadline_s=_DEADLINE_S, sabotage=sabotage)
        except Failure as failure:
            if failure.kind == "soak":
                raise AssertionError(f"{sabotage}: the soak itself failed, in episode {number}: {failure}") from failure
            return time.monotonic() - begun, f"episode {number}, {failure.kind}: {failure}"
        number += 1
    raise AssertionError(f"{sabotage}: {number} episodes have not found it in {LIMIT_S:g} s")


def prove(pool: RankPool, out: Path, patience: float) -> int:
    """Finds every fault, and prints how; the exit status."""
    bars: list[Bar] = []
    for name in SABOTAGE:
        seconds, how = find(pool, name, patience)
        first = " ".join(how.split())[:240]
        print(f"{name}: {first}", flush=True)
        record(out, "soak proof", {"fault": name}, {"seconds": round(seconds, 1), "how": first})
        bars.append(Bar(name=f"found: {name}", value=seconds, limit=LIMIT_S, at_least=False, unit=" s"))
    print()
    return print_bars(bars)
