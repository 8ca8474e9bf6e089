"""The wrapper is a torch.optim.Optimizer in every way that code written for one relies on."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt
from shardopt import ShardedStateOptimizer
from tests.support.rules import Awkward, bits, groups, state, train, weights

# The constructor takes an optimizer where torch's takes parameters; copying and pickling are refused.
NOT_TORCHS = {"__init__", "__getstate__", "__setstate__"}


def overridden() -> dict[str, tuple[Any, Any]]:
    """Name -> (ours, torch's) for every method of torch.optim.Optimizer that the wrapper defines itself."""
    found = {}
    for name, ours in vars(ShardedStateOptimizer).items():
        torchs = inspect.getattr_static(torch.optim.Optimizer, name, None)
        if inspect.isfunction(ours) and inspect.isfunction(torchs) and name not in NOT_TORCHS:
            found[name] = (ours, torchs)
    return found


def wrap(model: nn.Module, **options: Any) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), **options), model)


def test_the_overridden_methods_are_found() -> None:
    expected = {"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "__repr__"}
    assert expected <= set(overridden())


@pytest.mark.parametrize("name", sorted(overridden()))
def test_an_overridden_method_takes_what_torchs_takes(name: str) -> None:
    ours, torchs = (
        [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in inspect.signature(one).parameters.values()
        ]
        for one in overridden()[name]
    )
    assert ours == torchs


def test_every_public_name_resolves() -> None:
    # Few, so that they can be known; ten of them are errors.
    assert len(set(shardopt.__all__)) == len(shardopt.__all__) <= 26
    for name in shardopt.__all__:
        assert getattr(importlib.import_module("shardopt"), name) is not None
    assert {"ShardedStateOptimizer", "LoadError", "__version__"} <= set(shardopt.__all__)


def test_it_is_a_torch_optimizer() -> None:
    model = Awkward()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = ShardedStateOptimizer(inner, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizers == [inner]
    assert optimizer.defaults is inner.defaults


def test_groups_and_state_are_the_inner_optimizers_own_objects() -> None:
    model = Awkward()
    inner = torch.optim.AdamW(model.parameters())
    param_groups, group, inner_state = inner.param_groups, inner.param_groups[0], inner.state
    params = group["params"]
    optimizer = ShardedStateOptimizer(inner, model)

    def same() -> bool:
        return (
            optimizer.param_groups is inner.param_groups is param_groups
            and optimizer.param_groups[0] is group
            and group["params"] is params
            and optimizer.state is inner.state is inner_state
            and all(map(lambda one, other: one is other, params, model.parameters()))
        )

    assert same()
    train(optimizer, model, range(2))
    assert same()
    optimizer.load_state_dict(optimizer.state_dict())
    assert same()
    optimizer.prepare_load(optimizer.state_dict()).commit()
    train(optimizer, model, range(2, 3))
    assert same()


def sharded(mesh: DeviceMesh) -> nn.Module:
    """A model under fully_shard: its parameters are DTensors."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 3)).square().sum().backward()


def users_parameters(optimizer: ShardedStateOptimizer, model: nn.Module) -> bool:
    """Whether groups and state hold the model's own DTensors, and state nothing but plain tensors."""
    params = list(model.parameters())
    shown = [param for group in optimizer.param_groups for param in group["params"]]
    return (
        [id(param) for param in shown] == [id(param) for param in params]
        and {id(key) for key in optimizer.state} <= {id(param) for param in params}
        and not any(isinstance(v, DTensor) for entries in optimizer.state.values() for v in entries.values())
    )


def test_groups_and_state_hold_the_users_parameters_between_steps(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    inner = torch.optim.AdamW(model.parameters())
    params = inner.param_groups[0]["params"]
    optimizer = ShardedStateOptimizer(inner, model)
    shown: list[list[type]] = []
    group_step = inner._init_group
    inner._init_group = lambda group, *rest: shown.append([*map(type, group["params"])]) or group_step(group, *rest)
    assert users_parameters(optimizer, model)
    for _ in range(2):
        backward(model)
        optimizer.step()
        assert users_parameters(optimizer, model)
        assert len(optimizer.state) == 4
        assert inner.param_groups[0]["params"] is params
        assert all(isinstance(param.grad, DTensor) for param in params)
    # In the step the optimizer saw plain leaves, else this test shows nothing.
    assert shown == [[nn.Parameter] * 4] * 2


def test_groups_and_state_hold_the_users_parameters_after_a_step_that_raised(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    inner = torch.optim.AdamW(model.parameters())
    optimizer = ShardedStateOptimizer(inner, model)
    inner_state = inner.state
    backward(model)
    optimizer.step()

    def out_of_memory(group: dict[str, Any], *rest: Any) -> None:
        inner.state[group["params"][0]]["seen"] = torch.zeros(())
        raise MemoryError("in the middle")

    inner._init_group = out_of_memory
    with pytest.raises(MemoryError, match="in the middle"):
        optimizer.step()
    assert users_parameters(optimizer, model)
    assert inner.state is inner_state
    assert isinstance(inner_state, defaultdict)
    # What the optimizer had put into its state before it raised is under the user's parameter.
    assert "seen" in inner_state[next(model.parameters())]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model = Awkward()
    optimizer = wrap(model)
    model.give_gradients(0)
    optimizer.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert all(param.grad is None for param in model.parameters())
    else:
        assert all(not param.grad.any() for name, param in model.named_parameters() if name != "idle")
        assert model.matrix.grad is not None


def test_zero_grad_leaves_none_by_default() -> None:
    model = Awkward()
    optimizer = wrap(model)
    model.give_gradients(0)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_A3_constructing_changes_nothing() -> None:
    model, other = Awkward(), Awkward()
    bare, inner = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    before, generator = vars(inner).copy(), torch.random.get_rng_state()
    group = dict(inner.param_groups[0])
    ShardedStateOptimizer(inner, other)
    assert all(vars(inner)[key] is value for key, value in before.items())
    assert vars(inner).keys() == before.keys()
    assert all(inner.param_groups[0][key] is value for key, value in group.items())
    assert inner.param_groups[0].keys() == group.keys()
    assert not inner.state
    assert weights(other) == weights(model)
    assert all(param.grad is None for param in other.parameters())
    assert torch.equal(torch.random.get_rng_state(), generator)
    train(bare, model, range(1))
    train(ShardedStateOptimizer(inner, other), other, range(1))
    assert weights(other) == weights(model)


@pytest.mark.parametrize("look", [repr, ShardedStateOptimizer.explain, ShardedStateOptimizer.sharded_state])
@pytest.mark.parametrize("steps", [0, 2])
def test_looking_has_no_effects(look: Any, steps: int) -> None:
    model = Awkward()
    optimizer = wrap(model)
    train(optimizer, model, range(steps))
    model.give_gradients(steps)
    gradients = {name: param.grad for name, param in model.named_parameters()}

    def everything() -> Any:
        live = [(id(key), [(name, id(value)) for name, value in v.items()]) for key, v in optimizer.state.items()]
        return weights(model), state(optimizer, model), groups(optimizer), live, bits(torch.random.get_rng_state())

    before = everything()
    look(optimizer)
    assert everything() == before
    assert all(param.grad is gradients[name] for name, param in model.named_parameters())


def test_repr_and_explain_say_what_and_why() -> None:
    model = Awkward()
    optimizer = wrap(model, lr=0.25)
    assert "AdamW: compute='local' because torch.optim.adamw.AdamW is element-wise" in optimizer.explain()
    assert "7 parameters over one rank; consensus='every-step'" in optimizer.explain()
    assert repr(optimizer).startswith("ShardedStateOptimizer(")
    assert "lr: 0.25" in repr(optimizer)


def test_sharded_state_is_live_memory() -> None:
    model = Awkward()
    optimizer = wrap(model)
    train(optimizer, model, range(1))
    found = optimizer.sharded_state()
    assert set(found) == {k for k in optimizer.state_dict() if k.startswith("state.") and k.split(".")[1] != "idle"}
    assert found["state.vector.exp_avg"] is optimizer.state[model.vector]["exp_avg"]


@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, pickle.dumps, lambda one: one.__setstate__({}), lambda one: one.__getstate__()]
)
def test_copy_and_pickle_are_refused_with_the_reason(copier: Any) -> None:
    optimizer = wrap(Awkward())
    with pytest.raises(TypeError, match=r"belongs to live parameters and to a scope of ranks. Save it with dcp\.save"):
        copier(optimizer)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"consensus": "sometimes"}, ValueError, "consensus='sometimes' is unknown; expected one of 'every-step'"),
        ({"vote_timeout": 0.0}, ValueError, "vote_timeout=0.0 must be a positive number of seconds"),
        ({"compute": "fast"}, shardopt.PresentationError, "compute='fast' is unknown; expected one of 'auto', 'local'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    model = Awkward()
    with pytest.raises(error, match=sentence):
        ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model, **arguments)


def test_what_is_no_optimizer_is_refused() -> None:
    model = Awkward()
    optimizer = wrap(model)
    with pytest.raises(TypeError, match="wrapped already"):
        ShardedStateOptimizer(optimizer, model)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Awkward"):
        ShardedStateOptimizer([model], model)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no optimizer was given"):
        ShardedStateOptimizer([], model)


class OwnRule(torch.optim.SGD):
    """A subclass may change the rule, so it is not taken for SGD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """With gradients of mean zero."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad -= param.grad.mean() * 0.0
        return super().step(closure)


def test_a_class_that_is_not_element_wise_runs_only_when_asked() -> None:
    model, other = Awkward(), Awkward()
    inner = OwnRule(model.parameters(), lr=0.5)
    with pytest.raises(shardopt.PresentationError, match=r"OwnRule uses mean.*compute='owner', or.*'dtensor'"):
        ShardedStateOptimizer(inner, model, compute="local")
    assert "compute='owner'" in ShardedStateOptimizer(inner, model).explain()
    optimizer = ShardedStateOptimizer(inner, model, compute="dtensor")
    train(optimizer, model, range(2))
    train(torch.optim.SGD(other.parameters(), lr=0.5), other, range(2))
    assert weights(model) == weights(other)


COLLECTIVES = {
    "step": lambda wrapper: wrapper.step(),
    "state_dict": lambda wrapper: wrapper.state_dict(),
    "load_state_dict": lambda wrapper: wrapper.load_state_dict({}),
    "prepare_load": lambda wrapper: wrapper.prepare_load({}),
    "add_param_group": lambda wrapper: wrapper.add_param_group({}),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_dynamo_does_not_trace_what_votes(name: str) -> None:
    wrapper = wrap(nn.Linear(2, 2))

    def compiled(x: torch.Tensor) -> torch.Tensor:
        COLLECTIVES[name](wrapper)
        return x + 1

    # A vote that Dynamo traced would be part of the graph, with its answer baked in.
    with pytest.raises(torch._dynamo.exc.Unsupported, match="should not be traced|skip calling"):
        torch.compile(compiled, backend="eager", fullgraph=True)(torch.zeros(1))
