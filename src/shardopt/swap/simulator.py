"""A device that is not there: it does what it is asked for at any time that its streams allow."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardopt.swap.backend import Launch, Stream
from shardopt.swap.races import Access, Bytes, Race

__all__ = ["Counts", "SimBackend"]

_HOST = "host"
# What was in memory before it was allocated: NaN as numbers, no good address.
_POISON = 0xFF
_MOST_PIECES = 3
# How eagerly the device works while the host goes on: some seeds have one that only does what it is waited for.
_EAGERNESS = (0.0, 0.0, 0.3, 0.7, 0.95)
# How likely one stream is to go on rather than another: some seeds have one that lags far behind.
_WEIGHTS = (0.01, 1.0, 100.0)


@dataclass
class Counts:
    """What the device was asked for.

    Attributes:
        allocations: of device memory.
        allocated_bytes: in them.
        host_allocations: of pinned host memory.
        copies: to the device or from it.
        copied_bytes: in them.
        launches: of any kind.
        waits: of a stream for an event.
        queries: of events by the host.
        synchronizations: waits of the host.
    """

    allocations: int = 0
    allocated_bytes: int = 0
    host_allocations: int = 0
    copies: int = 0
    copied_bytes: int = 0
    launches: int = 0
    waits: int = 0
    queries: int = 0
    synchronizations: int = 0


@dataclass(eq=False)
class _Record:
    """One recording of an event: where it is queued, and whether the stream has come to it."""

    stream: str
    after: str
    clock: dict[str, int]
    is_done: bool = False


@dataclass(eq=False)
class _Event:
    last: _Record | None = None


@dataclass(eq=False)
class _Operation:
    """The pieces of an operation that are still to do; a wait has none, and stays until its record is done."""

    pieces: deque[Callable[[], object]] = field(default_factory=deque)
    waits_for: _Record | None = None


class SimBackend:
    """Streams of a device, in host memory. Each is a queue; at every call some of what heads them is done, by chance.

    Apart from what is done when, it keeps what must come before what: from the order of each stream, records, waits,
    queries and synchronisations. ``races`` are the accesses to the same bytes that this leaves in no order. Which they
    are does not depend on chance, but for queries, whose answer does.

    Where a launch raises, whichever call lets it run does, and later ones that need the device: it has failed, as a
    real one would. Memory must stay alive while the simulator does: it knows bytes by their addresses.

    Args:
        seed: of all that is left to chance.
        eagerness: how much the device does while the host goes on, from 0 (only what it is waited for) to 1 (all, at
            once); None leaves it to chance.
        drop_wait: the number of a wait that is lost, counted from 0.
        drop_host_wait: the number of a query or synchronisation, counted together, that is lost: a query says yes.

    Attributes:
        races: found so far.
        counts: of what was asked for.
        current: which stream ``COMPUTE`` is.
        log: the waits, in order: who waits, and after what.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        eagerness: float | None = None,
        drop_wait: int | None = None,
        drop_host_wait: int | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._eagerness = self._random.choice(_EAGERNESS) if eagerness is None else eagerness
        self._drop_wait, self._drop_host_wait = drop_wait, drop_host_wait
        self._num_host_waits = 0
        self._queues: dict[str, deque[_Operation]] = {}
        self._weights: dict[str, float] = {}
        self._clocks: dict[str, dict[str, int]] = {_HOST: {_HOST: 0}}
        self._last: dict[str, str] = {}
        self._bytes = Bytes()
        self._kept: list[Tensor] = []
        self._failure: Exception | None = None
        self.races: list[Race] = []
        self.counts = Counts()
        self.current = 0
        self.log: list[str] = []

    # What a backend does.

    def compute(self) -> int:
        """Tells which stream is the current one."""
        return self.current

    def allocate(self, nbytes: int) -> Tensor:
        """Memory that what had it before still writes to, on the compute stream."""
        self.counts.allocations += 1
        self.counts.allocated_bytes += nbytes
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        name = f"whoever had the {nbytes} bytes before"
        self._enqueue(Stream.COMPUTE, name, [], [memory], [lambda: memory.fill_(_POISON)])
        return memory

    def allocate_host(self, nbytes: int) -> Tensor:
        """Memory with something in it."""
        self.counts.host_allocations += 1
        return torch.full((nbytes,), _POISON, dtype=torch.uint8, device="cpu")

    def event(self) -> _Event:
        """A new event."""
        return _Event()

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """A copy in a few pieces, between which other streams go on."""
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"a copy to {target.dtype} {tuple(target.shape)} from {source.dtype} {tuple(source.shape)}; they must "
                "be alike"
            )
        self.counts.copies += 1
        self.counts.copied_bytes += target.numel() * target.element_size()
        names = {Stream.UPLOAD: "upload", Stream.DOWNLOAD: "download", Stream.COMPUTE: "copy"}
        self._enqueue(stream, names[stream], [source], [target], self._pieces(target, source))

    def _pieces(self, target: Tensor, source: Tensor) -> list[Callable[[], object]]:
        count = self._random.randint(1, _MOST_PIECES)
        ends = [target.numel() * part // count for part in range(count + 1)]
        spans = [slice(*span) for span in itertools.pairwise(ends)]
        self._random.shuffle(spans)
        return [lambda span=span: target[span].copy_(source[span]) for span in spans]

    def launch(self, launch: Launch, stream: Stream) -> None:
        """A launch, which runs all at once."""
        self.counts.launches += 1
        self._enqueue(stream, launch.name, launch.reads, launch.writes, [launch.run])

    def record(self, event: _Event, stream: Stream) -> None:
        """Makes the event stand for all that the stream was given so far."""
        self._idle()
        thread = self._thread(stream)
        record = _Record(thread, self._last.get(thread, "nothing"), self._now(thread))
        event.last = record
        self._queues[thread].append(_Operation(deque([lambda: setattr(record, "is_done", True)])))

    def wait(self, stream: Stream, event: _Event) -> None:
        """Makes the stream wait for what the event stands for now."""
        self._idle()
        number = self.counts.waits
        self.counts.waits += 1
        record = event.last
        if record is None:
            self.log.append(f"{stream.name} for an event that was never recorded")
            return
        thread = self._thread(stream)
        self.log.append(f"{thread} for {record.stream} after {record.after}")
        if number == self._drop_wait:
            # Chance favours what the wait was there against.
            self._weights[thread], self._weights[record.stream] = _WEIGHTS[-1], _WEIGHTS[0]
            return
        self._queues[thread].append(_Operation(waits_for=record))
        _join(self._clocks[thread], record.clock)

    def query(self, event: _Event) -> bool:
        """Whether all is done that the event stands for; the host knows it then."""
        self._idle()
        self.counts.queries += 1
        if self._drops_host_wait():
            return True
        if event.last is not None and not event.last.is_done:
            return False
        if event.last is not None:
            _join(self._clocks[_HOST], event.last.clock)
        return True

    def synchronize(self, event: _Event) -> None:
        """Lets the device work until all is done that the event stands for."""
        self._idle()
        self.counts.synchronizations += 1
        if self._drops_host_wait() or event.last is None:
            return
        # Some device does nothing but what it takes.
        is_lazy = self._random.random() < 0.5
        while not event.last.is_done:
            self._do_one(self._needed(event.last) if is_lazy else None)
        _join(self._clocks[_HOST], event.last.clock)

    def host_reads(self, tensor: Tensor) -> None:
        """Checks a read by the host."""
        self._idle()
        self._touch(_HOST, "the host", [tensor], [])

    def host_writes(self, tensor: Tensor) -> None:
        """Checks a write by the host."""
        self._idle()
        self._touch(_HOST, "the host", [], [tensor])

    # What only a simulator can do.

    def finish(self) -> None:
        """Lets the device do all that it was asked for; the host waits, and knows."""
        while any(self._queues.values()):
            self._do_one(None)
        for clock in list(self._clocks.values()):
            _join(self._clocks[_HOST], clock)

    @property
    def num_queued(self) -> int:
        """Operations, records and waits among them, that are not done."""
        return sum(map(len, self._queues.values()))

    @property
    def num_host_waits(self) -> int:
        """Queries and synchronisations so far."""
        return self._num_host_waits

    def _drops_host_wait(self) -> bool:
        number = self._num_host_waits
        self._num_host_waits += 1
        return number == self._drop_host_wait

    def _thread(self, stream: Stream) -> str:
        name = f"compute {self.current}" if stream is Stream.COMPUTE else stream.name.lower()
        if name not in self._queues:
            self._queues[name] = deque()
            self._clocks[name] = {name: 0}
            self._weights[name] = self._random.choice(_WEIGHTS)
        return name

    def _now(self, thread: str) -> dict[str, int]:
        """What comes before all that the thread is given next: what it knows, and what the host knows."""
        clock = self._clocks[thread]
        _join(clock, self._clocks[_HOST])
        return dict(clock)

    def _enqueue(
        self,
        stream: Stream,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        pieces: Sequence[Callable[[], object]],
    ) -> None:
        self._idle()
        thread = self._thread(stream)
        self._touch(thread, name, reads, writes)
        self._last[thread] = name
        self._queues[thread].append(_Operation(deque(pieces)))

    def _touch(self, thread: str, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        clock = self._clocks[thread]
        clock[thread] += 1
        now = self._now(thread)
        # What it writes first: of memory that it also reads, the write says all.
        for tensors, is_write in ((writes, True), (reads, False)):
            access = Access(thread, now[thread], name, is_write)
            for tensor in tensors:
                start = tensor.data_ptr()
                # Meta tensors have no memory, and no races.
                if start:
                    self._kept.append(tensor)
                    self.races += self._bytes.touch(start, start + _reach(tensor), access, now)

    def _idle(self) -> None:
        """The device works while the host goes on."""
        while self._random.random() < self._eagerness and self._runnable():
            self._do_one(None)

    def _runnable(self) -> list[str]:
        return [name for name, queue in self._queues.items() if queue and not _blocked(queue[0])]

    def _needed(self, record: _Record) -> str:
        """The stream that must go on before the record can be reached."""
        head = self._queues[record.stream][0]
        return record.stream if not _blocked(head) or head.waits_for is None else self._needed(head.waits_for)

    def _do_one(self, thread: str | None) -> None:
        """Does one piece of what heads a queue: of the given one, or of any that may go on."""
        if self._failure is not None:
            raise RuntimeError("the device has failed, and does nothing more") from self._failure
        if thread is None:
            # There is one: waits are for records that were queued before them.
            names = self._runnable()
            thread = self._random.choices(names, [self._weights[name] for name in names])[0]
        queue = self._queues[thread]
        if queue[0].pieces:
            try:
                queue[0].pieces.popleft()()
            except Exception as error:
                self._failure = error
                raise
        if not queue[0].pieces:
            queue.popleft()


def _blocked(operation: _Operation) -> bool:
    return operation.waits_for is not None and not operation.waits_for.is_done


def _reach(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last one; gaps between rows count as touched."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for name, tick in other.items():
        if clock.get(name, 0) < tick:
            clock[name] = tick
