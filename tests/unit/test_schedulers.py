"""Every scheduler of torch drives the wrapper as it drives the bare optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from shardopt import ShardedStateOptimizer
from tests.support.rules import Awkward, bits, weights

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STEPS = 10


def _sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.ConstantLR(optimizer, factor=0.5), lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]
    return lr_scheduler.SequentialLR(optimizer, schedulers=parts, milestones=[4])


def _chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.ChainedScheduler:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


def _halved(epoch: int) -> float:
    return 0.5 ** (epoch / 3)


# How each is made where its arguments have no defaults, or where the defaults do not move lr within ten steps.
MADE: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lr_lambda=_halved),
    "MultiplicativeLR": lambda one: lr_scheduler.MultiplicativeLR(one, lr_lambda=_halved),
    "StepLR": lambda one: lr_scheduler.StepLR(one, step_size=3),
    "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, milestones=[2, 5]),
    "ExponentialLR": lambda one: lr_scheduler.ExponentialLR(one, gamma=0.9),
    "SequentialLR": _sequential,
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, T_max=8),
    "ChainedScheduler": _chained,
    "ReduceLROnPlateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=1),
    "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, base_lr=0.1, max_lr=0.5, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, T_0=4),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, max_lr=0.5, total_steps=STEPS + 1),
    "SWALR": lambda one: SWALR(one, swa_lr=0.05, anneal_epochs=5),
}
CLASSES: dict[str, type] = {
    **{
        name: value
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and value.__module__ == lr_scheduler.__name__
        and issubclass(value, lr_scheduler.LRScheduler)
        and value is not lr_scheduler.LRScheduler
        and not name.startswith("_")
    },
    "SWALR": SWALR,
}
EACH_CLASS = pytest.mark.parametrize("name", sorted(CLASSES))
EACH_KIND = pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])


def make(name: str, optimizer: torch.optim.Optimizer) -> Any:
    scheduler = MADE[name](optimizer) if name in MADE else CLASSES[name](optimizer)
    assert type(scheduler).__name__ == name
    return scheduler


def sgd(model: Awkward, *, tensor_lr: bool = False) -> torch.optim.Optimizer:
    """With momentum, which CyclicLR and OneCycleLR drive too; two groups of different lr."""
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "lr": torch.tensor(0.125) if tensor_lr else 0.125}]
    return torch.optim.SGD(groups, lr=torch.tensor(0.25) if tensor_lr else 0.25, momentum=0.9, foreach=False)


def wrap(model: Awkward, *, tensor_lr: bool = False) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(sgd(model, tensor_lr=tensor_lr), model)


def drive(optimizer: torch.optim.Optimizer, model: Awkward, scheduler: Any, steps: range) -> list[Any]:
    """Trains; returns the groups' values at each step."""
    curve = []
    for step in steps:
        model.give_gradients(step)
        optimizer.step()
        # A loss that stops falling, for the one scheduler that asks.
        scheduler.step(*([max(1.0, 4.0 - step)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        curve.append([{key: bits(group[key]) for key in ("lr", "momentum")} for group in optimizer.param_groups])
    return curve


def test_the_schedulers_are_found() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(CLASSES)
    assert set(MADE) <= set(CLASSES)
    assert len(CLASSES) >= 16


@EACH_CLASS
def test_lr_and_parameters_are_those_of_the_bare_optimizer(name: str) -> None:
    model, other = Awkward(), Awkward()
    bare, optimizer = sgd(model), wrap(other)
    expected = drive(bare, model, make(name, bare), range(STEPS))
    assert drive(optimizer, other, make(name, optimizer), range(STEPS)) == expected
    assert weights(other) == weights(model)
    assert len({str(values) for values in expected}) > 1, "this scheduler did nothing, so the test shows nothing"


@EACH_CLASS
@EACH_KIND
def test_a_scheduler_built_before_a_load_drives_lr_after_it_C6(name: str, tensor_lr: bool, tmp_path: Path) -> None:
    model, other = Awkward(), Awkward(seed=1)
    optimizer, loaded = wrap(model, tensor_lr=tensor_lr), wrap(other, tensor_lr=tensor_lr)
    scheduler, built_before = make(name, optimizer), make(name, loaded)
    drive(optimizer, model, scheduler, range(4))
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path)
    schedule = scheduler.state_dict()
    lrs = [group["lr"] for group in loaded.param_groups]
    dcp.load({"model": other, "optim": loaded}, checkpoint_id=tmp_path)
    built_before.load_state_dict(schedule)
    if tensor_lr:
        assert all(group["lr"] is lr for group, lr in zip(loaded.param_groups, lrs, strict=True))
    expected = drive(optimizer, model, scheduler, range(4, STEPS))
    assert drive(loaded, other, built_before, range(4, STEPS)) == expected
    assert weights(other) == weights(model)


def test_a_scheduler_on_the_inner_optimizer_drives_the_wrapper() -> None:
    model, other = Awkward(), Awkward()
    bare, inner = sgd(model), sgd(other)
    scheduler = make("StepLR", inner)
    optimizer = ShardedStateOptimizer(inner, other)
    expected = drive(bare, model, make("StepLR", bare), range(STEPS))
    assert drive(optimizer, other, scheduler, range(STEPS)) == expected
    assert weights(other) == weights(model)
