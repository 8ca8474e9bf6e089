"""The counter of a vote: who is last, whether all said the same, whether it was closed, for any order of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.scope.tally import Tally


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.binary(max_size=8))
def test_the_last_of_many_is_unanimous_and_nobody_else(num_ranks: int, num_closed: int, said: bytes) -> None:
    tally = Tally(num_ranks)
    share = tally.share(said)
    count = num_ranks * share
    assert tally.is_last(count)
    assert tally.is_unanimous(count, share) == (num_ranks < 8192)
    assert not tally.is_last(count - share)
    closed = count + min(num_closed, num_ranks) * tally.closed
    assert closed < 1 << 63
    assert tally.is_last(closed) == (num_closed == 0)
    assert not tally.is_unanimous(closed, share) or num_closed == 0


@given(st.integers(2, 200), st.data())
def test_one_that_says_something_else_is_noticed_by_whoever_is_last(num_ranks: int, data: st.DataObject) -> None:
    tally = Tally(num_ranks)
    odd = data.draw(st.integers(0, num_ranks - 1))
    said = [b"save" if index == odd else b"step" for index in range(num_ranks)]
    count = sum(map(tally.share, said))
    assert tally.is_last(count)
    assert not any(tally.is_unanimous(count, tally.share(one)) for one in set(said))


@pytest.mark.parametrize(("num_ranks", "word_bits"), [(2, 57), (4, 54), (8, 51), (1024, 30), (4095, 27), (4096, 24)])
def test_words_are_as_long_as_the_counter_allows(num_ranks: int, word_bits: int) -> None:
    assert Tally(num_ranks).word_bits == word_bits


def test_above_some_thousand_ranks_nobody_is_held_to_agree_by_the_sum() -> None:
    tally = Tally(10_000)
    assert tally.share(b"step") == 1
    assert not tally.is_unanimous(10_000, 1)
    assert tally.is_last(10_000)
