"""One job of the rank pool in flight: sends it out, syncs and signals its ranks, gathers what they come to."""

from __future__ import annotations

import contextlib
import os
import signal as signals_module
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Literal

import torch.distributed as dist

from tests.support.parcel import unpack
from tests.support.rank_messages import Finished, Hosting, Job, Outcome, Reached, Release, Released, Resume, Waiting
from tests.support.rank_process import WorkerProcess

_RELEASE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal for a rank, sent when a point is reached.

    Attributes:
        rank: who gets it.
        signal: e.g. ``signal.SIGKILL``, ``SIGSTOP``, ``SIGCONT``.
        at: a name passed to ``reached``.
        by: whose ``reached`` counts; None: the receiver's own.
        after_s: wait this long first. With 0 the signal is sent before ``reached`` returns.
    """

    rank: int
    signal: signals_module.Signals
    at: str
    by: int | None = None
    after_s: float = 0.0


class Flight:
    """A job and its ranks; ``run`` once."""

    def __init__(
        self,
        *,
        job: int,
        workers: Sequence[WorkerProcess],
        module: str,
        qualified_name: str,
        payload: bytes,
        process_group: bool,
        store_host: Literal["parent", "rank 0"],
        signals: Sequence[Signal],
    ) -> None:
        self._job = job
        self._workers = list(workers)
        self._function = (module, qualified_name)
        self._payload = payload
        self._process_group = process_group
        self._store_host = store_host
        self._pending_signals = list(signals)
        self._timers: list[tuple[float, Signal]] = []
        self._points: list[list[str]] = [[] for _ in workers]
        self._waiting: list[tuple[int, Waiting]] = []
        self._outcomes: dict[int, Outcome] = {}
        self._released: set[int] = set()

    @property
    def unsent(self) -> list[Signal]:
        """The planned signals that were never sent: their point was not reached, or the job ended first."""
        return [*self._pending_signals, *(planned for _, planned in self._timers)]

    def run(self, deadline_s: float, grace_s: float) -> list[Outcome]:
        """Flies the job; the outcome of every rank, in rank order."""
        for worker in self._workers:
            worker.mark_output()
        # Named, so that the server lives until the last rank has left its process group.
        store = self._send_job()
        end = time.monotonic() + deadline_s
        limit = f"{deadline_s:g} s (deadline)"
        while len(self._outcomes) < len(self._workers) and time.monotonic() < end:
            self._serve(end)
            failed = any(outcome.kind != "ok" for outcome in self._outcomes.values())
            if failed and end > time.monotonic() + grace_s:
                end = time.monotonic() + grace_s
                limit = f"{grace_s:g} s of the first failure (grace)"
        self._call_hung(set(self._ranks) - set(self._outcomes), f"no answer within {limit}")
        if all(outcome.kind in ("ok", "error") for outcome in self._outcomes.values()):
            self._release()
        del store
        return [
            replace(self._outcomes[rank], points=tuple(self._points[rank]), output=self._workers[rank].output())
            for rank in self._ranks
        ]

    @property
    def _ranks(self) -> range:
        return range(len(self._workers))

    def _send_job(self) -> dist.TCPStore | None:
        if not self._process_group or self._store_host == "rank 0":
            self._send_to(range(1), None)
            return None
        # Port 0, read back: a fixed port collides when two suites share a host. Not a FileStore: it polls.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._send_to(self._ranks, store.port)
        return store

    def _send_to(self, ranks: range, port: int | None) -> None:
        module, qualified_name = self._function
        for rank in ranks:
            job = Job(
                job=self._job,
                rank=rank,
                world_size=len(self._workers),
                process_group=self._process_group,
                port=port,
                module=module,
                qualified_name=qualified_name,
                payload=self._payload,
            )
            self._send(rank, job)

    def _send(self, rank: int, message: object) -> None:
        # A rank that has just died is found by its sentinel, with how it died.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._workers[rank].connection.send(message)

    def _serve(self, end: float) -> None:
        """Waits, at most until ``end``, for messages, deaths and due signals, and acts on them."""
        until = min([end, *(when for when, _ in self._timers)])
        watched: dict[Connection | int, int] = {}
        for rank in set(self._ranks) - self._released:
            if rank not in self._outcomes or self._outcomes[rank].kind != "died":
                watched[self._workers[rank].connection] = rank
                watched[self._workers[rank].sentinel] = rank
        ready = wait(list(watched), max(0.0, until - time.monotonic()))
        for rank in sorted({watched[source] for source in ready}):
            self._hear(rank)
        due = [timer for timer in self._timers if timer[0] <= time.monotonic()]
        for timer in due:
            self._timers.remove(timer)
            self._send_signal(timer[1])

    def _hear(self, rank: int) -> None:
        """Acts on the rank's next message, or on its death once there is no message left."""
        connection = self._workers[rank].connection
        try:
            message = connection.recv() if connection.poll() else None
        except (EOFError, ConnectionResetError):
            message = None
        if message is None:
            error = self._workers[rank].death()
            self._outcomes[rank] = Outcome(rank=rank, pid=self._workers[rank].pid, kind="died", error=error)
        elif message.job == self._job:  # else from a thread that an earlier job left behind
            self._act(rank, message)

    def _act(self, rank: int, message: Hosting | Reached | Waiting | Finished | Released) -> None:
        if isinstance(message, Hosting):
            self._send_to(range(1, len(self._workers)), message.port)
        elif isinstance(message, Reached):
            self._points[rank].append(message.name)
            self._send_planned(rank, message.name)
            self._resume_waiting()
            self._send(rank, Resume(message.token))
        elif isinstance(message, Waiting):
            self._waiting.append((rank, message))
            self._resume_waiting()
        elif isinstance(message, Finished):
            value = None if message.payload is None else unpack(message.payload)
            self._outcomes[rank] = replace(message.outcome, value=value)
        else:
            self._released.add(rank)

    def _send_planned(self, rank: int, name: str) -> None:
        for planned in list(self._pending_signals):
            by = planned.rank if planned.by is None else planned.by
            if (planned.at, by) != (name, rank):
                continue
            self._pending_signals.remove(planned)
            if planned.after_s > 0.0:
                self._timers.append((time.monotonic() + planned.after_s, planned))
            else:
                self._send_signal(planned)

    def _send_signal(self, planned: Signal) -> None:
        worker = self._workers[planned.rank]
        if worker.alive():
            os.kill(worker.pid, planned.signal)

    def _resume_waiting(self) -> None:
        for rank, waiting in list(self._waiting):
            if sum(waiting.name in points for points in self._points) >= waiting.count:
                self._waiting.remove((rank, waiting))
                self._send(rank, Resume(waiting.token))

    def _call_hung(self, ranks: set[int], error: str) -> None:
        for rank in sorted(ranks):
            worker = self._workers[rank]
            stacks = worker.dump_stacks()
            self._outcomes[rank] = Outcome(rank=rank, pid=worker.pid, kind="hang", error=error, stacks=stacks)

    def _release(self) -> None:
        """Lets every rank destroy its process group, now that no other needs it."""
        for rank in self._ranks:
            self._send(rank, Release(self._job))
        end = time.monotonic() + _RELEASE_S
        while not self._settled() and time.monotonic() < end:
            self._serve(end)
        dead = {rank for rank, outcome in self._outcomes.items() if outcome.kind == "died"}
        error = f"finished, but did not leave its process group within {_RELEASE_S:g} s"
        self._call_hung(set(self._ranks) - self._released - dead, error)

    def _settled(self) -> bool:
        return all(rank in self._released or self._outcomes[rank].kind == "died" for rank in self._ranks)
