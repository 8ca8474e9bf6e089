"""A scope of one rank: no process group, and the user's own exceptions."""

from __future__ import annotations

import pytest

from shardopt import errors
from shardopt.scope import Scope


def test_it_is_rank_0_of_1() -> None:
    scope = Scope.single()
    assert (scope.ranks, scope.rank, scope.index, scope.size) == ((0,), 0, 0, 1)


def test_a_vote_returns_its_facts() -> None:
    assert Scope.single().vote("step", facts=5, digest=b"x") == 5


def test_a_problem_is_raised_itself() -> None:
    problem = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        Scope.single().vote("step", problem=problem)
    assert caught.value is problem


def test_a_problem_in_words_is_a_rank_failure() -> None:
    with pytest.raises(errors.RankFailureError, match="step failed on rank 0: out of memory") as caught:
        Scope.single().vote("step", problem="out of memory")
    assert caught.value.failures == {0: "out of memory"}


def test_arguments_are_held_to_the_limits_of_a_real_vote() -> None:
    with pytest.raises(ValueError, match="longer than 64 bytes"):
        Scope.single().vote("x" * 65)


def test_an_exchange_returns_the_payload() -> None:
    assert Scope.single().exchange("shapes", b"abc") == [b"abc"]


def test_more_ranks_need_a_process_group() -> None:
    with pytest.raises(errors.ScopeError, match="needs the default process group"):
        Scope.over((0, 1), timeout_s=1.0, name="optimizer")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_deadline_must_be_positive(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Scope.over((0, 1), timeout_s=timeout_s, name="optimizer")
