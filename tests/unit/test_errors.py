"""Errors travel: a launcher pickles a worker's error and raises it elsewhere, with all that it says."""

from __future__ import annotations

import copy
import pickle

import pytest

from shardopt import errors
from shardopt.errors import LoadError, RankFailureError, ShardoptError

FAILURE = RankFailureError(
    "step: rank 1 failed", operation="step", failures={1: "ValueError: no"}, missing=[2], disagree={"0f": [0, 3]}
)
ERRORS = [
    FAILURE,
    LoadError("two problems", ["a: one", "b: two"]),
    *(
        getattr(errors, name)(f"{name} says")
        for name in errors.__all__
        if name not in ("LoadError", "RankFailureError")
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_of_a_pickle_as_it_went_in(error: ShardoptError) -> None:
    error.add_note("in the third epoch")
    for got in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(got) is type(error)
        assert str(got) == str(error)
        assert vars(got) == vars(error)


class OurRankFailureError(RankFailureError):
    """A user's own."""


def test_a_subclass_stays_one() -> None:
    got = pickle.loads(pickle.dumps(OurRankFailureError("no", operation="save")))
    assert type(got) is OurRankFailureError
    assert got.operation == "save"
