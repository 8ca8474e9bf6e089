"""State that streams through the ring comes out as if nothing had streamed, whenever the device does its work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from shardopt.errors import ShardoptError
from shardopt.swap.backend import Launch, Stream
from shardopt.swap.chunks import Part, cut_chunks, plan_layout
from shardopt.swap.ring import Ring
from shardopt.swap.simulator import SimBackend
from shardopt.swap.spans import spans_of
from shardopt.swap.step_tables import table_room
from tests.unit.swap.ring_cases import Result, Scenario, Step, Streamed, Work, drawn, serial, streamed

ALL = (True,) * 8
SOME = (True, False, False, True, True, False, False, True)
FIRST = (True, True, *(False,) * 6)
# All that can come between steps, with a device that is up to some steps behind.
LIFE = tuple(
    Step(has, lr=1e-3 * (number + 1), scale=1.0 / (number + 1), skip=number == 4, then=then)
    for number, (has, then) in enumerate(
        [
            (ALL, ""),
            (SOME, "save"),
            (ALL, "load"),
            (FIRST, "group"),
            *((one, "") for one in (ALL, SOME, FIRST, ALL, ALL)),
        ]
    )
)
# One slot and more, with a few chunks that stay on the device and with all of them there.
LIVES = [
    Scenario(1, 1, 0, LIFE),
    Scenario(2, 2, 2048, LIFE),
    Scenario(3, 3, 0, LIFE),
    Scenario(4, 4, 1024, LIFE),
    Scenario(5, 3, 1 << 20, LIFE),
]
by_ring = pytest.mark.parametrize("life", LIVES, ids=lambda life: f"depth {life.depth}, budget {life.budget_bytes}")


def interleaved(first: int, scenarios: int, *, seeds: int) -> tuple[int, int, int]:
    """Interleavings that were run, those that gave other numbers, and those with races."""
    runs = different = racing = 0
    for number in range(first, first + scenarios):
        scenario = drawn(number)
        expected = serial(scenario)
        for seed in range(seeds):
            backend = SimBackend(seed=number * seeds + seed)
            different += streamed(scenario, backend).differs(expected)
            racing += bool(backend.races)
            runs += 1
    return runs, different, racing


def test_a_thousand_interleavings_give_the_numbers_of_none_and_no_race() -> None:
    runs = interleaved(0, 200, seeds=5)
    print(f"{runs[0]} interleavings")
    assert runs == (1000, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_interleavings_give_the_numbers_of_none_and_no_race(part: int) -> None:
    runs = interleaved(1000 + 100 * part, 100, seeds=10)
    print(f"{runs[0]} interleavings")
    assert runs == (1000, 0, 0)


@by_ring
def test_saves_loads_and_new_groups_with_copies_in_flight_change_no_bit(life: Scenario) -> None:
    expected = serial(life)
    assert len(expected.saved) == 1
    # Nothing is done before it must be; everything is done at once.
    for eagerness in (0.0, 1.0):
        backend = SimBackend(eagerness=eagerness)
        assert not streamed(life, backend).differs(expected)
        assert backend.races == []


def outcome(life: Scenario, backend: SimBackend, expected: Result) -> bool:
    """Whether the run ends as it should."""
    try:
        return not streamed(life, backend).differs(expected)
    except (ShardoptError, ValueError):
        # Tables of other steps, or of none.
        return False


def needs_all(life: Scenario, kind: str, count: int) -> None:
    """Takes away each wait in turn: races show it at once, and the numbers differ in some interleaving."""
    expected = serial(life)
    for number in range(count):
        backend = SimBackend(eagerness=0.0, **{kind: number})
        outcome(life, backend, expected)
        assert backend.races, f"{kind} {number} of {count}: {backend.log[number]}"
        # A device that lags behind shows the loss of a host's wait, which depends on it.
        how = {"eagerness": 0.0} if kind == "drop_host_wait" else {}
        assert any(
            not outcome(life, SimBackend(seed=seed, **how, **{kind: number}), expected) for seed in range(500)
        ), f"{kind} {number} of {count} is not missed: {backend.log[number]}"


@pytest.mark.slow
@by_ring
def test_every_wait_is_needed(life: Scenario) -> None:
    backend = SimBackend(eagerness=0.0)
    streamed(life, backend)
    print(f"{backend.counts.waits} waits")
    needs_all(life, "drop_wait", backend.counts.waits)


@by_ring
def test_every_wait_is_needed_by_some_access(life: Scenario) -> None:
    backend = SimBackend(eagerness=0.0)
    streamed(life, backend)
    count = backend.counts.waits
    assert count == len(backend.log) > 30
    for number in range(count):
        lacking = SimBackend(eagerness=1.0, drop_wait=number)
        streamed(life, lacking)
        assert lacking.races, f"wait {number} of {count}: {backend.log[number]}"


@by_ring
def test_every_wait_of_the_host_is_needed(life: Scenario) -> None:
    backend = SimBackend(eagerness=0.0)
    streamed(life, backend)
    print(f"{backend.num_host_waits} queries and waits of the host")
    assert backend.num_host_waits >= 8
    needs_all(life, "drop_host_wait", backend.num_host_waits)


def plain_steps(count: int, has: tuple[bool, ...] = ALL) -> tuple[Step, ...]:
    return (Step(has, lr=1e-3, scale=1.0, skip=False, then=""),) * count


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
def test_a_step_allocates_nothing_and_the_host_waits_for_nothing(budget_bytes: int) -> None:
    # A device that keeps up.
    backend = SimBackend(eagerness=1.0)
    run = Streamed(Scenario(1, 3, budget_bytes, plain_steps(20)), backend)
    made = replace(backend.counts)
    for number, step in enumerate(run.scenario.steps):
        run.step(number, step)
    assert backend.counts.launches > 40
    assert backend.counts.allocations == made.allocations
    assert backend.counts.host_allocations == made.host_allocations == 1
    assert backend.counts.synchronizations == 0


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
def test_the_host_is_at_most_four_steps_ahead(budget_bytes: int) -> None:
    backend = SimBackend(eagerness=0.0)
    run = Streamed(Scenario(1, 3, budget_bytes, plain_steps(12)), backend)
    behind = []
    for number, step in enumerate(run.scenario.steps):
        run.step(number, step)
        behind.append(sum(1 for launches in run.unfinished if launches))
    assert behind[:4] == [1, 2, 3, 4]
    assert max(behind) == 4
    # One for each step that finds its buffers in use.
    assert backend.counts.synchronizations == 12 - 4


def test_chunks_without_a_gradient_are_left_out() -> None:
    backend = SimBackend(eagerness=1.0)
    run = Streamed(Scenario(1, 3, 0, plain_steps(2, FIRST)), backend)
    first = [number for number, (chunk, _) in enumerate(run.model.chunks) if (chunk.rows["param"] < 2).any()]
    run.step(0, run.scenario.steps[0])
    # Tables; and each entry of the chunks, there and back.
    assert backend.counts.copies == 1 + 2 * sum(len(run.model.entries[number]) for number in first)
    # Nothing to do, not even tables.
    before = replace(backend.counts)
    run.ring.step([], [], pytest.fail)
    assert backend.counts == before


def test_chunks_that_stay_are_copied_once_and_back_when_asked_for() -> None:
    backend = SimBackend(eagerness=1.0)
    run = Streamed(Scenario(1, 3, 1 << 20, plain_steps(4)), backend)
    assert (run.ring.num_resident, run.ring.num_slots) == (len(run.model.chunks), 0)
    entries = sum(map(len, run.model.entries))
    for copies in (1 + entries, 1, 1):
        before = backend.counts.copies
        run.step(0, run.scenario.steps[0])
        assert backend.counts.copies - before == copies
    for copies in (entries, 0):
        before = backend.counts.copies
        run.ring.drain()
        assert backend.counts.copies - before == copies
    run.ring.host_changed()
    before = backend.counts.copies
    run.step(0, run.scenario.steps[0])
    assert backend.counts.copies - before == 1 + entries


def test_values_of_the_host_that_would_be_lost_are_refused() -> None:
    run = Streamed(Scenario(1, 3, 1024, plain_steps(1)), SimBackend())
    run.ring.host_changed()
    run.step(0, run.scenario.steps[0])
    with pytest.raises(ShardoptError, match=r"chunks \[0\] were stepped on the device.*call drain\(\) before"):
        run.ring.host_changed()
    run.ring.drain()
    run.ring.host_changed()


def test_after_a_drain_nothing_is_in_flight_F6() -> None:
    # The file would have the moments of some earlier time: nothing runs before it is waited for.
    for budget_bytes, seed in itertools.product((0, 2048, 1 << 20), range(10)):
        scenario = Scenario(1, 3, budget_bytes, plain_steps(3))
        expected = serial(replace(scenario, steps=(*scenario.steps[:2], replace(scenario.steps[2], then="save"))))
        backend = SimBackend(seed, eagerness=0.0)
        run = Streamed(scenario, backend)
        for number, step in enumerate(scenario.steps):
            run.step(number, step)
        assert backend.counts.synchronizations == 0
        assert not any(slab.any() for slab in run.model.slabs)
        run.result.saved.append(run.save())
        assert backend.counts.synchronizations == 1
        assert all(not launches for launches in run.unfinished)
        run.result.seen, run.result.state = expected.seen, expected.state
        assert not run.result.differs(expected)
        assert backend.races == []


def test_a_read_of_state_that_is_still_on_its_way_is_a_race_F5() -> None:
    run = Streamed(Scenario(1, 3, 0, plain_steps(1)), SimBackend(eagerness=1.0))
    run.step(0, run.scenario.steps[0])
    run.backend.host_reads(run.model.slabs[0])
    assert run.backend.races
    assert all("download (writes" in str(race) and "the host (reads" in str(race) for race in run.backend.races)


class RecordsElsewhere(SimBackend):
    """Records every event that is meant for one stream on another one."""

    def __init__(self, meant: Stream, given: Stream) -> None:
        super().__init__(eagerness=1.0)
        self._meant, self._given = meant, given

    def record(self, event: object, stream: Stream) -> None:
        super().record(event, self._given if stream is self._meant else stream)  # type: ignore[arg-type]


@pytest.mark.parametrize(("meant", "given"), list(itertools.permutations(Stream, 2)))
def test_an_event_of_another_stream_than_its_copy_is_seen_F4(meant: Stream, given: Stream) -> None:
    backend = RecordsElsewhere(meant, given)
    streamed(LIVES[1], backend)
    assert backend.races


class LaunchesElsewhere(SimBackend):
    """Runs the launches of chunks beside the compute stream, on the one that copies back."""

    def launch(self, launch: Launch, stream: Stream) -> None:
        super().launch(launch, Stream.DOWNLOAD if "of chunk" in launch.name else stream)


def test_the_forward_pass_after_a_step_sees_its_parameters_F4() -> None:
    scenario = Scenario(1, 3, 0, plain_steps(5))
    expected = serial(scenario)
    for seed in range(20):
        backend = SimBackend(seed)
        got = streamed(scenario, backend)
        assert not replace(got, state=expected.state).differs(expected)
        assert backend.races == []
    backend = LaunchesElsewhere(eagerness=1.0)
    streamed(scenario, backend)
    assert any({"forward"} & {race.first.name, race.second.name} for race in backend.races)


def on_two_streams(backend: SimBackend, scenario: Scenario) -> Result:
    """Two updates, the second one on another stream. Only the ring orders the two."""
    run = Streamed(scenario, backend)
    for number, step in enumerate(scenario.steps):
        backend.current = number
        run.update(number, step)
    state = run.save()
    backend.finish()
    return Result(state=[*state, *run.model.params])


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
def test_another_compute_stream_comes_after_the_one_before(budget_bytes: int) -> None:
    scenario = Scenario(1, 2, budget_bytes, plain_steps(2))
    expected = Result(state=serial(scenario).state)
    for seed in range(20):
        backend = SimBackend(seed)
        assert not on_two_streams(backend, scenario).differs(expected)
        assert backend.races == []
    wait = next(number for number, text in enumerate(backend.log) if text.startswith("compute 1 for compute 0"))
    lacking = [SimBackend(seed, drop_wait=wait) for seed in range(50)]
    assert any(on_two_streams(backend, scenario).differs(expected) for backend in lacking)
    assert all(backend.races for backend in lacking)


class Breaks(SimBackend):
    """Refuses one launch when it is asked for it, as a kernel that does not compile."""

    fails = ""

    def launch(self, launch: Launch, stream: Stream) -> None:
        if launch.name == self.fails:
            raise ShardoptError("no such kernel")
        super().launch(launch, stream)


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
@pytest.mark.parametrize("chunk", [0, 3])
def test_a_launch_that_fails_leaves_the_ring_as_it_was(budget_bytes: int, chunk: int) -> None:
    # The step that fails is one of no gradient, but for the chunk; so all that comes after is as if it had not been.
    scenario = Scenario(1, 2, budget_bytes, plain_steps(7))
    expected = serial(scenario)
    for seed in range(30):
        backend = Breaks(seed)
        run = Streamed(scenario, backend)
        backend.fails = f"nothing of chunk {chunk}"
        for number, step in enumerate(scenario.steps):
            if number == 2:
                # Its tables, and what it has uploaded, are nobody's.
                tables = [np.full(64, number, np.uint8)]
                with pytest.raises(ShardoptError, match="no such kernel"):
                    run.ring.step([chunk], tables, lambda *_: Work(backend.fails, [], [], pytest.fail))
            run.step(number, step)
            if number == 4:
                with pytest.raises(ShardoptError, match="no such kernel"):
                    run.ring.step([chunk], tables, lambda *_: Work(backend.fails, [], [], pytest.fail))
                # The host may write at once.
                for slab, value in zip(run.model.slabs, run.save(), strict=True):
                    backend.host_writes(slab)
                    slab.copy_(value)
                run.ring.host_changed()
        state = run.save()
        backend.finish()
        run.result.state = [*state, *run.model.params]
        assert not run.result.differs(expected)
        assert backend.races == []


def test_tables_that_do_not_fit_are_refused_before_anything_is_done() -> None:
    backend = SimBackend()
    run = Streamed(Scenario(1, 3, 0, plain_steps(1)), backend)
    before = replace(backend.counts)
    with pytest.raises(ValueError, match=r"take \[10000000, 8\] bytes, and there is room for \d+; .*make a new ring"):
        run.ring.step([0], [np.zeros(10_000_000, np.uint8), np.zeros(2, np.float32)], pytest.fail)
    assert backend.counts == before


def test_host_memory_is_not_let_go_while_copies_are_in_flight() -> None:
    backend = SimBackend(eagerness=0.0)
    run = Streamed(Scenario(1, 3, 2048, plain_steps(1)), backend)
    run.step(0, run.scenario.steps[0])
    assert backend.counts.synchronizations == 0
    del run.ring
    assert backend.counts.synchronizations == 1
    for slab in run.model.slabs:
        backend.host_writes(slab)
    assert backend.races == []


def test_a_ring_that_cannot_be_is_refused() -> None:
    good = {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)}
    bad = [good, {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(4)}, {"exp_avg": torch.zeros(16)[::2]}]
    with pytest.raises(ValueError, match="table_bytes is -1") as refused:
        Ring(SimBackend(), bad, table_bytes=-1, depth=0, budget_bytes=-5)
    lines = str(refused.value).split("\n")
    assert [line.split(";")[0] for line in lines] == [
        "table_bytes is -1",
        "depth is 0",
        "budget_bytes is -5",
        "chunk 1: its entries have shapes {'exp_avg': (8,), 'exp_avg_sq': (4,)}",
        "chunk 2: exp_avg has stride (2,)",
    ]


def sizes(numels: Sequence[int], *, budget_bytes: int = 0) -> tuple[int, int, int]:
    """Of a ring for fp32 parameters of these sizes: device bytes, those of slots, and bytes of the tables of a step."""
    parts = [Part("fp32", spans_of((numel,), (1,), (0,), (numel,), indexed=False)) for numel in numels]
    layout = plan_layout([part.kind for part in parts], numels)
    chunks = cut_chunks(parts, layout, element_bytes={"fp32": 8}, chunk_bytes=16 << 20, block=1024)
    # Nobody has that much memory here; sizes are all that the ring looks at.
    entries = [
        {name: torch.empty(chunk.end - chunk.start, device="meta") for name in ("exp_avg", "exp_avg_sq")}
        for chunk in chunks
    ]
    num_rows = sum(len(chunk.rows) for chunk in chunks)
    num_blocks = sum(int((-(-chunk.rows["numel"] // 1024)).sum()) for chunk in chunks)
    room = table_room([num_rows * 88, num_blocks * 8, 32, 8])
    backend = SimBackend(eagerness=0.0)
    ring = Ring(backend, entries, table_bytes=room, budget_bytes=budget_bytes)
    assert backend.counts.allocated_bytes == ring.device_bytes
    return ring.device_bytes, ring.num_slots * ring.slot_bytes, room


def test_device_memory_does_not_depend_on_the_largest_parameter() -> None:
    many, one = sizes([1 << 20] * 1024), sizes([1 << 30])
    print(f"1024 parameters of 1 Mi: {many[0]} bytes; one of 1 Gi: {one[0]}")
    assert many[1] == one[1] == 3 * (16 << 20)
    # Each parameter has a row.
    assert one[0] < many[0] < one[0] * 1.01
    # Besides the slots there is nothing but four times the tables, which are small beside the state.
    assert one[0] - one[1] == 4 * one[2] < 0.005 * (8 << 30)


def test_the_budget_is_used_and_kept() -> None:
    # 64 chunks of 16 MiB.
    for budget_bytes, resident in ((0, 0), ((16 << 20) - 1, 0), (16 << 20, 1), (100 << 20, 6), (2 << 30, 64)):
        nbytes, slots, room = sizes([128 << 20], budget_bytes=budget_bytes)
        assert nbytes == slots + 4 * room + resident * (16 << 20)
        assert slots == min(3, 64 - resident) * (16 << 20)
