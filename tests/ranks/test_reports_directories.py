"""Several ranks among several checkpoints: one is read, listings decide nothing, other saves are not in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ranks.checkpoint_functions import fail_save, save_all
from tests.ranks.reports_directories import beside_async, one_of_several, shuffled_listings
from tests.support.ranks import RankPool


@pytest.mark.parametrize(("point", "bad"), [("write", 1), ("finish", 0)])
def test_the_only_checkpoint_stays_until_the_next_one_is_complete_H11(
    point: str, bad: int, ranks: RankPool, tmp_path: Path
) -> None:
    for number in (1, 2):
        (kept, _) = ranks.run(2, save_all, str(tmp_path / "good"), "shardopt", range(number), float(number))
    files = sorted(os.listdir(tmp_path / "good"))
    for found in ranks.run(2, fail_save, str(tmp_path), bad, point, "raises", kept, deadline_s=45.0):
        assert found["error"][0] == "RankFailureError"
        assert (found["gone"], found["old"]) == ([], [])
    # One more has replaced it since, and left as many files.
    assert len(os.listdir(tmp_path / "good")) == len(files) == 3


def test_metadata_and_data_are_those_of_the_directory_that_was_asked_for_H17(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(2, one_of_several, str(tmp_path)):
        assert len(found) == 6
        assert {name: differences for name, differences in found.items() if differences} == {}


def test_no_work_is_split_by_the_order_of_a_listing_H19(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, shuffled_listings, str(tmp_path)) == [[]] * 3
    # What was replaced is gone too.
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize("own_groups", [True, False], ids=["own groups", "the default group"])
def test_saves_run_beside_asynchronous_ones_E8(own_groups: bool, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, beside_async, str(tmp_path), own_groups, deadline_s=60.0) == [[], []]
    assert len(os.listdir(tmp_path)) == (4 if own_groups else 3)
