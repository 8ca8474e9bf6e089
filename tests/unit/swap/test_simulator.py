"""The simulated device does what streams promise and no more, and reports just the accesses that nothing orders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardopt.swap.backend import Stream
from shardopt.swap.races import Access, Bytes
from shardopt.swap.simulator import SimBackend
from tests.unit.swap.ring_cases import Work

COMPUTE, UPLOAD, DOWNLOAD = Stream.COMPUTE, Stream.UPLOAD, Stream.DOWNLOAD
SEEDS = range(60)


def noting(notes: list[str], name: str) -> Work:
    return Work(name, [], [], lambda: notes.append(name))


def test_a_stream_keeps_its_order_and_streams_keep_none() -> None:
    found = set()
    for seed in SEEDS:
        backend, notes = SimBackend(seed), []
        for name, stream in (("a", UPLOAD), ("b", COMPUTE), ("c", UPLOAD), ("d", COMPUTE)):
            backend.launch(noting(notes, name), stream)
        backend.finish()
        found.add("".join(notes))
    # All orders that keep a before c and b before d.
    assert found == {"abcd", "abdc", "acbd", "bacd", "badc", "bdac"}


def test_a_wait_is_for_what_the_event_stood_for_when_it_was_asked_for() -> None:
    found = set()
    for seed in SEEDS:
        backend, notes = SimBackend(seed), []
        event = backend.event()
        # An event that stands for nothing holds nobody up.
        backend.wait(COMPUTE, event)
        backend.launch(noting(notes, "a"), UPLOAD)
        backend.record(event, UPLOAD)
        backend.wait(COMPUTE, event)
        backend.launch(noting(notes, "b"), UPLOAD)
        backend.record(event, UPLOAD)
        backend.launch(noting(notes, "c"), COMPUTE)
        backend.finish()
        found.add("".join(notes))
    assert found == {"abc", "acb"}


def test_a_copy_is_torn_where_nobody_waits_for_it() -> None:
    source, seen = torch.arange(1, 7), set()
    for seed in range(300):
        backend, target = SimBackend(seed), torch.zeros(6, dtype=torch.int64)
        backend.copy(target, source, UPLOAD)
        backend.launch(Work("look", [target], [], lambda target=target: seen.add(tuple(target.tolist()))), COMPUTE)
        backend.finish()
        assert torch.equal(target, source)
    assert {(0, 0, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6), (1, 2, 3, 0, 0, 0), (0, 0, 0, 4, 5, 6), (0, 0, 3, 4, 0, 0)} <= seen


def test_the_device_does_what_it_likes_before_the_host_waits() -> None:
    found = set()
    for seed in range(200):
        backend, notes = SimBackend(seed), []
        event = backend.event()
        backend.launch(noting(notes, "a"), UPLOAD)
        backend.record(event, UPLOAD)
        backend.launch(noting(notes, "b"), COMPUTE)
        asked = backend.query(event)
        assert not asked or "a" in notes
        backend.synchronize(event)
        assert backend.query(event)
        found.add("".join(notes))
    # The other stream may have been before, after, or not at all.
    assert found == {"a", "ab", "ba"}


def test_a_lazy_device_does_nothing_and_an_eager_one_everything_at_once() -> None:
    notes: list[str] = []
    lazy, eager = SimBackend(eagerness=0.0), SimBackend(eagerness=1.0)
    for backend in (lazy, eager):
        backend.launch(noting(notes, "a"), COMPUTE)
        backend.host_reads(torch.zeros(1))
        assert notes == ["a"] * (backend is eager)
        assert backend.num_queued == (backend is lazy)


class Run:
    """Two pieces of memory and all that can touch them."""

    def __init__(
        self, *, eagerness: float = 0.0, drop_wait: int | None = None, drop_host_wait: int | None = None
    ) -> None:
        self.backend = SimBackend(eagerness=eagerness, drop_wait=drop_wait, drop_host_wait=drop_host_wait)
        self.host, self.device = torch.zeros(8), torch.zeros(8)
        self.events = [self.backend.event() for _ in range(3)]

    def up(self, part: slice = slice(None)) -> None:
        self.backend.copy(self.device[part], self.host[part], UPLOAD)

    def down(self) -> None:
        self.backend.copy(self.host, self.device, DOWNLOAD)

    def step(self, part: slice = slice(None)) -> None:
        self.backend.launch(Work("step", [], [self.device[part]], lambda: None), COMPUTE)

    def look(self) -> None:
        self.backend.launch(Work("look", [self.device], [], lambda: None), COMPUTE)

    def then(self, stream: Stream, first: Stream, number: int = 0) -> None:
        self.backend.record(self.events[number], first)
        self.backend.wait(stream, self.events[number])

    def host_waits(self, stream: Stream) -> None:
        self.backend.record(self.events[2], stream)
        self.backend.synchronize(self.events[2])


def in_order(run: Run) -> None:
    run.up()
    run.then(COMPUTE, UPLOAD)
    run.step()
    run.then(DOWNLOAD, COMPUTE)
    run.down()
    run.host_waits(DOWNLOAD)
    run.backend.host_reads(run.host)
    run.backend.host_writes(run.host)


def back_through_another(run: Run) -> None:
    run.up()
    run.then(COMPUTE, UPLOAD)
    run.then(DOWNLOAD, COMPUTE, 1)
    run.down()


def up_and_step(run: Run) -> None:
    run.up()
    run.step()


def read_before_it_is_there(run: Run) -> None:
    run.up()
    run.look()


def write_while_it_is_read(run: Run) -> None:
    run.up()
    run.backend.host_writes(run.host)


def read_together(run: Run) -> None:
    run.up()
    run.backend.host_reads(run.host)


def neighbours(run: Run) -> None:
    run.up(slice(0, 4))
    run.step(slice(4, 8))


def overlap_in_one(run: Run) -> None:
    run.up(slice(0, 5))
    run.step(slice(4, 8))


def recorded_too_early(run: Run) -> None:
    run.backend.record(run.events[0], UPLOAD)
    run.up()
    run.backend.wait(COMPUTE, run.events[0])
    run.step()


def waited_too_early(run: Run) -> None:
    run.up()
    run.then(COMPUTE, UPLOAD)
    run.up()
    run.backend.record(run.events[0], UPLOAD)
    run.step()


def host_first(run: Run) -> None:
    run.backend.host_writes(run.host)
    run.up()


def asked_and_done(run: Run) -> None:
    run.up()
    run.backend.record(run.events[0], UPLOAD)
    assert run.backend.query(run.events[0]) == (run.backend.num_queued == 0)
    run.backend.host_writes(run.host)


def other_compute_stream(run: Run) -> None:
    run.step()
    run.backend.current = 1
    run.step()


def same_compute_stream(run: Run) -> None:
    run.step()
    run.step()


def through_the_host(run: Run) -> None:
    run.up()
    run.host_waits(UPLOAD)
    run.step()


def everything_done(run: Run) -> None:
    run.up()
    run.backend.finish()
    run.step()
    run.backend.finish()
    run.down()


@pytest.mark.parametrize(
    "ordered",
    [
        in_order,
        back_through_another,
        read_together,
        neighbours,
        host_first,
        same_compute_stream,
        through_the_host,
        everything_done,
    ],
)
def test_what_is_in_order_is_no_race(ordered: Callable[[Run], None]) -> None:
    for eagerness in (0.0, 1.0):
        run = Run(eagerness=eagerness)
        ordered(run)
        assert run.backend.races == []


@pytest.mark.parametrize(
    ("racing", "told"),
    [
        (up_and_step, "upload (writes, upload #1) and step (writes, compute 0 #1)"),
        (read_before_it_is_there, "upload (writes, upload #1) and look (reads, compute 0 #1)"),
        (write_while_it_is_read, "upload (reads, upload #1) and the host (writes, host #1)"),
        (overlap_in_one, "upload (writes, upload #1) and step (writes, compute 0 #1)"),
        (recorded_too_early, "upload (writes, upload #1) and step (writes, compute 0 #1)"),
        (waited_too_early, "upload (writes, upload #2) and step (writes, compute 0 #1)"),
        (other_compute_stream, "step (writes, compute 0 #1) and step (writes, compute 1 #1)"),
    ],
)
def test_a_race_is_found_whatever_was_done_first_and_names_both(racing: Callable[[Run], None], told: str) -> None:
    for eagerness in (0.0, 1.0):
        run = Run(eagerness=eagerness)
        racing(run)
        assert [str(race) for race in run.backend.races] == [
            f"{told} touch the same bytes, and neither comes after the other"
        ]


def test_what_the_host_has_asked_for_it_knows() -> None:
    lazy, eager = Run(eagerness=0.0), Run(eagerness=1.0)
    asked_and_done(lazy)
    asked_and_done(eager)
    assert lazy.backend.races
    assert eager.backend.races == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_wait_that_is_dropped_orders_nothing(number: int) -> None:
    run = Run(drop_wait=number)
    in_order(run)
    assert run.backend.races
    assert run.backend.counts.waits == 2
    assert run.backend.log == ["compute 0 for upload after upload", "download for compute 0 after step"]


def test_a_wait_of_the_host_that_is_dropped_orders_nothing() -> None:
    run = Run(drop_host_wait=0)
    in_order(run)
    assert [(race.first.name, race.second.name) for race in run.backend.races] == [
        ("download", "the host"),
        ("download", "the host"),
    ]
    asked = Run(drop_host_wait=0)
    asked.up()
    asked.backend.record(asked.events[0], UPLOAD)
    assert asked.backend.query(asked.events[0])
    assert not asked.backend.query(asked.events[0])


def test_memory_is_still_somebody_elses_on_the_compute_stream() -> None:
    backend = SimBackend(eagerness=0.0)
    memory = backend.allocate(64)
    backend.copy(memory, torch.ones(64, dtype=torch.uint8), UPLOAD)
    assert [race.first.name for race in backend.races] == ["whoever had the 64 bytes before"]
    seen = set()
    for seed in SEEDS:
        backend = SimBackend(seed)
        memory = backend.allocate(64)
        backend.copy(memory, torch.ones(64, dtype=torch.uint8), UPLOAD)
        backend.finish()
        seen.add(tuple(memory.unique().tolist()))
    assert {(1,), (255,)} <= seen


def test_what_was_asked_for_is_counted() -> None:
    run = Run()
    in_order(run)
    run.backend.allocate(100)
    run.backend.allocate_host(10)
    counts = run.backend.counts
    assert (counts.allocations, counts.allocated_bytes, counts.host_allocations) == (1, 100, 1)
    assert (counts.copies, counts.copied_bytes, counts.launches) == (2, 2 * 32, 1)
    assert (counts.waits, counts.queries, counts.synchronizations) == (2, 0, 1)


def test_a_copy_between_tensors_unlike_is_refused() -> None:
    with pytest.raises(ValueError, match=r"to torch.float32 \(8,\) from torch.float32 \(7,\)"):
        SimBackend().copy(torch.zeros(8), torch.zeros(7), UPLOAD)


def test_a_launch_that_fails_ends_the_device() -> None:
    def fail() -> None:
        raise ArithmeticError("divided")

    backend = SimBackend(eagerness=0.0)
    backend.launch(Work("bad", [], [], fail), COMPUTE)
    with pytest.raises(ArithmeticError, match="divided"):
        backend.finish()
    with pytest.raises(RuntimeError, match="the device has failed"):
        backend.finish()


THREADS = ("a", "b", "c")
TOUCHES = st.lists(
    st.tuples(
        st.sampled_from(THREADS),
        st.integers(0, 20),
        st.integers(0, 8),
        st.booleans(),
        # What the thread knows of the others: how much of what there was by then.
        st.fixed_dictionaries({thread: st.integers(0, 12) for thread in THREADS}),
    ),
    max_size=25,
)


@given(TOUCHES)
def test_races_are_those_that_are_found_byte_by_byte(touches: list[tuple[str, int, int, bool, dict[str, int]]]) -> None:
    known, ticks = Bytes(), dict.fromkeys(THREADS, 0)
    writes: dict[int, Access] = {}
    reads: dict[int, dict[str, Access]] = {}
    for thread, start, size, is_write, clock in touches:
        ticks[thread] += 1
        access = Access(thread, ticks[thread], f"operation {ticks[thread]}", is_write)
        now = {**clock, thread: ticks[thread]}
        found = {race.first for race in known.touch(start, start + size, access, now)}
        expected = set()
        for byte in range(start, start + size):
            before = [writes[byte]] if byte in writes else []
            if is_write:
                before += reads.pop(byte, {}).values()
                writes[byte] = access
            else:
                reads.setdefault(byte, {})[thread] = access
            expected |= {other for other in before if now[other.thread] < other.tick}
        assert found == expected


def test_memory_with_gaps_is_touched_to_its_end() -> None:
    backend, whole = SimBackend(eagerness=0.0), torch.zeros(4, 10)
    backend.launch(Work("columns", [], [whole[:, 2:5]], lambda: None), COMPUTE)
    backend.launch(Work("none", [], [whole[:0, 2:5]], lambda: None), DOWNLOAD)
    backend.launch(Work("past the end", [], [whole.view(-1)[35:]], lambda: None), UPLOAD)
    assert backend.races == []
    backend.launch(Work("last element", [whole[3, 4]], [], lambda: None), UPLOAD)
    assert [race.first.name for race in backend.races] == ["columns"]


def test_memory_of_a_size_alone_has_no_races() -> None:
    backend = SimBackend()
    target: Tensor = torch.zeros(4, device="meta")
    backend.copy(target, torch.zeros(4, device="meta"), UPLOAD)
    backend.copy(target, torch.zeros(4, device="meta"), DOWNLOAD)
    assert backend.races == []
