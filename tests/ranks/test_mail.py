"""Payloads to and from a scope's first rank around a vote, and deadlines that hold for a while."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardopt.errors import RankFailureError
from shardopt.scope import Scope
from tests.support.ranks import RankPool, reached, wait_until_reached

LONG_S = 60.0
SHORT_S = 1.0

# Nothing, less than the length in front of it, several chunks as a store takes them, and what ends with a chunk.
SIZES = (0, 3, 9 << 20, (4 << 20) - 8)


def world(timeout_s: float = LONG_S) -> Scope:
    reached("constructing")
    wait_until_reached("constructing", count=dist.get_world_size())
    return Scope.over(range(dist.get_world_size()), timeout_s=timeout_s, name="mail")


def payload(rank: int, shift: int = 0) -> bytes:
    return bytes([rank + 1]) * SIZES[(rank + shift) % len(SIZES)]


def num_keys() -> int:
    dist.barrier()
    found = dist.group.WORLD.get_group_store().num_keys()
    dist.barrier()
    return found


def to_and_fro(world_size: int) -> tuple[list[bool], int]:
    """Whether each rank got what was meant for it, and how many keys more there are in the store than votes leave."""
    scope = world()
    scope.vote("warm")
    before = num_keys()
    right = []
    for shift in range(world_size):
        gathered = scope.gather("there", payload(scope.rank, shift))
        right.append(gathered == ([payload(rank, shift) for rank in range(world_size)] if scope.rank == 0 else []))
        back = scope.scatter("back", [payload(rank, shift) for rank in range(world_size)] if scope.rank == 0 else [])
        right.append(back == payload(scope.rank, shift))
    for _ in range(2 * world_size):
        scope.vote("as many")
    return right, num_keys() - before


@pytest.mark.parametrize("world_size", [1, 3])
def test_payloads_of_any_size_arrive_and_leave_no_keys(world_size: int, ranks: RankPool) -> None:
    for right, more in ranks.run(world_size, to_and_fro, world_size):
        assert right == [True] * 2 * world_size
        # A vote's own keys go a few dozen at a time: three of each vote, and one for each rank.
        assert more <= 4 * world_size * (2 + world_size)


def one_cannot(bad: int, operation: str) -> tuple[str, list[str], int, int]:
    """The error on each rank, keys left, and that the next mail arrives."""
    scope = world()
    scope.vote("warm")
    before = num_keys()
    problem = ValueError("cannot") if scope.rank == bad else None
    try:
        if operation == "gather":
            scope.gather("there", b"x" * 100, problem=problem)
        else:
            scope.scatter("there", [b"x" * 100] * 3, problem=problem)
    except RankFailureError as error:
        text, cause = str(error), str(error.__cause__)
    left = num_keys() - before
    scope.scatter("again", [b"1", b"2", b"3"] if scope.rank == 0 else [])
    return text, [cause], left, len(scope.gather("again", b"y"))


@pytest.mark.parametrize("operation", ["gather", "scatter"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_problem_is_everybodys_and_what_was_posted_is_taken_back(bad: int, operation: str, ranks: RankPool) -> None:
    for rank, (text, (cause,), left, arrived) in enumerate(ranks.run(3, one_cannot, bad, operation)):
        assert text == f"there failed on rank {bad}: ValueError: cannot"
        assert (cause == "cannot") == (rank == bad)
        # The keys of one vote: the verdict, the count, two records.
        assert left <= 4
        assert arrived == (3 if rank == 0 else 0)


def for_a_while() -> tuple[str, list[str]]:
    """Rank 2 stays away from one vote; who has waited for it does not wait in the next one."""
    scope = world()
    if scope.rank == 2:
        wait_until_reached("given up", count=2)
    try:
        with scope.within(SHORT_S):
            scope.vote("short")
        text = ""
    except RankFailureError as error:
        text, waited = str(error), error
    reached("given up")
    if scope.rank == 2:
        wait_until_reached("told", count=2)
    told = []
    # Without a short deadline: rank 2 is not there, and would be waited for.
    for problem in (waited, None):
        try:
            scope.vote("then", problem=problem)
        except RankFailureError as error:
            told.append(str(error))
        reached("told")
    return text, told


def test_a_deadline_holds_for_a_while_and_who_has_waited_does_not_wait_again(ranks: RankPool) -> None:
    for rank, (text, told) in enumerate(ranks.run(3, for_a_while, deadline_s=25.0)):
        assert text.startswith("short: rank 2 did not arrive within 1 s")
        # Its own error, not the second one's.
        assert told == [text], rank
