"""A pool of worker processes that run one function on 1 to N gloo ranks, and say what became of each rank."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tests.support.parcel import pack
from tests.support.rank_flight import Flight, Signal
from tests.support.rank_messages import Outcome, Stop
from tests.support.rank_process import WorkerProcess, warm_up
from tests.support.rank_worker import reached, wait_until_reached

__all__ = ["Outcome", "RankError", "RankPool", "Signal", "reached", "wait_until_reached"]

_STOP_S = 5.0


class RankError(Exception):
    """At least one rank of a job did not return, or a planned signal was never sent.

    Attributes:
        outcomes: what every rank came to, in rank order.
    """

    def __init__(self, function: str, outcomes: Sequence[Outcome], *, problem: str = "") -> None:
        self.outcomes: tuple[Outcome, ...] = tuple(outcomes)
        failed = [outcome for outcome in outcomes if outcome.kind != "ok"]
        lines = [f"{function}: {problem or f'{len(failed)} of {len(outcomes)} ranks failed'}"]
        lines += [f"  rank {outcome.rank}: {_summary(outcome)}" for outcome in outcomes]
        super().__init__("\n".join([*lines, *map(_details, failed)]))


def _summary(outcome: Outcome) -> str:
    what = f"{outcome.error_type}: {outcome.error}" if outcome.kind == "error" else outcome.error
    return outcome.kind if outcome.kind == "ok" else f"{outcome.kind}: {what}"


def _details(outcome: Outcome) -> str:
    parts = {
        "traceback": outcome.traceback,
        "stacks": outcome.stacks,
        "reached": ", ".join(outcome.points),
        "warnings": "\n".join(outcome.warnings),
        "output": outcome.output,
    }
    return "\n".join(f"--- rank {outcome.rank} {part} ---\n{text.rstrip()}" for part, text in parts.items() if text)


class RankPool:
    """Persistent worker processes; a job takes the first ``world_size`` of them and gives them back.

    Workers start when a job first needs them. After a job in which a rank hung or died its workers are killed, and the
    next job gets new ones. One job runs at a time.

    Attributes:
        size: how many workers there can be.
        num_jobs: since the workers were new.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._directory = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self._names = map(str, itertools.count())
        self._jobs = itertools.count()
        self._workers: list[WorkerProcess] = []
        self._last = "no job yet"
        self.num_jobs = 0
        warm_up()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are alive now, in rank order."""
        return tuple(worker.pid for worker in self._workers if worker.alive())

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """What the function returned on each rank.

        Takes the arguments of `outcomes`.

        Raises:
            RankError: if a rank raised, hung or died; it says all that is known of every rank.
        """
        outcomes = self.outcomes(world_size, function, *args, **options)
        if any(outcome.kind != "ok" for outcome in outcomes):
            raise RankError(_name(function), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        deadline_s: float = 60.0,
        grace_s: float = 15.0,
        fresh: bool = False,
        signals: Sequence[Signal] = (),
        store_host: Literal["parent", "rank 0"] = "parent",
        process_group: bool = True,
    ) -> list[Outcome]:
        """What became of each rank; a failing rank raises nothing here.

        Args:
            world_size: 1 to the size of the pool.
            function: a module-level function; every rank calls it with ``args``, RNGs seeded with 0.
            args: picklable; tensors go by value. So does what the function returns.
            deadline_s: from the moment every worker is ready; who has not finished by then hangs.
            grace_s: once a rank has failed, the others get this long at most.
            fresh: run in new processes that are discarded afterwards; for jobs that leave a process unusable.
            signals: to be sent to ranks at points which the function reports through ``reached``.
            store_host: process of the job's TCP store: the pool's (as an agent of torchrun), or rank 0.
            process_group: False leaves torch.distributed uninitialized; ``world_size`` must be 1.

        Raises:
            RankError: only if one of ``signals`` was never sent, so that the job did not test what was meant.
        """
        self._check(world_size, function, process_group)
        self.num_jobs += 1
        payload = pack(args)
        workers = [self._start() for _ in range(world_size)] if fresh else self._take(world_size)
        flight = Flight(
            job=next(self._jobs),
            workers=workers,
            module=function.__module__,
            qualified_name=function.__qualname__,
            payload=payload,
            process_group=process_group,
            store_host=store_host,
            signals=signals,
        )
        reusable = False
        try:
            for worker in workers:
                worker.await_ready()
            outcomes = flight.run(deadline_s, grace_s)
            reusable = not fresh and all(outcome.kind in ("ok", "error") for outcome in outcomes)
        finally:
            # Also when pytest-timeout or Ctrl-C ends the wait.
            if not reusable:
                self._discard(workers)
        self._last = _name(function)
        if flight.unsent:
            raise RankError(_name(function), outcomes, problem=f"planned signals never sent: {flight.unsent}")
        return outcomes

    def close(self) -> None:
        """Ends every worker."""
        self.renew()
        shutil.rmtree(self._directory)

    def renew(self) -> None:
        """Ends every worker; the next job gets new ones."""
        for worker in self._workers:
            if worker.alive():
                worker.connection.send(Stop())
        for worker in self._workers:
            worker.join(_STOP_S)
        self._discard(list(self._workers))
        self.num_jobs = 0

    def _check(self, world_size: int, function: Callable[..., Any], process_group: bool) -> None:
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world size {world_size}: this pool has {self.size} workers")
        if not process_group and world_size != 1:
            raise ValueError(f"world size {world_size} needs a process group; without one there is one rank")
        if "<" in function.__qualname__ or function.__module__ == "__main__":
            raise TypeError(f"{_name(function)} cannot be found by name in a worker; move it to the top of a module")

    def _take(self, world_size: int) -> list[WorkerProcess]:
        for worker in [worker for worker in self._workers if not worker.alive()]:
            warnings.warn(f"a rank worker died after {self._last}: {worker.death()}\n{worker.output()}", stacklevel=4)
            self._discard([worker])
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        return self._workers[:world_size]

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._directory, next(self._names))

    def _discard(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            worker.kill()
        self._workers = [worker for worker in self._workers if worker not in workers]


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
