"""Faults that were reported of other sharded optimizers: each element in its place, groups by name, nothing aside."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.ranks import reports_shards as jobs
from tests.ranks.reports_shards import GROUP_VALUES
from tests.support.ranks import RankPool

WORLD = {"plain": 1, "fsdp": 2, "fsdp 4": 4, "hsdp": 4, "fsdp_tp": 4, "fsdp_tp 2": 2}


def run(ranks: RankPool, name: str, job: Any, *args: Any) -> list[Any]:
    """The job with the first argument and the topology of this name."""
    options = {"process_group": False} if name == "plain" else {}
    return ranks.run(WORLD[name], job, args[0], name.split()[0], *args[1:], **options)


def moved(ranks: RankPool, path: Path, source: str, target: str) -> None:
    """Saved on one topology and loaded on another, every element is where it belongs."""
    for found, _ in run(ranks, source, jobs.save_job, str(path)):
        assert found == []
    for how in ("fresh", "warm", "path"):
        assert run(ranks, target, jobs.load_job, str(path), how) == [[]] * WORLD[target]


@pytest.mark.parametrize("source", ["plain", "fsdp", "hsdp"])
def test_whole_state_into_uneven_fsdp_over_tensor_parallel_B3_B17(ranks: RankPool, tmp_path: Path, source: str) -> None:
    moved(ranks, tmp_path, source, "fsdp_tp")


@pytest.mark.parametrize("target", ["plain", "fsdp 4"])
def test_each_element_of_odd_sizes_keeps_its_place_B5(ranks: RankPool, tmp_path: Path, target: str) -> None:
    moved(ranks, tmp_path, "fsdp", target)


@pytest.mark.parametrize("source", ["plain", "fsdp 4"])
def test_both_replica_groups_get_what_was_saved_B16(ranks: RankPool, tmp_path: Path, source: str) -> None:
    moved(ranks, tmp_path, source, "hsdp")


@pytest.mark.parametrize("target", ["plain", "fsdp", "fsdp_tp"])
def test_a_shard_group_smaller_than_the_world_is_saved_whole_B22(ranks: RankPool, tmp_path: Path, target: str) -> None:
    moved(ranks, tmp_path, "hsdp", target)


@pytest.mark.parametrize("target", ["fsdp_tp 2", "fsdp_tp"])
def test_state_of_parameters_that_were_sharded_before_fsdp_has_the_local_size_B10(
    ranks: RankPool, tmp_path: Path, target: str
) -> None:
    moved(ranks, tmp_path, "fsdp_tp 2", target)


@pytest.mark.parametrize("target", ["plain", "fsdp", "fsdp 4"])
@pytest.mark.parametrize("source", ["plain", "fsdp"])
def test_strided_state_keeps_each_element_in_its_place(
    ranks: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    assert run(ranks, source, jobs.save_strided_job, str(tmp_path)) == [[]] * WORLD[source]
    assert run(ranks, target, jobs.load_strided_job, str(tmp_path)) == [[]] * WORLD[target]
    assert run(ranks, target, jobs.load_job, str(tmp_path), "fresh") == [[]] * WORLD[target]


@pytest.mark.parametrize("topology", ["fsdp 4", "hsdp", "fsdp_tp"])
def test_each_chunk_has_one_writer_B6_K6(ranks: RankPool, tmp_path: Path, topology: str) -> None:
    outcomes = run(ranks, topology, jobs.save_job, str(tmp_path))
    writers = Counter(chunk for _, written in outcomes for chunk in written)
    stored = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    chunks = Counter((key, tuple(chunk.offsets)) for key, one in stored.items() for chunk in one.chunks)
    assert set(writers.values()) == {1}
    assert writers == chunks
    for key, one in stored.items():
        assert sum(chunk.sizes.numel() for chunk in one.chunks) == one.size.numel(), key


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("topology", ["fsdp 4", "fsdp_tp"])
def test_ranks_with_empty_shards_list_the_same_names_B7(ranks: RankPool, topology: str, steps: int) -> None:
    first, *others = ranks.run(4, jobs.keys_job, topology.split()[0], steps)
    assert {"state.heads.0.weight.momentum_buffer", "state.heads.2.bias.momentum_buffer", "manifest"} <= set(first[0])
    assert others == [first] * 3


def test_a_load_hides_no_collectives_B17(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, jobs.collectives_job, str(tmp_path)) == [[0, 0, 0, 0]] * 4


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_plain_parameters_that_hold_other_parts_on_each_rank_are_refused_B20(
    ranks: RankPool, tmp_path: Path, uneven: bool
) -> None:
    path = tmp_path / "checkpoint"
    for outcome in ranks.outcomes(4, jobs.plain_parts_job, str(path), uneven):
        assert outcome.error_type == "RankFailureError", outcome
        assert "part: " in outcome.error
    assert not path.exists()


@pytest.mark.parametrize("where", ["list", "dict", "tensor", "optimizer"])
def test_what_a_rule_keeps_outside_of_its_state_is_refused_B23(ranks: RankPool, tmp_path: Path, where: str) -> None:
    path = tmp_path / "checkpoint"
    for outcome in ranks.outcomes(2, jobs.side_storage_job, str(path), where):
        assert outcome.error_type == "RankFailureError", outcome
        assert "KeepsMasters.masters" in outcome.error
    assert not path.exists()


ORDER = ["norm bias", "weight", "one"]
VALUES: dict[str, dict[str, Any]] = {"norm bias": {"weight_decay": 0.0}, "weight": GROUP_VALUES, "one": {"lr": 0.0625}}


@pytest.mark.parametrize("how", ["stock", "path"])
@pytest.mark.parametrize("order", [ORDER, ["one", "weight", "bias norm"]], ids=["same order", "other order"])
def test_groups_are_restored_by_name_each_with_all_its_values_C1_C12_C13_C15(
    ranks: RankPool, tmp_path: Path, order: list[str], how: str
) -> None:
    saved = ranks.run(2, jobs.save_groups_job, str(tmp_path), ORDER, VALUES)[0]
    assert saved["group of weight"]["betas"] == (0.5, 0.75)
    assert saved["group of weight"]["tag"] == ["a", (1, None)]
    assert saved["group of one"]["lr"] == 0.0625
    assert len(saved["state.one.exp_avg"]) == 1  # no element of it is on rank 1
    assert ranks.run(2, jobs.load_groups_job, str(tmp_path), order, how) == [saved] * 2
    assert ranks.run(4, jobs.load_groups_job, str(tmp_path), order, how) == [saved] * 4


@pytest.mark.parametrize("what", ["order", "membership", "an empty group"])
def test_ranks_that_group_differently_do_not_save_C5(ranks: RankPool, tmp_path: Path, what: str) -> None:
    path = tmp_path / "checkpoint"
    for outcome in ranks.outcomes(2, jobs.unlike_groups_job, what, str(path)):
        assert outcome.error_type == "RankFailureError", outcome
        assert "parameter group 0: " in outcome.error
    assert not path.exists()


def test_stages_of_a_pipeline_keep_their_own_parameters_and_lr_C11(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run(2, jobs.stages_job, str(tmp_path), True)
    for rank, (saved, loaded) in enumerate(outcomes):
        assert saved[f"group of layer{rank}.weight"]["lr"] == 0.25 + rank
        assert loaded == saved


@pytest.mark.parametrize("how", ["stock", "path"])
@pytest.mark.parametrize("what", ["lr", "options", "state"])
def test_lifecycle_1f_targets_that_differ_between_ranks_become_equal_or_are_refused(
    ranks: RankPool, tmp_path: Path, what: str, how: str
) -> None:
    saved = ranks.run(2, jobs.save_groups_job, str(tmp_path), ["norm weight one bias"], {})[0]
    outcomes = ranks.run(2, jobs.unlike_targets_job, str(tmp_path), what, how)
    if how == "path":
        # Everything comes from the checkpoint, so it does not matter.
        assert outcomes == [("", "", [], saved)] * 2
    else:
        for error_type, text, changes, _ in outcomes:
            assert error_type == "RankFailureError"
            assert "state_dict: ranks hold differently what has to be the same" in text
            assert changes == []
