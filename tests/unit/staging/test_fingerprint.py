"""A prepared load notices when the optimizer has moved, and not when the weights are loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardopt import ShardedStateOptimizer, StaleLoadError
from tests.support.snapshot import snapshot

Case = tuple[ShardedStateOptimizer, nn.Module]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.late = nn.Parameter(torch.ones(2))


def stepped(mesh: DeviceMesh | None = None) -> Case:
    model = Two()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = ShardedStateOptimizer(
        torch.optim.AdamW(model.layer.parameters(), lr=torch.tensor(0.5), fused=True), model
    )
    backward(model)
    optimizer.step()
    return optimizer, model


def backward(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def step(optimizer: ShardedStateOptimizer, model: nn.Module) -> None:
    backward(model)
    optimizer.step()


def inner_step(optimizer: ShardedStateOptimizer, model: nn.Module) -> None:
    backward(model)
    optimizer.optimizers[0].step()


def assign_data(optimizer: ShardedStateOptimizer, model: nn.Module) -> None:
    model.layer.weight.data = model.layer.weight.data.clone()


def replace_parameter(optimizer: ShardedStateOptimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, 3))


MOVES: dict[str, tuple[Callable[..., Any], str]] = {
    "step": (step, "the optimizer stepped"),
    "prepare": (lambda one, _: one.prepare_load(one.state_dict()), "prepared another load"),
    "load": (lambda one, _: one.load_state_dict(one.state_dict()), "the optimizer stepped, loaded"),
    "add_param_group": (lambda one, model: one.add_param_group({"params": [model.late]}), "got a new parameter group"),
    "data": (assign_data, "a parameter was given other data"),
    "replaced parameter": (replace_parameter, "a parameter group was added, removed or refilled"),
    "removed group": (lambda one, _: one.param_groups.clear(), "a parameter group was added, removed or refilled"),
    "group": (lambda one, _: one.optimizers[0].param_groups.append({"params": []}), "a parameter group was added"),
    "state in place": (lambda one, m: one.state[m.layer.bias]["exp_avg"].zero_(), "optimizer state was changed"),
    "state": (lambda one, m: one.state[m.layer.bias].update(exp_avg=torch.zeros(2)), "optimizer state was changed"),
    "new entry": (lambda one, m: one.state[m.layer.bias].update(new=1), "optimizer state was changed"),
    "cleared state": (lambda one, _: one.state.clear(), "optimizer state was changed"),
}


@pytest.mark.parametrize("move", MOVES)
def test_commit_refuses_after_a_move(move: str) -> None:
    optimizer, model = stepped()
    prepared = optimizer.prepare_load(optimizer.state_dict())
    change, reason = MOVES[move]
    change(optimizer, model)
    before = snapshot(optimizer, model)
    with pytest.raises(StaleLoadError, match=f"{reason}.*after the load was prepared; nothing was changed. Prepare it"):
        prepared.commit()
    assert before.diff(snapshot(optimizer, model)) == []


def test_commit_refuses_after_the_model_has_got_another_parameter() -> None:
    optimizer, model = stepped()
    prepared = optimizer.prepare_load(optimizer.state_dict())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    before = snapshot(optimizer, model)
    with pytest.raises(StaleLoadError, match=r"(?s)nothing was changed: .*layer\.weight"):
        prepared.commit()
    assert before.diff(snapshot(optimizer, model)) == []


@pytest.mark.parametrize("move", ["data", "state in place"])
def test_commit_refuses_after_a_move_of_dtensors(move: str, mesh: DeviceMesh) -> None:
    optimizer, model = stepped(mesh)
    prepared = optimizer.prepare_load(optimizer.state_dict())
    change, reason = MOVES[move]
    change(optimizer, model)
    with pytest.raises(StaleLoadError, match=reason):
        prepared.commit()


def test_a_step_of_the_inner_optimizer_is_seen_by_its_state() -> None:
    optimizer, model = stepped()
    prepared = optimizer.prepare_load(optimizer.state_dict())
    inner_step(optimizer, model)
    with pytest.raises(StaleLoadError, match="optimizer state was changed"):
        prepared.commit()


def load_weights(optimizer: ShardedStateOptimizer, model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()})


HARMLESS: dict[str, Callable[..., Any]] = {
    "nothing": lambda one, _: None,
    "weights": load_weights,
    "gradients": lambda one, model: backward(model),
    "zero_grad": lambda one, _: one.zero_grad(),
    "state_dict": lambda one, _: one.state_dict(),
    "looking": lambda one, _: (repr(one), one.explain(), one.sharded_state()),
    "asking for state": lambda one, model: one.state.get(model.late),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "dtensor"])
@pytest.mark.parametrize("use", HARMLESS)
def test_commit_succeeds_when_untouched(use: str, sharded: bool, request: pytest.FixtureRequest) -> None:
    optimizer, model = stepped(request.getfixturevalue("mesh") if sharded else None)
    prepared = optimizer.prepare_load(optimizer.state_dict())
    HARMLESS[use](optimizer, model)
    prepared.commit()


def test_a_load_is_committed_once() -> None:
    optimizer, _ = stepped()
    prepared = optimizer.prepare_load(optimizer.state_dict())
    prepared.commit()
    with pytest.raises(StaleLoadError, match="this load has been committed already; prepare it again"):
        prepared.commit()
