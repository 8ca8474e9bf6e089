"""Boxes against brute-force sets of points."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.geometry import Box, missing

Point = tuple[int, ...]


def points(box: Box) -> set[Point]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(box.offset, box.size, strict=True))))


def boxes(num_dims: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*[st.integers(0, 4)] * num_dims)
    return st.builds(Box, numbers, numbers)


BOXES = st.one_of([boxes(n) for n in range(4)])
PAIRS = st.one_of([st.tuples(boxes(n), boxes(n)) for n in range(4)])
DELIVERIES = st.one_of([st.tuples(boxes(n), st.lists(boxes(n), max_size=6)) for n in range(4)])

# A deadline would be a wall-clock assertion.
EXAMPLES = settings(max_examples=60, deadline=None)


@EXAMPLES
@given(BOXES)
def test_volume_and_end(box: Box) -> None:
    assert box.volume == len(points(box))
    assert box.end == tuple(o + s for o, s in zip(box.offset, box.size, strict=True))
    assert Box.whole(box.size) == Box((0,) * len(box.size), box.size)


@EXAMPLES
@given(PAIRS)
def test_intersect_is_the_common_points(pair: tuple[Box, Box]) -> None:
    one, other = pair
    common = one.intersect(other)
    assert (set() if common is None else points(common)) == points(one) & points(other)
    assert common is None or common.volume > 0
    assert common == other.intersect(one)


@EXAMPLES
@given(PAIRS)
def test_contains_is_all_the_points(pair: tuple[Box, Box]) -> None:
    one, other = pair
    assert one.contains(other) == (points(other) <= points(one))


@EXAMPLES
@given(PAIRS)
def test_minus_is_the_other_points_each_once(pair: tuple[Box, Box]) -> None:
    one, other = pair
    rest = one.minus(other)
    assert all(piece.volume for piece in rest)
    assert len(rest) <= 2 * len(one.size) or (len(rest) == 1 and not one.size)
    assert sum(piece.volume for piece in rest) == len(points(one) - points(other))
    assert set().union(*map(points, rest)) == points(one) - points(other)


@EXAMPLES
@given(DELIVERIES)
def test_missing_is_the_first_undelivered_part(case: tuple[Box, list[Box]]) -> None:
    wanted, delivered = case
    lacking = points(wanted) - set().union(*map(points, delivered))
    found = missing(wanted, delivered)
    if not lacking:
        assert found is None
    else:
        assert found is not None
        assert found.volume > 0
        assert points(found) <= lacking
        assert min(points(found)) == min(lacking)


def test_one_box_too_few_is_found() -> None:
    # Four quarters of which the last comes short by one element.
    quarters = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3)), Box((0, 3), (2, 3)), Box((2, 3), (2, 2))]
    assert missing(Box.whole((4, 6)), quarters) == Box((2, 5), (2, 1))
    assert missing(Box.whole((4, 6)), [*quarters, Box((3, 5), (9, 9))]) == Box((2, 5), (1, 1))


def test_a_0_d_tensor_is_one_point() -> None:
    assert Box.whole(()).volume == 1
    assert missing(Box.whole(()), []) == Box((), ())
    assert missing(Box.whole(()), [Box((), ())]) is None


@pytest.mark.parametrize(
    ("offset", "size", "sentence"),
    [
        ((0,), (1, 2), r"box offset \(0,\) and size \(1, 2\) differ in length"),
        ((-1, 0), (1, 2), r"\(-1, 0\).*must not be negative"),
        ((1, 0), (1, -2), r"\(1, -2\) must not be negative"),
    ],
)
def test_what_is_no_box_is_refused(offset: Point, size: Point, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Box(offset, size)


def test_boxes_of_different_tensors_do_not_mix() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        Box.whole((2, 2)).intersect(Box.whole((2,)))
