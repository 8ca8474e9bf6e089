"""Disables each vote and guard of shardopt in turn; the fault table must notice: ``python -m tests.faults.mutants``.

Prints what was found and what was killed, and exits with 1 if a mutant lives that is not in ``HARMLESS``, or if one of
those does not exist any more. A mutant is killed by a cell on two ranks that comes out other than the table says, or by
ranks that do not come back. With arguments, only mutants whose name holds one of them are tried.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from tests.faults.expect import problems
from tests.faults.mutation import Mutant, discovered, fill_mutated
from tests.faults.table import OPERATIONS, filled
from tests.support.ranks import RankError, RankPool

__all__ = ["HARMLESS", "survivors"]

_DEADLINE_S = 25.0
_GRACE_S = 2.0

_ONE_RANK = (
    "only a scope of one rank gets there, which asks nobody: no rank is told of another's failure. "
    "tests/unit/checkpoint/test_saving.py has saves of one process that fail"
)
_WHOLE = (
    "the vote of owner and replicated on an update, and the table steps element-wise rules only. "
    "tests/ranks/test_whole.py has updates that fail on one rank or differ, test_whole_breaks.py cleared gradients"
)
_CAST = "consensus.vote(operation, problem, every_step=True, digest=digest, fac"
HARMLESS: Mapping[str, str] = {
    "optimizer.py ShardedStateOptimizer.state: guard: refuse_dcp_state_dict()": (
        "refuses torch's get_optimizer_state_dict on all ranks alike, before anything is communicated: no failure of "
        "one rank; tests/unit/test_torch_compat.py has it"
    ),
    "staging/stepping.py Stepping._get_ready: guard: _refuse_no_closure(presentations, attempt.closure)": (
        "refused on all ranks alike, for a rule that needs a closure; tests/unit/test_layouts.py has it"
    ),
    **{f"staging/construction.py _join: {rule}: {_CAST}": _WHOLE for rule in ("vote", "digest", "facts", "problem")},
    "scope/scope.py Scope._mail: vote: self.vote(operation, problem=problem)": _ONE_RANK,
    "scope/scope.py Scope._mail: problem: self.vote(operation, problem=problem)": _ONE_RANK,
}
"""Name of a mutant -> why no cell can notice it."""

# Where a mutant is most likely to be noticed; the other operations follow.
_LIKELY: Mapping[str, tuple[str, ...]] = {
    "staging/stepping.py": ("step", "scaled step", "unscale"),
    "staging/presence.py": ("first step",),
    "staging/poison.py": ("step", "commit", "load"),
    "staging/offer.py": ("state_dict", "prepare_load"),
    "staging/prepared.py": ("prepare_load", "commit"),
    "checkpoint/contents.py": ("save", "load"),
    "checkpoint/saving.py": ("save",),
    "checkpoint/loading.py": ("load",),
    "checkpoint/wrapped.py": ("load",),
    "checkpoint/agreement.py": ("save", "load"),
    "portable/agreement.py": ("state_dict",),
    "scope/differences.py": ("construct", "state_dict"),
    "scope/scope.py": ("save", "step"),
}
_LIKELY_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "ShardedStateOptimizer.step": ("step",),
    "ShardedStateOptimizer._prepare": ("prepare_load",),
    "ShardedStateOptimizer.add_param_group": ("add_param_group",),
    "ShardedStateOptimizer._loaded": ("commit", "load"),
}


def survivors(mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant with what has killed it; empty if nothing has."""
    with RankPool(2) as pool:
        for mutant in mutants:
            yield mutant, next(_killers(pool, mutant), "")


def _killers(pool: RankPool, mutant: Mutant) -> Iterator[str]:
    likely = _LIKELY_FUNCTIONS.get(mutant.function, _LIKELY.get(mutant.path, ()))
    for operation in dict.fromkeys((*likely, *OPERATIONS)):
        cells = filled(operation, 2)
        if not cells:
            continue
        with tempfile.TemporaryDirectory() as directory:
            try:
                by_rank = pool.run(2, fill_mutated, directory, mutant, cells, deadline_s=_DEADLINE_S, grace_s=_GRACE_S)
            except RankError as error:
                yield str(error).partition("\n---")[0].replace("\n", "; ")
                return
        for cell, seen in zip(cells, zip(*by_rank, strict=True), strict=True):
            yield from problems(cell, seen)


def main() -> int:
    """Tries all; the exit status."""
    every = discovered()
    chosen = [one for one in every if not sys.argv[1:] or any(part in one.name for part in sys.argv[1:])]
    alive: list[str] = []
    start = time.monotonic()
    for mutant, killer in survivors([one for one in chosen if one.name not in HARMLESS]):
        print(f"{time.monotonic() - start:6.1f} s  {mutant.name}\n          {killer[:300] or 'ALIVE'}", flush=True)
        alive += [] if killer else [mutant.name]
    harmless = [one.name for one in chosen if one.name in HARMLESS]
    gone = sorted(HARMLESS.keys() - {one.name for one in every})
    print(
        f"\nfound {len(chosen)}, of which harmless {len(harmless)}, killed {len(chosen) - len(harmless) - len(alive)}"
    )
    print("".join(f"alive: {name}\n" for name in alive) + "".join(f"not found: {name}\n" for name in gone))
    return 1 if alive or gone else 0


if __name__ == "__main__":
    sys.exit(main())
