"""State that streams through the ring comes out as if nothing had streamed, whenever the device does its work."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from shardopt.errors import ShardoptError
from shardopt.swap.backend import Launch, Stream
from shardopt.swap.simulator import SimBackend
from tests.unit.swap.ring_cases import (
    ALL,
    FIRST,
    Result,
    Scenario,
    Step,
    Streamed,
    drawn,
    plain_steps,
    serial,
    streamed,
)

SOME = (True, False, False, True, True, False, False, True)
# All that can come between steps, with a device that is up to some steps behind.
LIFE = tuple(
    Step(has, lr=1e-3 * (number + 1), scale=1.0 / (number + 1), skip=number == 8, then=then)
    for number, (has, then) in enumerate(
        [
            (ALL, ""),
            (SOME, "save"),
            (FIRST, "load"),
            (ALL, "group"),
            *((one, "") for one in (ALL, SOME, FIRST, ALL, ALL)),
        ]
    )
)
# One slot and more, with a few chunks that stay on the device and with all of them there. (With four slots and one that
# stays, a slot happens to hold just what is uploaded to it before a load: no number shows that a wait is lost.)
LIVES = [
    Scenario(1, 1, 0, LIFE),
    Scenario(2, 2, 2048, LIFE),
    Scenario(3, 3, 0, LIFE),
    Scenario(4, 4, 0, LIFE),
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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_interleavings_give_the_numbers_of_none_and_no_race(part: int) -> None:
    runs = interleaved(1000 + 100 * part, 100, seeds=10)
    print(f"{runs[0]} interleavings")
    assert runs == (1000, 0, 0)


@by_ring
def test_saves_loads_and_new_groups_with_copies_in_flight_change_no_bit(life: Scenario) -> None:
    expected = serial(life)
    assert len(expected.saved) == 2
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
@pytest.mark.timeout(600)
@by_ring
def test_every_wait_is_needed(life: Scenario) -> None:
    backend = SimBackend(eagerness=0.0)
    streamed(life, backend)
    print(f"{backend.counts.waits} waits")
    needs_all(life, "drop_wait", backend.counts.waits)


@pytest.mark.parametrize("life", [LIVES[1], LIVES[4]], ids=["some chunks stay", "all chunks stay"])
def test_every_wait_is_needed_by_some_access(life: Scenario) -> None:
    backend = SimBackend(eagerness=0.0)
    streamed(life, backend)
    count = backend.counts.waits
    print(f"{count} waits")
    assert count == len(backend.log) > 10
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
    """Three updates, the second one on another stream. Only the ring orders them."""
    run = Streamed(scenario, backend)
    for number, step in enumerate(scenario.steps):
        backend.current = number % 2
        run.update(number, step)
    state = run.save()
    backend.finish()
    return Result(state=[*state, *run.model.params])


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
def test_another_compute_stream_comes_after_the_one_before(budget_bytes: int) -> None:
    scenario = Scenario(1, 2, budget_bytes, plain_steps(3))
    expected = Result(state=serial(scenario).state)
    for seed in range(20):
        backend = SimBackend(seed)
        assert not on_two_streams(backend, scenario).differs(expected)
        assert backend.races == []
    if budget_bytes < 1 << 20:
        # Where chunks stream, what they wait for puts the rest in order too.
        return
    wait = next(number for number, text in enumerate(backend.log) if text.startswith("compute 1 for compute 0"))
    lacking = [SimBackend(seed, drop_wait=wait) for seed in range(50)]
    assert any([on_two_streams(backend, scenario).differs(expected) for backend in lacking])
    assert all(backend.races for backend in lacking)
