"""``dcp.async_save``: the file holds what was live at the call, whatever happens to the live objects afterwards.

H1: tensors on the CPU that nobody copied. H2: a worker process that shares memory with the live counter. H3: a thread
that pickles live tensors. H4: a counter that is read when the save ends.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.async_saves import (
    STAGERS,
    all_in_a_process,
    save_then_change,
    second_save_with_a_caching_blocking_stager,
    two_saves_with_one_stager,
)
from tests.support.models import Topology
from tests.support.ranks import RankError, RankPool


@pytest.mark.parametrize(
    ("world_size", "topology", "stagers"), [(2, "fsdp", [*STAGERS]), (4, "fsdp_tp", ["torch's default", "blocking"])]
)
def test_a_thread_saves_what_was_live_at_the_call_H1_H3_H4(
    ranks: RankPool, tmp_path: Path, world_size: int, topology: Topology, stagers: list[str]
) -> None:
    for found in ranks.run(world_size, save_then_change, topology, str(tmp_path), "THREAD", stagers):
        assert found == {stager: [] for stager in stagers}


def test_a_reused_stager_saves_each_call_in_a_thread_H1(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, two_saves_with_one_stager, "fsdp", str(tmp_path), "THREAD") == [[[], [], []]] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_saves_what_was_live_at_each_call_H1_H2(ranks: RankPool, tmp_path: Path) -> None:
    # Fresh ranks: torch's process executor starts a process beside each, of one world for good.
    for found, reused in ranks.run(2, all_in_a_process, "fsdp", str(tmp_path), fresh=True, deadline_s=200):
        assert found == {stager: [] for stager in STAGERS}
        assert reused == [[], [], []]


def test_a_blocking_stager_that_would_reuse_handles_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="use torch's DefaultStager"):
        ranks.run(2, second_save_with_a_caching_blocking_stager, "fsdp", str(tmp_path))
