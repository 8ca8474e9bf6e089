"""``add_param_group``, and several optimizers behind one face."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import StepLR

from shardopt import NamingError, PresentationError, ShardedStateOptimizer
from tests.support.rules import state, weights
from tests.support.snapshot import snapshot

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def run(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


GIVEN: dict[str, Any] = {
    "list": lambda model: list(model[1].parameters()),
    "generator": lambda model: model[1].parameters(),
    "tuple": lambda model: tuple(model[1].parameters()),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_new_group_is_trained_named_and_saved(given: str, tmp_path: Path) -> None:
    model, other = two_layers(), two_layers()
    bare = torch.optim.AdamW(model[0].parameters())
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(other[0].parameters()), other)
    run(bare, model)
    run(optimizer, other)
    bare.add_param_group({"params": GIVEN[given](model), "lr": 0.125})
    optimizer.add_param_group({"params": GIVEN[given](other), "lr": 0.125})
    run(bare, model)
    run(optimizer, other)
    assert weights(other) == weights(model)
    assert state(optimizer, other) == state(bare, model)
    assert optimizer.param_groups[1]["params"] == list(other[1].parameters())
    assert {"state.1.weight.exp_avg", "state.1.bias.exp_avg_sq"} <= set(optimizer.state_dict())
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    third = two_layers()
    groups = [{"params": third[0].parameters()}, {"params": third[1].parameters()}]
    loaded = ShardedStateOptimizer(torch.optim.AdamW(groups), third)
    dcp.load({"optim": loaded}, checkpoint_id=tmp_path)
    assert state(loaded, third) == state(bare, model)
    assert [group["lr"] for group in loaded.param_groups] == [0.001, 0.125]


def test_a_new_group_may_be_one_tensor_or_named() -> None:
    model = two_layers()
    optimizer = ShardedStateOptimizer(torch.optim.SGD([("0.weight", model[0].weight)], lr=0.5, momentum=0.5), model)
    optimizer.add_param_group({"params": model[1].named_parameters(prefix="1")})
    assert optimizer.param_groups[1]["param_names"] == ["1.weight", "1.bias"]
    run(optimizer, model)
    assert set(state(optimizer, model)) == {"0.weight", "1.weight", "1.bias"}
    plain = ShardedStateOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.5, momentum=0.5), model)
    plain.add_param_group({"params": model[1].bias})
    assert "state.1.bias.momentum_buffer" in plain.state_dict()


def refused(
    optimizer: ShardedStateOptimizer, model: nn.Module, group: dict[str, Any], error: Any, sentence: str
) -> None:
    """Adding the group raises; nothing has changed, and training goes on as it would have."""
    keys, before = set(optimizer.state_dict()), snapshot(optimizer, model)
    with pytest.raises(error, match=sentence):
        optimizer.add_param_group(group)
    assert before.diff(snapshot(optimizer, model)) == []
    assert set(optimizer.state_dict()) == keys
    run(optimizer, model, steps=1)


def test_a_group_that_cannot_be_added_changes_nothing() -> None:
    model = two_layers()
    first = model[0].weight
    optimizer = ShardedStateOptimizer(torch.optim.AdamW([first]), model)
    run(optimizer, model)
    stranger = nn.Parameter(torch.ones(2))
    new = model[1].weight
    refused(optimizer, model, {"params": [new, stranger]}, NamingError, r"group 1 position 1 of shape \(2,\)")
    refused(
        optimizer, model, {"params": [new, first]}, NamingError, "0.weight.*may be in one group of one optimizer only"
    )
    refused(
        optimizer, model, {"params": [new, new]}, NamingError, "1.weight.*may be in one group of one optimizer only"
    )
    refused(optimizer, model, {"params": {new}}, TypeError, "an order that is the same on all ranks")
    refused(optimizer, model, {"lr": 0.5}, KeyError, "params")
    refused(optimizer, model, {"params": [("1.weight", new), model[1].bias]}, ValueError, "with/without names")
    optimizer.add_param_group({"params": [new]})
    assert len(optimizer.param_groups) == 2


def test_groups_changed_behind_its_back_are_not_saved_loaded_or_added_to() -> None:
    model = two_layers()
    inner = torch.optim.AdamW([{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias], "lr": 0.25}])
    optimizer = ShardedStateOptimizer(inner, model)
    saved = optimizer.state_dict()
    first = inner.param_groups.pop(0)
    uses = {
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),  # before the step, which outdates it
        "step": optimizer.step,
        "add_param_group": lambda: optimizer.add_param_group({"params": [model[1].bias]}),
    }
    for use in uses.values():
        with pytest.raises(
            PresentationError, match="groups of AdamW no longer hold the parameters they were wrapped with"
        ):
            use()
    inner.param_groups.insert(0, first)
    inner.add_param_group({"params": [model[1].weight]})
    for use in uses.values():
        with pytest.raises(PresentationError, match=r"add parameters through ShardedStateOptimizer\.add_param_group"):
            use()
    del inner.param_groups[2]
    for use in uses.values():
        use()


def several(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.25}]),
        torch.optim.SGD(model[1].parameters(), lr=0.5, momentum=0.9),
    ]


def test_several_optimizers_are_joined() -> None:
    model = two_layers()
    first, second = inners = several(model)
    optimizer = ShardedStateOptimizer(inners, model)
    assert optimizer.optimizers == inners
    joined = optimizer.param_groups
    assert joined is optimizer.param_groups
    assert [id(group) for group in joined] == [id(g) for one in inners for g in one.param_groups]
    assert optimizer.defaults == {key: first.defaults[key] for key in first.defaults if key in second.defaults}
    run(optimizer, model)
    assert optimizer.explain().splitlines()[:2] == [
        f"{type(one).__name__}: compute='local' because torch.optim.{type(one).__name__.lower()}.{type(one).__name__} "
        "is element-wise: a shard's update needs only the shard"
        for one in inners
    ]


def test_the_joined_state_is_the_optimizers_own() -> None:
    model = two_layers()
    first, second = inners = several(model)
    optimizer = ShardedStateOptimizer(inners, model)
    joined = optimizer.state
    assert not joined
    run(optimizer, model)
    assert joined is optimizer.state
    assert len(joined) == 4
    in_order = [model[0].weight, model[0].bias, model[1].weight, model[1].bias]
    assert all(map(lambda one, other: one is other, joined, in_order))
    assert joined[model[0].weight] is first.state[model[0].weight]
    assert joined[model[1].bias] is second.state[model[1].bias]
    assert model[1].bias in joined
    del joined[model[1].bias]
    assert model[1].bias not in second.state
    joined[model[1].bias] = entries = {"momentum_buffer": torch.zeros(2)}
    assert second.state[model[1].bias] is entries
    assert nn.Parameter(torch.ones(1)) not in joined
    with pytest.raises(KeyError, match="not a parameter of any of the wrapped optimizers"):
        joined[nn.Parameter(torch.ones(1))]


def each(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, schedulers: Iterable[StepLR]) -> None:
    for _ in range(3):
        model(torch.ones(2, 3)).square().sum().backward()
        for one in optimizers:
            one.step()
        for one in schedulers:
            one.step()
        model.zero_grad()


def test_several_optimizers_train_save_and_load_as_each_would_alone(tmp_path: Path) -> None:
    model, other, third = two_layers(), two_layers(), two_layers()
    bare = several(model)
    optimizer = ShardedStateOptimizer(several(other), other)
    schedules = [StepLR(one, step_size=1, gamma=0.5) for one in bare]
    each(bare, model, schedules)
    each([optimizer], other, [StepLR(optimizer, step_size=1, gamma=0.5)])
    assert weights(other) == weights(model)
    assert [group["lr"] for group in optimizer.param_groups] == [g["lr"] for one in bare for g in one.param_groups]
    dcp.save({"model": other, "optim": optimizer}, checkpoint_id=tmp_path)
    loaded = ShardedStateOptimizer(several(third), third)
    dcp.load({"model": third, "optim": loaded}, checkpoint_id=tmp_path)
    assert state(loaded, third) == {**state(bare[0], model), **state(bare[1], model)}
    run(optimizer, other)
    run(loaded, third)
    assert weights(third) == weights(other)


def test_several_optimizers_must_have_their_own_parameters() -> None:
    model = two_layers()
    inners = [torch.optim.AdamW(model.parameters()), torch.optim.SGD([model[1].bias], lr=0.5)]
    with pytest.raises(NamingError, match=r"'1.bias'.*may be in one group of one optimizer only"):
        ShardedStateOptimizer(inners, model)
    optimizer = ShardedStateOptimizer(several(model), model)
    with pytest.raises(PresentationError, match="add_param_group cannot tell which of several optimizers"):
        optimizer.add_param_group({"params": []})


def test_parameters_may_come_from_several_models() -> None:
    model, head = nn.Linear(3, 4), nn.ModuleDict({"head": nn.Linear(4, 2)})
    inner = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.5, momentum=0.9)
    optimizer = ShardedStateOptimizer(inner, [model, head])
    assert "state.head.weight.momentum_buffer" in optimizer.state_dict()
    assert "state.weight.momentum_buffer" in optimizer.state_dict()
    with pytest.raises(NamingError, match="2 optimizer parameters are in none of the models"):
        ShardedStateOptimizer(inner, model)
