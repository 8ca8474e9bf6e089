"""torch.amp.GradScaler on the wrapper is GradScaler on the bare optimizer, also when gradients overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import ShardedStateOptimizer
from tests.support.rules import state, weights

CLASSES = [torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
EACH = [
    pytest.mark.parametrize("cls", CLASSES),
    pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"]),
]
OVERFLOW_AT = 2


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 70), nn.Linear(70, 2))


def build(cls: type[torch.optim.Optimizer], params: Any, fused: bool) -> torch.optim.Optimizer:
    momentum = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    return cls(params, lr=0.125, fused=fused, **momentum)


def train(optimizer: torch.optim.Optimizer, model: nn.Module, *, unscale: bool) -> list[float]:
    """Six steps of which one overflows; returns the scales."""
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        loss = model(torch.full((2, 3), 0.5 + step)).square().mean()
        scaler.scale(loss).backward()
        if step == OVERFLOW_AT:
            model[1].bias.grad[0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert not amp_attributes(optimizer)
        assert not any(amp_attributes(one) for one in getattr(optimizer, "optimizers", []))
        optimizer.zero_grad()
    return scales


def amp_attributes(optimizer: torch.optim.Optimizer) -> set[str]:
    return {"grad_scale", "found_inf"} & vars(optimizer).keys()


def parametrized(function: Any) -> Any:
    for mark in EACH:
        function = mark(function)
    return function


@parametrized
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_six_steps_with_an_overflow_are_those_of_the_bare_optimizer(cls: Any, fused: bool, unscale: bool) -> None:
    model, other = linear(), linear()
    bare = build(cls, model.parameters(), fused)
    inner = build(cls, other.parameters(), fused)
    optimizer = ShardedStateOptimizer(inner, other)
    expected = train(bare, model, unscale=unscale)
    assert train(optimizer, other, unscale=unscale) == expected
    # The scale was halved once and grew otherwise, so the overflow was seen.
    assert expected == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
    assert weights(other) == weights(model)
    assert state(optimizer, other) == state(bare, model)


@parametrized
def test_shards_are_stepped_as_the_bare_optimizer_would(cls: Any, fused: bool, mesh: DeviceMesh) -> None:
    model, other = linear(), linear()
    fully_shard(other, mesh=mesh)
    train(build(cls, model.parameters(), fused), model, unscale=False)
    train(ShardedStateOptimizer(build(cls, other.parameters(), fused), other), other, unscale=False)
    for param, sharded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), param)


def test_an_overflow_step_changes_nothing() -> None:
    model = linear()
    optimizer = ShardedStateOptimizer(build(torch.optim.AdamW, model.parameters(), True), model)
    before = weights(model)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    model[0].weight.grad[0, 0] = float("nan")
    scaler.step(optimizer)
    assert weights(model) == before


def test_several_optimizers_of_which_one_is_fused() -> None:
    model, other = linear(), linear()
    bare = [build(torch.optim.AdamW, model[0].parameters(), True), build(torch.optim.SGD, model[1].parameters(), False)]
    inner = [
        build(torch.optim.AdamW, other[0].parameters(), True),
        build(torch.optim.SGD, other[1].parameters(), False),
    ]
    optimizer = ShardedStateOptimizer(inner, other)
    scaler, its = GradScaler("cpu", init_scale=1024.0), GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        its.scale(model(torch.full((2, 3), 0.5 + step)).square().mean()).backward()
        scaler.scale(other(torch.full((2, 3), 0.5 + step)).square().mean()).backward()
        # The bare ones are asked one by one and each unscales its own; without an overflow that is the same.
        for one in bare:
            its.unscale_(one)
            its.step(one)
        its.update()
        scaler.step(optimizer)
        scaler.update()
        for one in [*bare, optimizer]:
            one.zero_grad()
    assert weights(other) == weights(model)


@pytest.mark.parametrize("where", ["update", "before"])
def test_a_step_that_raises_leaves_no_scale_behind(where: str) -> None:
    model = linear()
    inner = build(torch.optim.AdamW, model.parameters(), True)
    optimizer = ShardedStateOptimizer(inner, model)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()

    def fail(*_: Any) -> None:
        raise OSError("no")

    if where == "update":
        inner._init_group = fail
    else:
        inner.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no"):
        scaler.step(optimizer)
    assert not amp_attributes(inner)
    # A scale left here would be multiplied with the next one, and that update silently be off by a factor of 1024.
    assert not amp_attributes(optimizer)


@pytest.mark.parametrize("scaler_class", [GradScaler, shardopt.GradScaler])
@pytest.mark.parametrize("where", ["inner", "outer"])
def test_pre_hooks_see_unscaled_gradients_as_without_the_wrapper(scaler_class: Any, where: str) -> None:
    seen: list[list[float]] = []

    def run(wrap: bool, scaler: Any) -> Any:
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
        optimizer: Any = ShardedStateOptimizer(inner, model) if wrap else inner
        norms: list[float] = []
        hooked = optimizer if where == "outer" or not wrap else inner
        hooked.register_step_pre_hook(
            lambda *_: norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)))
        )
        for step in range(3):
            scaler.scale(model(torch.full((2, 3), 0.5 + step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        seen.append(norms)
        return weights(model)

    bare = run(False, GradScaler("cpu", init_scale=1024.0))
    assert run(True, scaler_class("cpu", init_scale=1024.0)) == bare
    assert seen[0] == seen[1]


def test_a_step_that_fails_in_a_hook_leaves_gradients_as_they_were() -> None:
    model = linear()
    optimizer = ShardedStateOptimizer(build(torch.optim.AdamW, model.parameters(), False), model)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    before = [param.grad.clone() for param in model.parameters()]

    def fail(*_: Any) -> None:
        raise OSError("no")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, (param.grad for param in model.parameters())))
    handle.remove()
    optimizer.step()


def test_the_default_dtype_is_no_matter_to_the_verdict() -> None:
    model = linear()
    optimizer = ShardedStateOptimizer(build(torch.optim.AdamW, model.parameters(), False), model)
    torch.set_default_dtype(torch.float64)
    try:
        for scaler in (GradScaler("cpu", init_scale=1024.0), shardopt.GradScaler("cpu", init_scale=1024.0)):
            scaler.scale(torch.ones(1))
            for param in model.parameters():
                param.grad = torch.full_like(param, 1024.0)
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[model[0].weight]["step"] == 2
