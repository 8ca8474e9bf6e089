"""Layouts and settings beyond plain FSDP2: dim 1, plain parameters, bf16, tensor parallelism alone, two meshes, AMP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks.comparison import Saves, compare_resumed, differences, where_shards_end
from tests.ranks.configurations import FEW
from tests.ranks.settings_runs import SETTINGS, cut_by_hand_job, overflow_job, save_and_load_job, save_unlike_job
from tests.ranks.topologies import TOPOLOGIES
from tests.ranks.trajectories import assemble, exact
from tests.support.ranks import RankPool
from tests.support.rules import Rule

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def saves(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ranks, tmp_path_factory.mktemp("topologies"), FEW)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("dim1", "fsdp4", id="from Shard(1)"),
        pytest.param("fsdp4", "dim1", id="to Shard(1)"),
        pytest.param("fsdp2+plain", "fsdp4", id="from plain parameters beside DTensors D8"),
        pytest.param("fsdp4", "fsdp2+plain", id="to plain parameters beside DTensors D8"),
        pytest.param("dense4+experts2x2", "fsdp2", id="from two meshes B9"),
        pytest.param("fsdp2", "dense4+experts2x2", id="to two meshes B9"),
        pytest.param("tp2", "fsdp1", id="from tensor parallelism with partial gradients"),
        pytest.param("fsdp1", "tp2", id="to tensor parallelism with partial gradients"),
    ],
)
def test_resume_equals_uninterrupted_and_unsharded_B9_D8(saves: Saves, source: str, target: str) -> None:
    cells, found = compare_resumed(saves, source, target)
    assert not found, "\n".join([f"{len(found)} of {cells} values differ", *found])


# Torch's fused SGD on the CPU (2.11, 2.13) takes other values than the unfused one, and reads memory that nobody has
# written, when momentum meets bf16 or fp16: no two unsharded runs agree either.
BF16 = {index: rule for index, rule in FEW.items() if rule.cls is not torch.optim.SGD}
BF16[-1] = Rule(torch.optim.SGD, {"lr": 0.125, "momentum": 0.9, "nesterov": True})


@pytest.mark.parametrize(("source", "target"), [("fsdp2", "fsdp2"), ("fsdp2", "fsdp4")])
def test_bf16_parameters_T8(ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    cells, found = compare_resumed(Saves(ranks, tmp_path, BF16, torch.bfloat16), source, target)
    assert not found, "\n".join([f"{len(found)} of {cells} values differ", *found])


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_dcp(ranks: RankPool, tmp_path: Path, setting: str) -> None:
    assert ranks.run(2, save_and_load_job, "fsdp2", setting, str(tmp_path)) == [[[], [], []]] * 2


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled before"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("topology", ["fsdp2", "hsdp2x2", "fsdp2+tp2"])
def test_an_inf_that_one_shard_has_skips_the_step_on_all_ranks_D1_D2(
    ranks: RankPool, topology: str, fused: bool, unscale: bool
) -> None:
    outcomes = ranks.run(TOPOLOGIES[topology].world_size, overflow_job, topology, fused, unscale)
    oracle, scales = overflow_job(None, fused, unscale)
    assert scales == [4.0, 2.0, 2.0, 2.0]
    assert [scales for _, scales in outcomes] == [scales] * len(outcomes)
    rule = Rule(torch.optim.AdamW, {"fused": fused})
    got, want = assemble([held for held, _ in outcomes]), assemble([oracle])
    assert differences(got, want, may_round=where_shards_end(rule, torch.float32, got, want)) == []
    assert want.values["even.column.weight/step"] == exact(torch.tensor(3.0))


def test_parameters_cut_by_hand_are_refused_B4(ranks: RankPool) -> None:
    for outcome, rows in zip(ranks.outcomes(2, cut_by_hand_job, [3, 1]), [3, 1], strict=True):
        assert outcome.error_type == "PlacementError"
        assert f"shard has shape ({rows}, 2)" in outcome.error
        assert "of global shape (4, 2) gives it (2, 2)" in outcome.error


def test_where_only_some_ranks_hold_what_torch_would_give_them_all_refuse_B4(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(3, cut_by_hand_job, [2, 1, 1])
    assert [outcome.error_type for outcome in outcomes] == ["RankFailureError", "PlacementError", "PlacementError"]
    assert "construct failed on ranks 1-2: rank 1: PlacementError: " in outcomes[0].error


DIFFERENCES = {
    "values of a plain parameter": "odd.rows3: state 'exp_avg' of a parameter that is not sharded: rank 0 / rank 1\n",
    "a missing state": "odd.column.weight: state 'step': rank 0; rank 1 without it\n",
    "another lr": "parameter group 0: 'lr': rank 0 / rank 1\n",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_lifecycle_1f_ranks_that_disagree_do_not_save_B8(ranks: RankPool, tmp_path: Path, what: str) -> None:
    for outcome in ranks.outcomes(2, save_unlike_job, str(tmp_path / "checkpoint"), what):
        assert outcome.error_type == "RankFailureError"
        assert outcome.error_attributes["operation"] == "state_dict"
        assert len(outcome.error_attributes["disagree"]) == 2
        assert DIFFERENCES[what] in outcome.error
    assert not (tmp_path / "checkpoint").exists()
