"""A worker process of the rank pool: it runs one function per job as one gloo rank.

A test's function runs here, so this is also where it finds `reached` and `wait_until_reached`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import itertools
import operator
import os
import queue
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.parcel import pack, unpack
from tests.support.rank_messages import (
    Finished,
    Hosting,
    Job,
    Outcome,
    Reached,
    Ready,
    Release,
    Released,
    Resume,
    Stop,
    Waiting,
)

DUMP_SIGNAL = signal.SIGUSR1
_REPORTED_ATTRIBUTES = ("failures", "missing", "problems", "operation", "disagree")


class _Link:
    """The worker's end of its connection; safe to use from every thread of a job."""

    def __init__(self, connection: Connection) -> None:
        self.job = -1
        self._connection = connection
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Job | Release | Stop] = queue.SimpleQueue()
        self._tokens = itertools.count()
        self._parked: dict[int, threading.Event] = {}
        threading.Thread(target=self._read, name="rank-pool-link", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                # The test process is gone. This also ends a job that hangs, and what it started.
                os.killpg(0, signal.SIGKILL)
            if isinstance(message, Resume):
                self._parked.pop(message.token).set()
            else:
                self._inbox.put(message)
            if isinstance(message, Stop):
                return

    def send(self, message: object) -> None:
        with self._send_lock:
            self._connection.send(message)

    def receive(self) -> Job | Release | Stop:
        return self._inbox.get()

    def park(self, message: Callable[[int], object]) -> None:
        """Sends the message made from a new token, and waits until the pool resumes that token."""
        token = next(self._tokens)
        resumed = self._parked[token] = threading.Event()
        self.send(message(token))
        resumed.wait()


_link: _Link | None = None


def _this_link() -> _Link:
    if _link is None:
        raise RuntimeError(
            "this process is not a worker of a RankPool; only a function run by the pool can sync with it"
        )
    return _link


def reached(name: str) -> None:
    """Reports that this rank is at the named point; returns once the pool has sent the signals planned for it."""
    link = _this_link()
    link.park(lambda token: Reached(link.job, name, token))


def wait_until_reached(name: str, *, count: int = 1) -> None:
    """Waits, without torch, until ``count`` ranks of this job have called ``reached(name)``."""
    link = _this_link()
    link.park(lambda token: Waiting(link.job, name, count, token))


def serve(connection: Connection, dump_path: str, output_path: str) -> None:
    """Runs jobs from the connection until it says stop; the pool's process target.

    Args:
        dump_path: where ``DUMP_SIGNAL`` appends the stacks of all threads.
        output_path: where stdout, stderr and the stacks of a crash go.
    """
    global _link
    # A group of its own: the pool kills it as one, and Ctrl-C in the terminal reaches only pytest.
    os.setsid()
    output = os.open(output_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    assert isinstance(sys.stdout, io.TextIOWrapper), "the fork server has an ordinary stdout"
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable(file=2)
    faulthandler.register(
        DUMP_SIGNAL, file=os.open(dump_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), all_threads=True
    )
    torch.set_num_threads(1)
    _link = _Link(connection)
    _link.send(Ready())
    while not isinstance(job := _link.receive(), Stop):
        assert isinstance(job, Job)
        _serve_job(_link, job)


def _serve_job(link: _Link, job: Job) -> None:
    link.job = job.job
    with _restored_process():
        link.send(_execute(link, job))
        # A rank that raised must stay a silent but live peer, as in a training script that caught the error:
        # were its group destroyed now, the others would see a closed connection where in life they would hang.
        message = link.receive()
        assert message == Release(job.job), f"expected the release of job {job.job}, got {message!r}"
        if dist.is_initialized():
            dist.destroy_process_group()
            # torch answers for an equal mesh of the next job with this one's, whose groups are gone.
            _clear_sharding_prop_cache()
    link.send(Released(job.job))


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Puts back what a job may change of the process and the next one would see."""
    environment, directory, dtype = dict(os.environ), os.getcwd(), torch.get_default_dtype()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)


def _execute(link: _Link, job: Job) -> Finished:
    described: dict[str, Any] = {"kind": "ok"}
    payload: bytes | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            _join(link, job)
            function = operator.attrgetter(job.qualified_name)(importlib.import_module(job.module))
            payload = pack(function(*unpack(job.payload)))
        except BaseException as error:
            described = {"kind": "error", **_describe(error)}
        given = tuple(f"{w.category.__name__}: {w.message} ({w.filename}:{w.lineno})" for w in caught)
    return Finished(job.job, Outcome(rank=job.rank, pid=os.getpid(), warnings=given, **described), payload)


def _join(link: _Link, job: Job) -> None:
    """Becomes the job's rank: environment as torchrun sets it, equal seeds, process group."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    if not job.process_group:
        return
    if job.port is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        link.send(Hosting(job.job, store.port))
    else:
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
    )
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size)


def _describe(error: BaseException) -> dict[str, Any]:
    present = {name: getattr(error, name) for name in _REPORTED_ATTRIBUTES if hasattr(error, name)}
    cause = error.__cause__
    return {
        "error_type": type(error).__name__,
        "error": str(error),
        "error_attributes": {name: _plain(value) for name, value in present.items()},
        "cause": "" if cause is None else f"{type(cause).__name__}: {cause}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _plain(value: Any) -> Any:
    """The value with only builtin containers and scalars in it, so that it can always be sent."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, frozenset):
        return type(value)(map(_plain, value))
    return repr(value)
