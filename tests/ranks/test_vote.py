"""Votes between processes: one verdict for all, whatever becomes of a rank, and votes that work afterwards."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from shardopt.errors import RankFailureError
from shardopt.scope import Scope
from shardopt.scope.ballot import _SWEEP
from tests.support.ranks import RankPool, Signal, reached, wait_until_reached

SHORT_S = 2.0  # a deadline that the test means to miss; long enough for the other ranks of a busy machine
LONG_S = 60.0  # one that no test comes near, so that who waits for it fails by the job's deadline


def world(timeout_s: float = LONG_S) -> Scope:
    meet("constructing")
    return Scope.over(range(dist.get_world_size()), timeout_s=timeout_s, name="optimizer")


def meet(name: str) -> None:
    """Lets the ranks go on together, so that only who is meant to be late is."""
    reached(name)
    wait_until_reached(name, count=dist.get_world_size())


def fail_then_vote(scope: Scope, problem: BaseException | str | None, **vote: object) -> tuple[object, ...]:
    """What the error of a vote says, and what the next vote returns."""
    try:
        scope.vote("step", problem=problem, **vote)
    except RankFailureError as error:
        cause_is_mine = problem is not None and error.__cause__ is problem
        return str(error), error.failures, error.missing, error.disagree, cause_is_mine, scope.vote("step", facts=7)
    raise AssertionError("the vote must fail")


def facts() -> list[int]:
    scope = world()
    return [scope.vote("step", facts=1 << scope.rank, digest=b"same") for _ in range(3)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_well_ranks_get_the_or_of_all_facts(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(world_size, facts) == [[(1 << world_size) - 1] * 3] * world_size


class LocalError(Exception):
    """One that another process could not make."""

    def __init__(self, one: object, *, two: object) -> None:
        super().__init__(f"{one} {two}")
        self.callback = lambda: one


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def one_fails(failing: int, kind: str) -> tuple[object, ...]:
    scope = world()
    problems = {
        "ordinary": ValueError("a bad\nvalue"),
        "unpicklable": LocalError("one", two="two"),
        "unprintable": UnprintableError(),
        "text": "out of memory",
        "long": ValueError("ü" * 2000),
    }
    return fail_then_vote(scope, problems[kind] if scope.rank == failing else None)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ordinary", "ValueError: a bad value"),
        ("unpicklable", "LocalError: one two"),
        ("unprintable", "UnprintableError (its text cannot be made: RuntimeError)"),
        ("text", "out of memory"),
        ("long", "ValueError: üüü"),
    ],
)
def test_one_rank_fails_and_all_raise(ranks: RankPool, failing: int, kind: str, text: str) -> None:
    for rank, (message, failures, missing, disagree, cause_is_mine, next_vote) in enumerate(
        ranks.run(3, one_fails, failing, kind)
    ):
        assert message.startswith(f"step failed on rank {failing}: {text}")
        assert list(failures) == [failing]
        assert (missing, disagree, next_vote) == ((), {}, 7)
        assert cause_is_mine == (rank == failing and kind != "text")


def two_digests() -> tuple[object, ...]:
    scope = world()
    return fail_then_vote(scope, None, digest=b"\xab" if scope.rank == 1 else b"\xcd")


def test_ranks_that_disagree_are_named_by_digest(ranks: RankPool) -> None:
    for message, failures, _, disagree, _, next_vote in ranks.run(3, two_digests):
        assert message == "step: ranks disagree, by digest: ranks 0, 2 cd, rank 1 ab"
        assert (failures, disagree, next_vote) == ({}, {"cd": (0, 2), "ab": (1,)}, 7)


def two_operations(other: str) -> list[str]:
    scope = world()
    seen: list[str] = []
    try:
        if scope.rank == 0:
            scope.vote("step")
        elif other == "save":
            scope.vote("save")
        else:
            scope.exchange("shapes", b"x")
    except RankFailureError as error:
        seen = [error.operation, str(error)]
    return [*seen, str(scope.vote("step", facts=3))]


@pytest.mark.parametrize(("other", "called"), [("save", "save"), ("shapes", "exchange shapes")])
def test_ranks_in_different_operations_are_named_at_once(ranks: RankPool, other: str, called: str) -> None:
    outcomes = ranks.run(2, two_operations, other, deadline_s=30.0)
    assert [outcome[0] for outcome in outcomes] == ["step", other]
    for _, message, next_vote in outcomes:
        assert message.startswith(f"rank 0 called 'step', rank 1 called {called!r}")
        assert next_vote == "3"


def one_comes_late(late: int) -> tuple[object, ...]:
    scope = world(SHORT_S)
    meet("voting")
    if scope.rank == late:
        wait_until_reached("given up", count=2)
    return fail_then_vote_later(scope)


def fail_then_vote_later(scope: Scope) -> tuple[object, ...]:
    try:
        scope.vote("step")
    except RankFailureError as error:
        meet("given up")
        return str(error), error.missing, [scope.vote("step", facts=5) for _ in range(2)]
    raise AssertionError("the vote must fail")


@pytest.mark.parametrize("late", [0, 1])  # the rank that decides, and one that does not
def test_a_late_rank_reads_the_verdict_the_others_got(ranks: RankPool, late: int) -> None:
    for message, missing, next_votes in ranks.run(3, one_comes_late, late):
        assert message.startswith(f"step: rank {late} did not arrive within 2 s")
        assert (missing, next_votes) == ((late,), [5, 5])


def one_is_stopped() -> tuple[object, ...]:
    scope = world(SHORT_S)
    meet("voting")
    reached("ready")
    return fail_then_vote_later(scope)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_stopped_past_the_deadline_reads_the_same_verdict(ranks: RankPool, stopped: int) -> None:
    plan = [
        Signal(rank=stopped, signal=signal.SIGSTOP, at="ready"),
        Signal(rank=stopped, signal=signal.SIGCONT, at="given up", by=2),
    ]
    for message, missing, next_votes in ranks.run(3, one_is_stopped, signals=plan, fresh=True):
        assert message.startswith(f"step: rank {stopped} did not arrive")
        assert (missing, next_votes) == ((stopped,), [5, 5])


def host_is_stopped() -> str:
    scope = world(SHORT_S)
    meet("voting")
    reached("ready")
    try:
        outcome = f"facts {scope.vote('step', facts=1 << scope.rank)}"
    except RankFailureError as error:
        outcome = str(error)
    meet("voted")
    return f"{outcome}, then {scope.vote('step', facts=3)}"


def test_when_the_stores_host_is_stopped_all_wait_for_the_one_verdict(ranks: RankPool) -> None:
    plan = [
        Signal(rank=0, signal=signal.SIGSTOP, at="ready"),
        Signal(rank=0, signal=signal.SIGCONT, at="ready", by=1, after_s=SHORT_S + 1.0),
    ]
    seen = ranks.run(3, host_is_stopped, signals=plan, fresh=True, store_host="rank 0")
    # Whether the deadline or the last record comes first is open once the host runs again.
    assert len(set(seen)) == 1
    assert seen[0].startswith(("facts 7, then 3", "step: rank 0 did not arrive"))
    assert seen[0].endswith("then 3")


def one_is_killed() -> tuple[int, ...]:
    scope = world(SHORT_S)
    meet("voting")
    reached("ready")
    try:
        scope.vote("step")
    except RankFailureError as error:
        return error.missing
    raise AssertionError("the vote must fail")


@pytest.mark.parametrize(("world_size", "killed"), [(2, 1), (3, 0), (3, 1), (4, 3)])
def test_a_killed_rank_is_named(ranks: RankPool, world_size: int, killed: int) -> None:
    plan = [Signal(rank=killed, signal=signal.SIGKILL, at="ready")]
    outcomes = ranks.outcomes(world_size, one_is_killed, signals=plan, fresh=True)
    assert outcomes[killed].kind == "died"
    assert [outcome.value for outcome in outcomes if outcome.rank != killed] == [(killed,)] * (world_size - 1)


def host_is_killed() -> None:
    scope = world()
    if scope.rank == 0:
        wait_until_reached("voting", count=2)
        reached("dying")
        wait_until_reached("resurrected")  # by nobody
    reached("voting")
    scope.vote("step", problem=ValueError("mine") if scope.rank == 2 else None)


def test_the_death_of_the_stores_host_is_named_at_once(ranks: RankPool) -> None:
    plan = [Signal(rank=0, signal=signal.SIGKILL, at="dying", after_s=0.5)]
    outcomes = ranks.outcomes(3, host_is_killed, signals=plan, fresh=True, store_host="rank 0", deadline_s=30.0)
    assert outcomes[0].kind == "died"
    for rank in (1, 2):
        assert outcomes[rank].error_type == "RankFailureError"
        assert outcomes[rank].error.startswith("step: the rank that hosts the store (usually rank 0")
    assert outcomes[2].cause == "ValueError: mine"


def interrupt_on(rank: int) -> str:
    scope = world()
    try:
        scope.vote("step", problem=KeyboardInterrupt() if scope.rank == rank else None)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except RankFailureError as error:
        return str(error)
    raise AssertionError("the vote must fail")


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_rank_tells_the_others_and_is_interrupted(ranks: RankPool, interrupted: int) -> None:
    seen = ranks.run(2, interrupt_on, interrupted, deadline_s=30.0)
    assert seen.pop(interrupted) == "KeyboardInterrupt"
    assert seen == [f"step failed on rank {interrupted}: KeyboardInterrupt"]


def interrupted_while_waiting() -> str:
    scope = world()
    if scope.rank == 1:
        wait_until_reached("interrupted")
        return "never voted"
    # As a training process has it, whatever an earlier job has left in this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    reached("voting")
    try:
        scope.vote("step")
    except KeyboardInterrupt:
        reached("interrupted")
        return "KeyboardInterrupt"
    raise AssertionError("the vote must be interrupted")


def test_a_waiting_rank_can_be_interrupted(ranks: RankPool) -> None:
    plan = [Signal(rank=0, signal=signal.SIGINT, at="voting", after_s=0.5)]
    # Less than the deadline of the vote, more than a request to the store may block.
    assert ranks.run(2, interrupted_while_waiting, signals=plan, deadline_s=30.0) == [
        "KeyboardInterrupt",
        "never voted",
    ]


def keys_after_votes() -> tuple[int, int, int]:
    scope = world()
    store = dist.group.WORLD.get_group_store()
    counts = []
    # Keys go several at a time: the counts are equal where that has just happened equally often.
    for num_votes in (2 * _SWEEP, 5 * _SWEEP):
        for _ in range(num_votes):
            scope.vote("step")
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    for _ in range(_SWEEP):
        scope.exchange("shapes", bytes(1000))
    dist.barrier()
    return (*counts, store.num_keys())


def test_votes_and_exchanges_leave_no_keys_behind(ranks: RankPool) -> None:
    for few, many, exchanged in ranks.run(3, keys_after_votes):
        assert few == many == exchanged
