"""What a state dict is good for later: values of two moments are never mixed, and no memory has two owners."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.rules import Awkward, state, train
from tests.support.snapshot import snapshot

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Case = tuple[ShardedStateOptimizer, Awkward]


def adamw(seed: int = 0, *, steps: int = 0) -> Case:
    model = Awkward(seed)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model)
    train(optimizer, model, range(steps))
    return optimizer, model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two steps of AdamW."""
    dcp.save({"optim": adamw(steps=2)[0]}, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def read(optimizer: ShardedStateOptimizer, checkpoint: Path) -> dict[str, Any]:
    """The optimizer's state dict, filled by DCP and not yet loaded."""
    state_dict = optimizer.state_dict()
    dcp.load({"optim": state_dict}, checkpoint_id=checkpoint)
    return state_dict


MOVES: dict[str, Callable[[ShardedStateOptimizer, Awkward], Any]] = {
    "step": lambda one, model: train(one, model, range(2, 3)),
    "load": lambda one, model: one.load_state_dict(adamw(steps=1)[0].state_dict()),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "warm"])
def test_a_state_dict_of_an_earlier_moment_is_neither_saved_nor_loaded(move: str, steps: int, tmp_path: Path) -> None:
    optimizer, model = adamw(steps=steps)
    earlier = optimizer.state_dict()
    MOVES[move](optimizer, model)
    before = snapshot(optimizer, model)
    sentence = r"since this state dict was made.* lends .*live memory.*copy\.deepcopy\(optimizer\.state_dict\(\)\)"
    with pytest.raises(CheckpointException, match=sentence):
        dcp.save({"optim": earlier}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()
    for loaded in (optimizer, adamw()[0]):
        with pytest.raises(LoadError, match=sentence):
            loaded.load_state_dict(earlier)
    assert before.diff(snapshot(optimizer, model), ignore=["attribute._*"]) == []


def test_a_new_group_makes_a_state_dict_one_of_an_earlier_moment() -> None:
    model = Awkward()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW([model.matrix]), model)
    earlier = optimizer.state_dict()
    optimizer.add_param_group({"params": [model.vector]})
    with pytest.raises(LoadError, match="since this state dict was made"):
        optimizer.load_state_dict(earlier)


def test_a_state_dict_of_this_moment_may_be_used_again_and_again(tmp_path: Path) -> None:
    optimizer, model = adamw(steps=2)
    present = optimizer.state_dict()
    optimizer.prepare_load(present)
    optimizer.prepare_load(present)
    for name in ("one", "two"):
        dcp.save({"optim": present}, checkpoint_id=tmp_path / name)
        other, its_model = adamw(seed=1)
        other.load_state_dict(present)
        assert state(other, its_model) == state(optimizer, model)


def test_a_deep_copy_is_a_snapshot_to_come_back_to(tmp_path: Path) -> None:
    optimizer, model = adamw(steps=2)
    kept, expected = copy.deepcopy(optimizer.state_dict()), state(optimizer, model)
    for _ in range(2):
        train(optimizer, model, range(2, 4))
        assert state(optimizer, model) != expected
        optimizer.load_state_dict(kept)
        assert state(optimizer, model) == expected
    train(optimizer, model, range(2, 4))
    dcp.save({"optim": kept}, checkpoint_id=tmp_path)
    other, its_model = adamw()
    dcp.load({"optim": other}, checkpoint_id=tmp_path)
    assert state(other, its_model) == expected


@pytest.mark.parametrize("second", ["itself", "another"])
def test_what_a_fresh_optimizer_has_taken_over_is_not_loaded_again(second: str, checkpoint: Path) -> None:
    optimizer, model = adamw()
    filled = read(optimizer, checkpoint)
    optimizer.load_state_dict(filled)
    train(optimizer, model, range(2, 3))
    loaded = optimizer if second == "itself" else adamw()[0]
    before = snapshot(optimizer, model)
    with pytest.raises(LoadError, match=r"matrix: state 'exp_avg'.* taken over by an earlier load.*read it again"):
        loaded.load_state_dict(filled)
    assert before.diff(snapshot(optimizer, model), ignore=["attribute._*"]) == []
    # Read again, it is.
    dcp.load({"optim": filled}, checkpoint_id=checkpoint)
    loaded.load_state_dict(filled)


def test_what_was_copied_into_a_warm_optimizer_may_be_loaded_again(checkpoint: Path) -> None:
    optimizer, model = adamw(seed=1, steps=1)
    filled = read(optimizer, checkpoint)
    optimizer.load_state_dict(filled)
    expected = state(optimizer, model)
    train(optimizer, model, range(2, 3))
    optimizer.load_state_dict(filled)
    assert state(optimizer, model) == expected


def test_a_prepared_load_that_was_dropped_has_taken_nothing(checkpoint: Path) -> None:
    optimizer, _ = adamw()
    filled = read(optimizer, checkpoint)
    optimizer.prepare_load(filled)
    optimizer.load_state_dict(filled)


def test_a_filled_state_dict_is_copied_with_what_was_read(checkpoint: Path) -> None:
    optimizer, model = adamw()
    filled = read(optimizer, checkpoint)
    kept = copy.deepcopy(filled)
    optimizer.load_state_dict(filled)
    expected = state(optimizer, model)
    train(optimizer, model, range(2, 3))
    other, its_model = adamw()
    other.load_state_dict(kept)
    assert state(other, its_model) == expected


def test_a_copy_is_not_read_into(checkpoint: Path) -> None:
    optimizer, _ = adamw()
    kept = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointException, match=r"a copy of a handle .*load into what state_dict\(\) returns"):
        dcp.load({"optim": kept}, checkpoint_id=checkpoint)


@pytest.mark.parametrize("how", ["lent", "read"])
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
def test_state_of_another_dtype_is_refused_whether_lent_or_read(how: str, steps: int, tmp_path: Path) -> None:
    optimizer, _ = adamw(steps=2)
    model = Awkward().bfloat16()
    loaded = ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model)
    train(loaded, model, range(steps))
    before = snapshot(loaded, model)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    state_dict = optimizer.state_dict() if how == "lent" else read(loaded, tmp_path)
    with pytest.raises(LoadError, match="matrix: state 'exp_avg' was saved as float32, this optimizer keeps bfloat16"):
        loaded.load_state_dict(state_dict)
    assert before.diff(snapshot(loaded, model)) == []
