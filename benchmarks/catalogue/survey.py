"""Takes one class through all its runs: unsharded, wrapped and bare, on 2 ranks, resumed on 2, 4 and 1."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.catalogue.jobs import (
    Chosen,
    Trained,
    choose,
    resume_bare,
    resume_wrapped,
    train_bare,
    train_unsharded,
    train_wrapped,
)
from benchmarks.catalogue.judging import Verdict, compare, failure, same_bits, unmoved
from benchmarks.catalogue.protocols import protocol_of
from tests.support.ranks import RankPool

__all__ = ["RESUMED_ON", "Entry", "survey"]

RESUMED_ON = (2, 4, 1)
_NUM_RANKS = 2
# Of a job. What takes longer waits for something that does not come.
_DEADLINE_S = 60.0
_BARE_DEADLINE_S = 30.0
# Ranks that wait for one that has raised are of no interest.
_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """All that is known of one class.

    Attributes:
        name: ``"torch.optim.<class>"`` or ``"pytorch_optimizer.<class>"``.
        unsharded: why it does not run unsharded; empty if it does.
        refused: why the table of protocols says that it cannot be wrapped; empty if it should be.
        chosen: how the wrapper shows it its parameters; None if wrapping it raised something else than a refusal.
        wrapped: by ``"run"``, ``"resume 2"``, ``"resume 4"``, ``"resume 1"``.
        resumed_bits: whether the run that was resumed on 2 ranks ended with the bits of the one that was not.
        bare: the same runs of the optimizer on DTensors.
        seconds: all of it took.
    """

    name: str
    unsharded: str = ""
    refused: str = ""
    chosen: Chosen | None = None
    wrapped: dict[str, Verdict] = field(default_factory=dict)
    resumed_bits: bool = False
    bare: dict[str, Verdict] = field(default_factory=dict)
    seconds: float = 0.0


def survey(pool: RankPool, name: str, compute: str = "auto", *, bare: bool = True) -> Entry:
    """Runs one class. The pool replaces workers that hang.

    Args:
        pool: of at least 4 workers.
        name: the class's.
        compute: handed to the wrapper; ``"auto"`` is what the table of protocols says.
        bare: whether to run it on DTensors too.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="catalogue-") as directory:
        return _Survey(pool, name, compute, Path(directory)).run(begin, bare=bare)


class _Survey:
    def __init__(self, pool: RankPool, name: str, compute: str, directory: Path) -> None:
        self._pool = pool
        self._name = name
        self._compute = protocol_of(name).compute if compute == "auto" else compute
        self._directory = directory
        self._oracle = Trained()
        self._chosen: Chosen | None = None
        self._resumed_bits = False

    def run(self, begin: float, *, bare: bool) -> Entry:
        refused = protocol_of(self._name).refused
        why_not = self._run_unsharded()
        if why_not and not refused:
            return Entry(name=self._name, unsharded=why_not, seconds=time.perf_counter() - begin)
        return Entry(
            name=self._name,
            unsharded=why_not,
            refused=refused,
            wrapped=self._run_wrapped(),
            bare=self._run_bare() if bare and not why_not else {},
            chosen=self._chosen,
            resumed_bits=self._resumed_bits,
            seconds=time.perf_counter() - begin,
        )

    def _run_unsharded(self) -> str:
        """Why there is no oracle; empty if there is."""
        verdict, trained = self._job(1, _DEADLINE_S, train_unsharded, self._name)
        if trained is None:
            return verdict.detail.removeprefix("start: ")
        self._oracle = trained
        idle = unmoved(trained.initial, trained.weights)
        return f"no finite update of {', '.join(idle)}" if idle else ""

    def _run_wrapped(self) -> dict[str, Verdict]:
        outcomes = self._pool.outcomes(_NUM_RANKS, choose, self._name, self._compute, deadline_s=_DEADLINE_S)
        failed = failure(outcomes)
        if failed is not None:
            return {"run": failed}
        chosen: Chosen = outcomes[0].value
        self._chosen = chosen
        if chosen.compute == "refused" or not self._oracle.weights:
            return {}
        saved = self._directory / "wrapped"
        verdict, trained = self._job(_NUM_RANKS, _DEADLINE_S, train_wrapped, self._name, self._compute, saved)
        found = {"run": verdict}
        if trained is None:
            return found
        for num_ranks in RESUMED_ON:
            verdict, resumed = self._job(num_ranks, _DEADLINE_S, resume_wrapped, self._name, self._compute, saved)
            found[f"resume {num_ranks}"] = verdict
            if num_ranks == _NUM_RANKS and resumed is not None:
                self._resumed_bits = same_bits(trained.weights, resumed.weights)
        return found

    def _run_bare(self) -> dict[str, Verdict]:
        saved = self._directory / "bare"
        verdict, trained = self._job(_NUM_RANKS, _BARE_DEADLINE_S, train_bare, self._name, saved)
        found = {"run": verdict}
        if trained is not None:
            for num_ranks in RESUMED_ON:
                found[f"resume {num_ranks}"] = self._job(num_ranks, _BARE_DEADLINE_S, resume_bare, self._name, saved)[0]
        return found

    def _job(
        self, num_ranks: int, deadline_s: float, job: Callable[..., Trained], *args: Any
    ) -> tuple[Verdict, Trained | None]:
        outcomes = self._pool.outcomes(num_ranks, job, *args, deadline_s=deadline_s, grace_s=_GRACE_S)
        failed = failure(outcomes)
        if failed is not None:
            return failed, None
        trained: Trained = outcomes[0].value
        if not self._oracle.weights:
            return Verdict(kind="not run"), trained
        return compare(self._oracle.initial, self._oracle.weights, trained.weights), trained
