"""The pool's handle on one worker process: start, kill, stacks, output."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

from tests.support.rank_messages import Ready
from tests.support.rank_worker import DUMP_SIGNAL, serve

# The fork server imports these once, in a process with one thread; a worker is then a fork of it: milliseconds, where
# a spawned one would import torch for seconds, four at a time on few cores, and again after every kill.
# torch._dynamo: the first fully_shard imports it.
_PRELOAD = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "fsspec.implementations.local",
    "tests.support.rank_worker",
)
_START_S = 180.0
_DUMP_S = 3.0
_OUTPUT_BYTES = 20_000
_context = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def _worker_environment() -> Iterator[None]:
    """The environment the fork server, hence every worker, starts with."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def warm_up() -> None:
    """Starts the fork server, which imports in the background; returns at once.

    Also turns off DNS in this process and all that it starts. For its log, torch looks up the name of the other end of
    every store connection, here ``::ffff:127.0.0.1``; /etc/hosts does not have it, so the question goes to a name
    server, and a lost answer costs 5 s. With ``attempts:0`` the resolver of glibc gives up at once, and torch warns on
    stderr ("hostname of the client socket cannot be retrieved") and stops asking.
    """
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    _context.set_forkserver_preload(list(_PRELOAD))
    with _worker_environment():
        forkserver.ensure_running()


class WorkerProcess:
    """One worker process.

    Attributes:
        pid: its process id, also the id of its process group.
        connection: the pool's end of its pipe.
        sentinel: becomes readable when the process has ended.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._dump_path = directory / f"{name}.stacks"
        self._output_path = directory / f"{name}.output"
        self.connection, theirs = _context.Pipe()
        arguments = (theirs, str(self._dump_path), str(self._output_path))
        # Not a daemon: a daemon may have no children, and dcp.async_save starts some.
        self._process = _context.Process(target=serve, args=arguments, name=f"rank-worker-{name}", daemon=False)
        with _worker_environment():
            self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.sentinel: int = self._process.sentinel
        self._output_start = 0
        self._ready = False

    def await_ready(self) -> None:
        """Waits for the worker's first message; an error with its output if it does not come."""
        if self._ready:
            return
        try:
            if self.connection.poll(_START_S):
                assert self.connection.recv() == Ready()
                self._ready = True
                return
            problem = f"said nothing within {_START_S} s"
        except (EOFError, OSError):
            problem = self.death()
        output = self.output()
        self.kill()
        raise RuntimeError(f"rank worker {self.pid} did not start: {problem}\n{output}")

    def alive(self) -> bool:
        return self._process.is_alive()

    def death(self) -> str:
        """How the process ended, in words; waits a moment for it to be known."""
        self._process.join(5.0)
        code = self._process.exitcode
        if code is None:
            return "closed its connection but did not end"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        status = Path(f"/proc/{self.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in "Tt"

    def dump_stacks(self) -> str:
        """The stacks of all its threads, made even while it is blocked in C."""
        if not self.alive():
            return ""
        if self.stopped():
            return "(stopped by a signal, so it cannot dump its stacks)"
        seen = previous = self._dump_path.stat().st_size
        os.kill(self.pid, DUMP_SIGNAL)
        end = time.monotonic() + _DUMP_S
        while time.monotonic() < end:
            time.sleep(0.05)
            size = self._dump_path.stat().st_size
            # The dump has no end mark: it is complete once it has stopped growing.
            if size == previous > seen:
                break
            previous = size
        text = self._dump_path.read_bytes()[seen:].decode(errors="replace")
        return text or f"(no stacks within {_DUMP_S} s)"

    def mark_output(self) -> None:
        """Makes ``output`` start here."""
        self._output_start = self._output_path.stat().st_size

    def output(self) -> str:
        """The last of what it wrote to stdout and stderr since the mark."""
        if not self._output_path.exists():
            return ""
        written = self._output_path.read_bytes()[self._output_start :]
        return written[-_OUTPUT_BYTES:].decode(errors="replace")

    def join(self, timeout_s: float) -> None:
        self._process.join(timeout_s)

    def kill(self) -> None:
        """Kills it and every process it started; returns when it has ended."""
        if self.alive():
            self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            # Its children outlive it otherwise; no such group means it had none left.
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()
