"""Rules that draw random numbers or keep turned matrices, and optimizers that one rank alone has stepped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.odd_runs import noisy_job, turned_job, warm_job
from tests.ranks.topologies import TOPOLOGIES
from tests.ranks.trajectories import assemble
from tests.ranks.whole_runs import unequal
from tests.support.ranks import RankPool


@pytest.mark.parametrize("elsewhere", ["fsdp2", "fsdp4", "fsdp1"])
def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have(
    ranks: RankPool, tmp_path: Path, elsewhere: str
) -> None:
    held = ranks.run(2, noisy_job, "fsdp2", str(tmp_path), None)
    assert all(untouched for _, _, untouched in held)
    middle, end = assemble([middle for middle, _, _ in held]), assemble([end for _, end, _ in held])
    assert unequal(middle, end) != []
    went_on = ranks.run(TOPOLOGIES[elsewhere].world_size, noisy_job, elsewhere, str(tmp_path), middle.arrays)
    assert all(untouched for _, _, untouched in went_on)
    assert unequal(assemble([end for _, end, _ in went_on]), end) == []


def test_state_that_is_lent_lies_in_memory_as_its_owner_keeps_it(ranks: RankPool) -> None:
    assert all(ranks.run(2, turned_job, "fsdp2"))


def test_state_that_one_rank_alone_has_already_is_every_ranks_error(ranks: RankPool) -> None:
    for said in ranks.run(2, warm_job, 1, deadline_s=30.0):
        assert "construct: ranks wrap different things" in said
        assert "state that it has already" in said
