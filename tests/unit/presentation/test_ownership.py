"""Who owns what: parameters are spread evenly, and a parameter that the ranks do not hold once is refused."""

from __future__ import annotations

import json
import math
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt import PlacementError
from shardopt.geometry import Box
from shardopt.layouts.tracked import Tracked
from shardopt.naming import Name
from shardopt.presentation.ownership import Balance, Holdings, exchange_boxes
from shardopt.scope import Scope

# A deadline would be a wall-clock assertion.
EXAMPLES = settings(max_examples=200, deadline=None)
VOLUMES = st.lists(st.integers(0, 1000), max_size=40)


def gpt2_small() -> list[tuple[int, ...]]:
    """The shapes of GPT-2 small's parameters, the output layer tied to the embedding, in the order of its modules."""
    width = 768
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    feed_forward = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *attention, *norm, *feed_forward]
    return [(50257, width), (1024, width), *block * 12, *norm]


def loads(owners: list[int], volumes: list[int], num_ranks: int) -> list[int]:
    found = [0] * num_ranks
    for owner, volume in zip(owners, volumes, strict=True):
        found[owner] += volume
    return found


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_gpt2_is_spread_evenly(num_ranks: int) -> None:
    volumes = list(map(math.prod, gpt2_small()))
    assert (len(volumes), sum(volumes)) == (148, 124_439_808)
    owned = loads(Balance(num_ranks).assign(volumes), volumes, num_ranks)
    mean = sum(volumes) / num_ranks
    # Of 4 ranks on, the embedding alone is more than the mean: its owner may have nothing else.
    assert max(owned) <= max(1.1 * mean, max(volumes))
    assert sorted(owned)[-2] <= 1.1 * mean
    assert min(owned) > 0


@EXAMPLES
@given(st.integers(1, 9), st.lists(VOLUMES, min_size=1, max_size=4))
def test_no_two_ranks_are_further_apart_than_the_largest_parameter(num_ranks: int, calls: list[list[int]]) -> None:
    balance = Balance(num_ranks)
    total = [0] * num_ranks
    for volumes in calls:
        owners = balance.assign(volumes)
        total = [sum(pair) for pair in zip(total, loads(owners, volumes, num_ranks), strict=True)]
        # What came before counts: a group that is added goes to ranks that have less.
        assert balance.loads == total
        assert max(total) - min(total) <= max((volume for some in calls for volume in some), default=0)


@EXAMPLES
@given(st.integers(1, 9), st.lists(VOLUMES, max_size=4))
def test_the_answer_is_the_same_on_every_rank(num_ranks: int, calls: list[list[int]]) -> None:
    one, other = Balance(num_ranks), Balance(num_ranks)
    assert [one.assign(volumes) for volumes in calls] == [other.assign(tuple(volumes)) for volumes in calls]


def test_a_parameter_that_comes_later_goes_to_the_rank_that_has_least() -> None:
    balance = Balance(3)
    assert balance.assign([5, 1, 3]) == [0, 2, 1]
    assert balance.assign([1]) == [2]
    assert balance.assign([2, 2]) == [2, 1]


class Told:
    """A scope whose ranks have said already what they hold; the one asked is the first."""

    def __init__(self, *boxes_of_ranks: list[Box]) -> None:
        self.ranks = tuple(range(len(boxes_of_ranks)))
        self._payloads = [json.dumps([(box.offset, box.size) for box in boxes]).encode() for boxes in boxes_of_ranks]

    def exchange(self, operation: str, payload: bytes) -> list[bytes]:
        assert payload == self._payloads[0]
        return self._payloads


def held(*boxes_of_ranks: list[Box], shapes: list[tuple[int, ...]]) -> list[Holdings]:
    """What ``exchange_boxes`` finds when each rank holds those boxes of parameters of those shapes."""
    tracked = [
        Tracked(Name(f"p{index}"), torch.empty(box.size), shape, box, optimizer=0, group=0)
        for index, (shape, box) in enumerate(zip(shapes, boxes_of_ranks[0], strict=True))
    ]
    return exchange_boxes(tracked, cast(Scope, Told(*boxes_of_ranks)))


def test_every_rank_that_holds_a_box_is_known_and_empty_ones_are_nobodys() -> None:
    top, bottom, nothing = Box((0, 0), (2, 3)), Box((2, 0), (1, 3)), Box((3, 0), (0, 3))
    whole, scalar = Box((0,), (2,)), Box((), ())
    ranks = [[top, whole, scalar], [bottom, whole, scalar], [nothing, whole, scalar], [top, whole, scalar]]
    matrix, vector, number = held(*ranks, shapes=[(3, 3), (2,), ()])
    assert matrix.holders == {top: (0, 3), bottom: (1,)}
    assert vector.holders == {whole: (0, 1, 2, 3)}
    assert number.holders == {scalar: (0, 1, 2, 3)}
    assert [matrix.sender(top, target) for target in range(4)] == [0, 0, 0, 3]
    assert [matrix.sender(bottom, target) for target in range(4)] == [1, 1, 1, 1]


def test_a_parameter_without_elements_is_whole_though_nobody_holds_any_of_it() -> None:
    (nothing,) = held([Box((0, 0), (0, 3))], [Box((0, 0), (0, 3))], shapes=[(0, 3)])
    assert nothing.holders == {}


def test_a_parameter_that_is_not_all_there_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"p0: .*\[0, 1\] do not hold the whole .*\(4,\) once: .*at \(1,\)"):
        held([Box((0,), (1,))], [Box((2,), (2,))], shapes=[(4,)])


def test_a_parameter_of_which_boxes_overlap_is_refused() -> None:
    # Replicas are equal boxes. Whose elements count where different ones overlap, nothing says.
    with pytest.raises(PlacementError, match=r"p0: .*some boxes overlap"):
        held([Box((0,), (3,))], [Box((2,), (2,))], shapes=[(4,)])


def test_all_parameters_that_are_not_held_once_are_listed() -> None:
    first, second = Box((0,), (2,)), Box((2,), (2,))
    with pytest.raises(PlacementError) as caught:
        held([first, first, first], [second, first, Box((1,), (3,))], shapes=[(4,)] * 3)
    assert [line[:3] for line in str(caught.value).splitlines()] == ["p1:", "p2:"]


def test_a_hole_is_found_where_an_overlap_makes_up_for_its_elements() -> None:
    with pytest.raises(PlacementError, match=r"the box at \(3,\) of size \(1,\) is on none of them"):
        held([Box((0,), (2,))], [Box((1,), (2,))], shapes=[(4,)])
