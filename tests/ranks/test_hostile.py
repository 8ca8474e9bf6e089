"""What one rank does wrong, or what a refusal must leave alone, with DTensors on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate

import shardopt
from shardopt import PlacementError, RankFailureError, ShardedStateOptimizer
from tests.ranks.refusals import SHAPE, STEPS_SAVED, make, save, train
from tests.support.models import build, set_gradients
from tests.support.ranks import RankPool
from tests.support.rules import Unwritable
from tests.support.snapshot import snapshot


class OwnError(Exception):
    """Raised by hooks."""


def refuse(*args: Any) -> None:
    raise OwnError("not on this rank")


REGISTER = {
    "state_dict pre": "register_state_dict_pre_hook",
    "state_dict post": "register_state_dict_post_hook",
    "load_state_dict pre": "register_load_state_dict_pre_hook",
}


def hook_on_one_rank(hook: str, bad: int) -> tuple[str, str, list[str]]:
    """What the operation raised, its text, and what it changed; the operation works without the hook."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, STEPS_SAVED)
    saved = optimizer.state_dict()
    handle = getattr(optimizer, REGISTER[hook])(refuse) if dist.get_rank() == bad else None
    before = snapshot(optimizer, model)
    found = ("nothing", "", list[str]())
    try:
        optimizer.load_state_dict(saved) if hook.startswith("load") else optimizer.state_dict()
    except Exception as error:
        found = (type(error).__name__, str(error), before.diff(snapshot(optimizer, model)))
    if handle is not None:
        handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, model, [2])
    return found


@pytest.mark.parametrize("hook", REGISTER)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_hook_that_raises_on_one_rank_is_an_error_on_both(hook: str, bad: int, ranks: RankPool) -> None:
    # Well before the deadline of a vote, which is what the other rank would wait for.
    for kind, text, changes in ranks.run(2, hook_on_one_rank, hook, bad, deadline_s=25.0):
        assert kind == "RankFailureError"
        assert f"failed on rank {bad}: OwnError: not on this rank" in text
        assert changes == []


def a_second_optimizer_that_cannot_be_shown() -> tuple[str, list[str]]:
    """The refusal's text, and what it changed of the first optimizer."""
    model = build("fsdp", SHAPE)
    first, *rest = model.parameters()
    inners = [torch.optim.AdamW([first]), torch.optim.AdamW(rest)]
    set_gradients(model, 0)
    for inner in inners:
        inner.step()
    mesh = rest[0].device_mesh
    inners[1].state[rest[0]]["exp_avg"] = DTensor.from_local(torch.zeros(rest[0].shape), mesh, [Replicate()])
    kept = {name: value for name, value in inners[0].state[first].items()}
    with pytest.raises(PlacementError) as refused:
        ShardedStateOptimizer(inners, model, vote_timeout=20.0)
    return str(refused.value), [name for name, value in inners[0].state[first].items() if value is not kept[name]]


def test_a_refusal_leaves_the_optimizers_before_it_as_they_were(ranks: RankPool) -> None:
    for text, changed in ranks.run(2, a_second_optimizer_that_cannot_be_shown):
        assert "exp_avg" in text
        assert changed == []


def fail_half_way_on_one_rank(path: str, bad: int) -> dict[str, str]:
    """What is raised by a commit that fails on one rank, by what follows, and by a step after a good load."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, [0])
    entries = optimizer.state[model.down.weight]
    good = entries["exp_avg"]
    if dist.get_rank() == bad:
        entries["exp_avg"] = torch.zeros(good.shape).as_subclass(Unwritable)
    found: dict[str, str] = {}
    for what, operation in (
        ("commit", lambda: optimizer.prepare_load(path).commit()),
        ("step", optimizer.step),
    ):
        try:
            operation()
            found[what] = ""
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"
    entries["exp_avg"] = good
    optimizer.prepare_load(path).commit()
    optimizer.step()
    return found


@pytest.mark.parametrize("bad", [0, 1])
def test_a_commit_that_fails_half_way_on_one_rank_stops_both(bad: int, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path / "good"), SHAPE, {}, STEPS_SAVED)
    for rank, found in enumerate(ranks.run(2, fail_half_way_on_one_rank, str(tmp_path / "good"), bad)):
        assert ("nothing can be written here" in found["commit"]) == (rank == bad)
        assert found["step"].startswith(f"RankFailureError: step failed on rank {bad}: ShardoptError: an earlier load")


def no_mapping_before_the_commit(path: str, bad: int) -> str:
    """What a commit raises after one rank has put nonsense into its state."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, [0])
    prepared = optimizer.prepare_load(path)
    if dist.get_rank() == bad:
        optimizer.state[model.down.weight] = 3
    with pytest.raises(Exception) as refused:  # noqa: PT011
        prepared.commit()
    return f"{type(refused.value).__name__}: {refused.value}"


@pytest.mark.parametrize("bad", [0, 1])
def test_a_commit_that_cannot_be_checked_on_one_rank_fails_on_both(bad: int, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path / "good"), SHAPE, {}, STEPS_SAVED)
    # Well before the deadline of a vote, which is what the other rank would wait for.
    found = ranks.run(2, no_mapping_before_the_commit, str(tmp_path / "good"), bad, deadline_s=25.0)
    assert found[bad].startswith("AttributeError")
    assert f"commit failed on rank {bad}: AttributeError" in found[1 - bad]


def save_momentum_twice(root: str) -> None:
    model = build("fsdp", SHAPE)
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5), model)
    for number in range(2):
        set_gradients(model, number)
        optimizer.step()
        dcp.save({"optim": optimizer}, checkpoint_id=f"{root}/{number}")


def load_one_each(root: str) -> tuple[str, list[str]]:
    """What a load raises when every rank reads another checkpoint, and what it changed."""
    model = build("fsdp", SHAPE)
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5), model)
    before = snapshot(optimizer, model)
    with pytest.raises(RankFailureError) as refused:
        optimizer.prepare_load(f"{root}/{dist.get_rank()}")
    changes = before.diff(snapshot(optimizer, model))
    optimizer.prepare_load(f"{root}/0").commit()
    return str(refused.value), changes


def test_ranks_that_read_checkpoints_which_differ_in_tensors_only_are_told(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_momentum_twice, str(tmp_path))
    for text, changes in ranks.run(2, load_one_each, str(tmp_path)):
        assert "prepare_load: ranks disagree: they read different checkpoints, were given different options" in text
        assert "alike are rank 0 / rank 1." in text
        assert changes == []


class Trainers(torch.optim.SGD):
    """An optimizer of a trainer's, which hands on to the one that it was given."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def save_unwrapped(path: str) -> tuple[list[tuple[str, str]], list[str], int]:
    """What became of two saves and a load of an optimizer without its wrapper, what they changed, and a good save."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, STEPS_SAVED)
    (inner,) = optimizer.optimizers
    before = snapshot(optimizer, model)
    said: list[tuple[str, str]] = []
    on_one = optimizer if dist.get_rank() == 0 else inner
    for call, given in ((shardopt.save, inner), (shardopt.save, on_one), (shardopt.load, inner)):
        try:
            call({"model": model, "optim": given}, path)
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    changes = before.diff(snapshot(optimizer, model))
    shardopt.save({"optim": Trainers(optimizer)}, path)
    return said, changes, len(optimizer.prepare_load(path).report.restored)


def test_an_optimizer_without_its_wrapper_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    refusal = "'optim' is a AdamW of sharded parameters, without its wrapper"
    seen = ranks.run(2, save_unwrapped, str(tmp_path), deadline_s=30.0)
    for said, changes, restored in seen:
        assert all(refusal in text for _, text in said)
        assert changes == []
        assert restored > 0
    # Whose own mistake it is gets the plain error.
    assert [kind for kind, _ in seen[0][0]] == ["TypeError", "RankFailureError", "TypeError"]
    assert [kind for kind, _ in seen[1][0]] == ["TypeError"] * 3
    assert "failed on rank 1" in seen[0][0][1][1]
