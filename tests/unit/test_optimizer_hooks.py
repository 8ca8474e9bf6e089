"""Every hook torch knows fires once, at its time, and sees the user's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardopt import ShardedStateOptimizer


class Log:
    """Who called, with which parameters in the groups, and the weight at that time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[tuple[Any, ...]] = []

    def hook(self, name: str) -> Any:
        def called(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
            params = list(self.model.parameters())
            shown = [param for group in optimizer.param_groups for param in group["params"]]
            users = all(map(lambda one, other: one is other, shown, params)) and len(shown) == len(params)
            known = all(any(key is param for param in params) for key in optimizer.state)
            self.calls.append((name, type(optimizer).__name__, users and known, float(_local(params[0]).sum())))

        return called

    def times(self) -> list[tuple[Any, ...]]:
        return [call[:2] for call in self.calls]


def _local(param: torch.Tensor) -> torch.Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def linear(mesh: DeviceMesh | None = None) -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.fixture(params=["plain", "dtensor"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return linear(request.getfixturevalue("mesh") if request.param == "dtensor" else None)


@pytest.fixture
def world(model: nn.Module) -> Iterator[Log]:
    """Global hooks, removed again."""
    log = Log(model)
    handles = [
        register_optimizer_step_pre_hook(log.hook("global pre")),
        register_optimizer_step_post_hook(log.hook("global post")),
    ]
    yield log
    for handle in handles:
        handle.remove()


def test_step_hooks_fire_once_in_order_and_see_the_users_parameters(model: nn.Module, world: Log) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = ShardedStateOptimizer(inner, model)
    inner.register_step_pre_hook(world.hook("inner pre"))
    inner.register_step_post_hook(world.hook("inner post"))
    optimizer.register_step_pre_hook(world.hook("pre"))
    optimizer.register_step_post_hook(world.hook("post"))
    for _ in range(2):
        step(optimizer, model)
    ours, its = "ShardedStateOptimizer", "SGD"
    once = [
        ("global pre", ours),
        ("pre", ours),
        ("inner pre", its),
        ("inner post", its),
        ("post", ours),
        ("global post", ours),
    ]
    assert world.times() == once * 2
    assert all(users for _, _, users, _ in world.calls)
    # Weight 2 before the first step, 1 after it; the second step has momentum.
    assert [weight for *_, weight in world.calls[:6]] == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0]


def test_hooks_fire_once_under_a_scheduler_that_was_built_on_the_inner_optimizer(model: nn.Module, world: Log) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = ConstantLR(inner, factor=0.5, total_iters=1)
    optimizer = ShardedStateOptimizer(inner, model)
    inner.register_step_pre_hook(world.hook("inner pre"))
    inner.register_step_post_hook(world.hook("inner post"))
    step(optimizer, model)
    assert [name for name, *_ in world.calls] == ["global pre", "inner pre", "inner post", "global post"]
    assert all(users for _, _, users, _ in world.calls)
    # It warns when it believes that the optimizer has not stepped.
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_step_patched_on_the_inner_optimizer_is_called(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    calls = []
    original = inner.step
    inner.step = lambda closure=None: calls.append(1) or original(closure)  # type: ignore[method-assign]
    optimizer = ShardedStateOptimizer(inner, model)
    step(optimizer, model)
    assert calls == [1]
    assert _local(model.weight).sum() == 1.0


@pytest.mark.parametrize("closure", [None, lambda: torch.tensor(1.0)], ids=["none", "closure"])
def test_inner_hooks_get_the_arguments_that_torch_gives_them(closure: Any) -> None:
    seen = []
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    arguments = () if closure is None else (closure,)
    for hooked in (inner.register_step_pre_hook, inner.register_step_post_hook):
        hooked(lambda *given: seen.append(given))
    inner.step(*arguments)
    bare = seen.copy()
    seen.clear()
    ShardedStateOptimizer(inner, model).step(*arguments)
    assert seen == bare == [(inner, (inner, *arguments), {})] * 2


def test_a_hook_that_replaces_the_arguments_is_obeyed_on_the_wrapper_and_refused_inside() -> None:
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = ShardedStateOptimizer(inner, model)
    handle = optimizer.register_step_pre_hook(lambda one, args, kwargs: ((one, lambda: 5), {}))
    assert optimizer.step() == 5
    handle.remove()
    inner.register_step_pre_hook(lambda one, args, kwargs: (args, kwargs))
    with pytest.raises(
        TypeError, match="of the wrapped SGD returned new arguments; register.* on the ShardedStateOptimizer"
    ):
        optimizer.step()


def test_a_hook_that_raises_before_the_update_leaves_everything(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = ShardedStateOptimizer(inner, model)

    def refuse(*_: Any) -> None:
        raise KeyError("not yet")

    handle = inner.register_step_pre_hook(refuse)
    with pytest.raises(KeyError, match="not yet"):
        step(optimizer, model)
    assert _local(model.weight).sum() == 2.0
    handle.remove()
    step(optimizer, model)
    assert _local(model.weight).sum() == 1.0


def test_state_dict_hooks() -> None:
    model = linear()
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model)
    seen: list[tuple[str, Any]] = []

    def post(one: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(("post", set(state_dict)))
        return {**state_dict, "extra": 1}

    optimizer.register_state_dict_pre_hook(lambda one: seen.append(("pre", one)))
    optimizer.register_state_dict_post_hook(post)
    optimizer.register_state_dict_post_hook(lambda one, state_dict: seen.append(("last", state_dict["extra"])))
    assert set(optimizer.state_dict()) == {"state.weight.momentum_buffer", "manifest", "extra"}
    assert seen == [("pre", optimizer), ("post", {"state.weight.momentum_buffer", "manifest"}), ("last", 1)]


def test_load_state_dict_hooks() -> None:
    model = linear()
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    saved = optimizer.state_dict()
    wrapped_once = {"inside": saved, "other": 1}
    seen: list[tuple[str, Any]] = []

    def pre(one: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(("pre", set(state_dict)))
        return state_dict.pop("inside")

    optimizer.register_load_state_dict_pre_hook(pre)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(("post", one.param_groups[0]["lr"])))
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.load_state_dict(wrapped_once)
    assert seen == [("pre", {"inside", "other"}), ("post", 0.5)]
    # The hook had a copy, as torch gives it one.
    assert set(wrapped_once) == {"inside", "other"}


def test_hooks_can_be_removed_and_prepended() -> None:
    model = linear()
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    seen: list[int] = []
    removed = optimizer.register_state_dict_pre_hook(lambda one: seen.append(1))
    optimizer.register_state_dict_pre_hook(lambda one: seen.append(2))
    optimizer.register_state_dict_pre_hook(lambda one: seen.append(3), prepend=True)
    removed.remove()
    optimizer.state_dict()
    assert seen == [3, 2]


@pytest.mark.parametrize("how", ["load_state_dict", "prepare_load"])
def test_hooks_after_a_load_are_those_of_all_and_come_when_all_of_it_is_there(how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    inners = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in model]
    optimizer = ShardedStateOptimizer(inners, model)
    saved = optimizer.state_dict()
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    seen: list[tuple[Any, list[float]]] = []
    for one in (*inners, optimizer):
        one.register_load_state_dict_post_hook(
            lambda one: seen.append((one, [group["lr"] for group in optimizer.param_groups]))
        )
    if how == "load_state_dict":
        optimizer.load_state_dict(saved)
    else:
        optimizer.prepare_load(saved).commit()
    # What was saved is live memory: the values of now.
    assert seen == [(one, [0.5, 0.5]) for one in (*inners, optimizer)]
