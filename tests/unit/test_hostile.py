"""What nobody should do, and somebody will: each ends in an error or in the right state, never in a wrong one."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from shardopt import LoadError, ShardedStateOptimizer, ShardoptError, StaleLoadError
from tests.support.rules import Awkward, Unwritable, state, train
from tests.support.snapshot import snapshot

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Case = tuple[ShardedStateOptimizer, Awkward]


def adamw(seed: int = 0, *, steps: int = 0, **options: Any) -> Case:
    model = Awkward(seed)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), **options), model)
    train(optimizer, model, range(steps))
    return optimizer, model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two steps of AdamW, saved under ``optim``."""
    dcp.save({"optim": adamw(steps=2)[0]}, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def partly() -> dcp.DefaultLoadPlanner:
    return dcp.DefaultLoadPlanner(allow_partial_load=True)


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
def test_a_partial_load_that_finds_no_optimizer_says_so(
    steps: int, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, model = adamw(steps=steps)
    before = state(optimizer, model)
    with caplog.at_level(logging.WARNING, logger="shardopt"):
        dcp.load({"other": optimizer}, checkpoint_id=checkpoint, planner=partly())
    assert "nothing was read into the state dict" in caplog.text
    assert state(optimizer, model) == before


def test_a_partial_load_without_the_manifest_is_refused(checkpoint: Path) -> None:
    optimizer, model = adamw(steps=1)
    state_dict = optimizer.state_dict()
    entries = {key: value for key, value in state_dict.items() if key != "manifest"}
    dcp.load({"optim": entries}, checkpoint_id=checkpoint)
    before = snapshot(optimizer, model)
    with pytest.raises(LoadError, match="manifest: not read"):
        optimizer.load_state_dict(state_dict)
    assert before.diff(snapshot(optimizer, model)) == []


def test_a_lender_that_moves_before_the_commit_makes_the_load_stale() -> None:
    lender, its_model = adamw(steps=2)
    optimizer, model = adamw()
    prepared = optimizer.prepare_load(lender.state_dict())
    train(lender, its_model, range(2, 3))
    with pytest.raises(StaleLoadError, match="since this state dict was made"):
        prepared.commit()
    assert state(optimizer, model) == {}


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
def test_one_reading_is_committed_to_one_optimizer_only(steps: int, checkpoint: Path) -> None:
    first, _ = adamw()
    second, model = adamw(steps=steps)
    filled = first.state_dict()
    dcp.load({"optim": filled}, checkpoint_id=checkpoint)
    prepared, too_late = first.prepare_load(filled), second.prepare_load(filled)
    prepared.commit()
    before = state(second, model)
    with pytest.raises(StaleLoadError, match="taken over by an earlier load"):
        too_late.commit()
    assert state(second, model) == before


def test_a_commit_that_fails_half_way_leaves_nothing_to_step_or_save(checkpoint: Path, tmp_path: Path) -> None:
    optimizer, model = adamw(steps=1)
    optimizer.state[model.vector]["exp_avg"] = torch.zeros(model.vector.shape).as_subclass(Unwritable)
    with pytest.raises(RuntimeError, match="nothing can be written here"):
        optimizer.prepare_load(checkpoint).commit()
    steps = {float(entries["step"]) for entries in optimizer.state.values() if entries}
    assert steps == {1.0, 2.0}, "the test needs a commit that is half done"
    with pytest.raises(ShardoptError, match=r"load failed after it had begun to write .*nothing can be written here"):
        optimizer.step()
    with pytest.raises(CheckpointException, match="may be half updated"):
        dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / "half")
    del optimizer.state[model.vector]["exp_avg"]
    optimizer.prepare_load(checkpoint).commit()
    assert state(optimizer, model) == state(*adamw(steps=2))
    optimizer.step()


def groups_of_two(first: Tensor, second: Tensor) -> ShardedStateOptimizer:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": first}, {"params": [model.bias], "lr": second}]
    return ShardedStateOptimizer(torch.optim.AdamW(groups), model)


def test_one_tensor_cannot_be_the_lr_of_two_groups_that_were_saved_with_different_ones(tmp_path: Path) -> None:
    dcp.save({"optim": groups_of_two(torch.tensor(0.25), torch.tensor(0.5))}, checkpoint_id=tmp_path)
    shared = torch.tensor(1.0)
    optimizer = groups_of_two(shared, shared)
    with pytest.raises(LoadError, match=r"group 1: 'lr' is the tensor that group 0 has .* saved .*0\.25.*0\.5"):
        optimizer.prepare_load(tmp_path)
    assert shared == 1.0


def test_one_tensor_is_the_lr_of_two_groups_that_were_saved_with_equal_ones(tmp_path: Path) -> None:
    dcp.save({"optim": groups_of_two(torch.tensor(0.25), torch.tensor(0.25))}, checkpoint_id=tmp_path)
    shared = torch.tensor(1.0)
    groups_of_two(shared, shared).prepare_load(tmp_path).commit()
    assert shared == 0.25


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_a_tensor_lr_that_is_put_in_before_the_commit_makes_the_load_stale(lr: Any, tmp_path: Path) -> None:
    dcp.save({"optim": adamw(lr=0.25)[0]}, checkpoint_id=tmp_path)
    optimizer, _ = adamw(lr=copy.copy(lr))
    prepared = optimizer.prepare_load(tmp_path)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.75)
    with pytest.raises(StaleLoadError, match="a parameter group was"):
        prepared.commit()
    assert optimizer.param_groups[0]["lr"] == 0.75


def test_looking_into_the_joined_state_makes_none() -> None:
    model = Awkward()
    first, *rest = model.parameters()
    optimizer = ShardedStateOptimizer([torch.optim.SGD([first], momentum=0.9), torch.optim.AdamW(rest)], model)
    assert first not in optimizer.state
    assert optimizer.state.get(rest[0]) is None
    assert optimizer.state.get(rest[0], 3) == 3
    assert len(optimizer.state) == 0
    train(optimizer, model, range(1))
    assert first in optimizer.state
    assert optimizer.state.get(first) is optimizer.optimizers[0].state[first]


def test_what_was_read_is_not_saved_as_what_was_live(checkpoint: Path, tmp_path: Path) -> None:
    optimizer, _ = adamw(seed=3, steps=1)
    filled = optimizer.state_dict()
    dcp.load({"optim": filled}, checkpoint_id=checkpoint)
    with pytest.raises(CheckpointException, match="has been read into"):
        dcp.save({"optim": filled}, checkpoint_id=tmp_path / "again")


def test_state_made_in_inference_mode_does_not_stop_a_load(checkpoint: Path) -> None:
    optimizer, model = adamw(steps=1)
    with torch.inference_mode():
        optimizer.state[model.matrix]["exp_avg"] = torch.zeros(3)
    optimizer.prepare_load(checkpoint).commit()
    assert state(optimizer, model) == state(*adamw(steps=2))


def test_expanded_state_is_replaced_and_not_written_to(checkpoint: Path) -> None:
    optimizer, model = adamw(steps=1)
    optimizer.state[model.matrix]["exp_avg"] = torch.zeros(()).expand(5, 3)
    optimizer.prepare_load(checkpoint).commit()
    assert state(optimizer, model) == state(*adamw(steps=2))


def test_an_expanded_lr_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def momentum(lr: Tensor) -> Case:
        model = Awkward()
        inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        inner.param_groups[0]["scale"] = lr
        return ShardedStateOptimizer(inner, model), model

    dcp.save({"optim": momentum(torch.ones(2))[0]}, checkpoint_id=tmp_path)
    optimizer, model = momentum(torch.zeros(1).expand(2))
    before = snapshot(optimizer, model)
    with pytest.raises(LoadError, match="group 0: 'scale' is a tensor that cannot be written to: expanded"):
        optimizer.prepare_load(tmp_path)
    assert before.diff(snapshot(optimizer, model)) == []
