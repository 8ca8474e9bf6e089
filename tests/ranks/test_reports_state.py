"""Public reports of lost or invented state on several ranks: nothing is dropped, made up, or half saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from tests.ranks import reports_state
from tests.ranks.reports_state import FIRST_HALF, RULES
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences

# World size, topology and how to load: the same ranks, fewer, and more.
TARGETS = [(2, "fsdp", "stock"), (1, "plain", "path"), (4, "fsdp", "stock"), (4, "hsdp", "path")]

# Torch's is no Exception: a handler of those does not see it.
ERRORS = [CheckpointException("read", {}), OSError("disk full")]


def same(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert value_differences(one, other) == []


@pytest.mark.parametrize("where", ["step", "state_dict", "load"])
@pytest.mark.parametrize(
    "error", [CheckpointException("read", {}), OSError("disk full")], ids=lambda e: type(e).__name__
)
def test_one_ranks_failure_is_an_own_error_on_both_T2(
    error: BaseException, where: str, ranks: RankPool, tmp_path: Path
) -> None:
    well, failed = ranks.run(2, reports_state.interrupted, error, where, str(tmp_path))
    for kind, text, _, changes in (well, failed):
        assert kind == "RankFailureError"
        assert f"failed on rank 1: {type(error).__name__}" in text
        assert changes == []
    assert failed[2] == type(error).__name__


def test_a_writer_that_fails_on_one_rank_fails_the_save_on_both_and_changes_nothing_T2(
    ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = ranks.run(2, reports_state.save_with_a_failing_writer, str(tmp_path))
    for kind, text, changes, _ in outcomes:
        assert (kind, changes) == ("CheckpointException", [])
        assert "disk full" in text
    assert not (tmp_path / "failed" / ".metadata").exists()
    for world_size in (2, 1):
        for held in ranks.run(world_size, reports_state.load_good, str(tmp_path / "good")):
            assert value_differences(outcomes[0][3], held) == []


def test_files_of_former_ranks_in_the_directory_are_not_read_T5(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, reports_state.save_steps, str(tmp_path), [0, 1, 2])
    (expected,) = ranks.run(1, reports_state.save_steps, str(tmp_path), [5, 6])
    assert (tmp_path / "__1_0.distcp").exists()
    for world_size in (1, 2, 4):
        for held in ranks.run(world_size, reports_state.load_good, str(tmp_path)):
            assert value_differences(expected, held) == []


def test_state_of_what_is_frozen_on_either_side_comes_back_A5_K4(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, reports_state.save_half_frozen, str(tmp_path))[0]
    assert {key.split(".exp_avg")[0] for key in expected[0] if key.endswith("exp_avg")} == {
        f"state.{name}" for name in FIRST_HALF
    }
    for world_size, topology, how in TARGETS:
        for found in ranks.run(world_size, reports_state.load_half_frozen, str(tmp_path), topology, how):
            same(expected, found)


def test_a_parameter_that_one_rank_alone_has_used_is_resumed_A7(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, reports_state.save_modality, str(tmp_path))[0]
    assert expected[0]["state.heads.1.weight.exp_avg"].abs().min() > 0
    for world_size, topology, _ in TARGETS:
        for found in ranks.run(world_size, reports_state.load_modality, str(tmp_path), topology):
            same(expected[: len(found)], found)


def test_a_parameter_that_was_never_used_is_resumed_on_other_ranks_and_then_used_A6_A7(
    ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(2, reports_state.save_never_used, str(tmp_path))[0]
    assert not [key for key in expected[0] if key.startswith("state.heads.1")]
    assert expected[1]["state.heads.1.weight.step"] == 2
    assert expected[1]["state.up.weight.step"] == 4
    for world_size, topology, _ in TARGETS:
        for found in ranks.run(world_size, reports_state.load_never_used, str(tmp_path), topology):
            same(expected, found)


def test_the_first_loss_and_the_first_step_after_a_load_are_those_of_the_run_that_went_on_A12_T1(
    ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(2, reports_state.save_losses, str(tmp_path), "fsdp")
    (oracle,) = ranks.run(1, reports_state.save_losses, "", "plain", process_group=False)
    assert expected == [oracle, oracle]
    assert len(set(oracle)) == 6
    for world_size, topology, how in TARGETS:
        found = ranks.run(world_size, reports_state.load_losses, str(tmp_path), topology, how)
        assert found == [oracle[3:]] * world_size


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "factored"])
def test_no_rule_needs_entries_of_known_names_A14(rule: str, ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, reports_state.save_rule, rule, "fsdp", str(tmp_path))[0]
    assert isinstance(expected, list)
    for world_size, topology, _ in TARGETS:
        for found in ranks.run(world_size, reports_state.load_rule, rule, topology, str(tmp_path)):
            same(expected, found)


def test_factors_of_other_shapes_are_saved_of_whole_parameters_and_refused_of_sharded_ones_A14(
    ranks: RankPool, tmp_path: Path
) -> None:
    (expected,) = ranks.run(1, reports_state.save_rule, "factored", "plain", str(tmp_path / "whole"))
    assert expected[0]["state.up.weight.row_factor"].shape == (5,)
    assert expected[0]["state.up.weight.col_factor"].shape == (3,)
    (found,) = ranks.run(1, reports_state.load_rule, "factored", "plain", str(tmp_path / "whole"))
    same(expected, found)
    for text in ranks.run(2, reports_state.save_rule, "factored", "fsdp", str(tmp_path / "sharded")):
        assert "up.weight: state 'row_factor'" in text
    assert not (tmp_path / "sharded" / ".metadata").exists()


@pytest.mark.parametrize("added", [False, True], ids=["from the start", "added later"])
@pytest.mark.parametrize("which", ["base", "lora"])
def test_what_adapters_add_starts_anew_and_the_rest_is_restored_K5(
    which: str, added: bool, ranks: RankPool, tmp_path: Path
) -> None:
    saved = dict(zip(("base", "lora"), ranks.run(2, reports_state.save_adapted, str(tmp_path))[0], strict=True))
    want = {key: value for key, value in saved[which].items() if key.startswith("state.")}
    others = {"base": ["lora_a.weight", "lora_b.weight"], "lora": ["base.bias", "base.weight"]}[which]
    for world_size in (2, 1, 4):
        for names, text, loaded, after in ranks.run(
            world_size, reports_state.load_adapted, str(tmp_path), which, added
        ):
            assert names == {"missing": others, "unused": [], "fresh": []}
            assert f"not in the checkpoint, keeping the state they have (2): {', '.join(others)}" in text
            assert value_differences(want, {key: one for key, one in loaded.items() if key.startswith("state.")}) == []
            assert {after[f"state.{name}.step"].item() for name in others} == {1.0}
            assert {after[key].item() for key in want if key.endswith(".step")} == {3.0}


@pytest.mark.parametrize("seen", [0, 2], ids=["fresh", "warm"])
@pytest.mark.parametrize("name", ["up.weight", "scale"], ids=["sharded", "plain"])
def test_a_gradient_on_one_rank_only_does_not_hang_and_is_named_before_a_save_K8(
    name: str, seen: int, ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = ranks.run(2, reports_state.gradients_on_one_rank, name, seen, str(tmp_path), deadline_s=30.0)
    for kind, text, changes in outcomes:
        assert (kind, changes) == ("RankFailureError", [])
        assert f"{name}: state 'step'" in text
    assert not (tmp_path / ".metadata").exists()
