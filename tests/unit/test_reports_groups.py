"""Faults that were reported of other optimizers' parameter groups, in one process: values, order, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import lr_scheduler

from shardopt import ShardedStateOptimizer
from tests.support.rules import bits, groups, state, weights

# Saved without a process group, by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Made = tuple[ShardedStateOptimizer, nn.ModuleDict]


def model_of(names: str = "abc") -> nn.ModuleDict:
    """Linear layers of these names, a letter each, whose weights all have the same shape."""
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in names})


def give_gradients(model: nn.ModuleDict, step: int, *, without: str = "") -> None:
    """Another gradient for each layer, by its name."""
    for name, layer in model.items():
        start = 100.0 * ord(name) + step
        layer.weight.grad = None if name in without else torch.arange(start, start + 6).reshape(2, 3)


def train(made: Made, steps: range, *, without: str = "") -> Made:
    """Takes these steps."""
    for step in steps:
        give_gradients(made[1], step, without=without)
        made[0].step()
    return made


def wrapped(order: list[str], options: dict[str, dict[str, Any]] | None = None, cls: Any = torch.optim.AdamW) -> Made:
    """An optimizer with one group for each string, of the layers that its letters name."""
    model = model_of("".join(sorted("".join(order))))
    listed = [{"params": [model[one].weight for one in names], **(options or {}).get(names, {})} for names in order]
    return ShardedStateOptimizer(cls(listed, lr=0.5), model), model


def restored(path: Path, how: str, made: Made) -> Made:
    """The checkpoint, loaded."""
    if how == "stock":
        dcp.load({"optim": made[0]}, checkpoint_id=path)
    else:
        made[0].prepare_load(path).commit()
    return made


HOWS = pytest.mark.parametrize("how", ["stock", "path"])


@HOWS
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
def test_every_value_of_every_group_comes_back_with_its_type_C1(tmp_path: Path, how: str, steps: int) -> None:
    values: dict[str, dict[str, Any]] = {
        "a": {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-5, "amsgrad": True},
        "b": {"weight_decay": 0.125, "maximize": True, "tag": "mine", "schedule": {"kind": ["warm", 3], 5: None}},
        "c": {"betas": (0.0, 0.25), "flag": False, "count": 2**70, "nothing": None, "pair": [(1, 2.5)]},
    }
    order = ["a", "b", "c"]
    # Amsgrad is an option that decides what is asked for.
    source, model = train(wrapped(order, values), range(steps))
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer, other = restored(tmp_path, how, wrapped(order, {"a": {"amsgrad": True}}))
    assert groups(optimizer) == groups(source)
    assert type(optimizer.param_groups[0]["betas"]) is tuple
    assert state(optimizer, other) == state(source, model)


@HOWS
@pytest.mark.parametrize("order", [["ab", "", "c"], ["", "", "abc"], ["a", "b", "c"]], ids=str)
def test_all_groups_are_complete_also_beside_empty_ones_C4_C12(tmp_path: Path, how: str, order: list[str]) -> None:
    values = {names: {"lr": 1.0 + at, "betas": (0.1 * at, 0.5)} for at, names in enumerate(order) if names}
    source, model = train(wrapped(order, values), range(2))
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer, other = restored(tmp_path, how, wrapped(order))
    assert groups(optimizer) == groups(source)
    train((source, model), range(2, 4))
    train((optimizer, other), range(2, 4))
    assert state(optimizer, other) == state(source, model)


@HOWS
def test_state_is_not_shifted_by_a_parameter_without_state_C14(tmp_path: Path, how: str) -> None:
    source, model = train(wrapped(["abc"]), range(2), without="a")
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer, other = restored(tmp_path, how, wrapped(["cb", "a"]))
    assert set(state(optimizer, other)) == {"b.weight", "c.weight"}
    assert state(optimizer, other) == state(source, model)


def two_optimizers(model: nn.ModuleDict, *, swapped: bool) -> Made:
    inners: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([{"params": [model["b"].weight], "lr": 0.25}, {"params": [model["a"].weight], "lr": 0.75}]),
        torch.optim.SGD([model["c"].weight], lr=0.5, momentum=0.5),
    ]
    return ShardedStateOptimizer(inners[::-1] if swapped else inners, model), model


@HOWS
def test_the_order_of_wrapped_optimizers_is_not_in_the_keys_B21(tmp_path: Path, how: str) -> None:
    source, model = train(two_optimizers(model_of(), swapped=False), range(2))
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer, other = two_optimizers(model_of(), swapped=True)
    assert set(optimizer.state_dict()) == set(source.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    restored(tmp_path, how, (optimizer, other))
    assert state(optimizer, other) == state(source, model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.75]


def _warm_up(epoch: int) -> float:
    return min(1.0, (epoch + 1) / 4)


def _decay(epoch: int) -> float:
    return 0.5**epoch


def _sequential(optimizer: torch.optim.Optimizer, last_epoch: int) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.LambdaLR(optimizer, fun, last_epoch) for fun in (_warm_up, _decay)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4], last_epoch=last_epoch)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "LambdaLR, warm-up": lambda one, last: lr_scheduler.LambdaLR(one, _warm_up, last),
    "LambdaLR, decay": lambda one, last: lr_scheduler.LambdaLR(one, _decay, last),
    "SequentialLR": _sequential,
}
EACH_SCHEDULER = pytest.mark.parametrize("name", SCHEDULERS)
SOURCE: dict[str, dict[str, Any]] = {"a": {"lr": 0.5}, "bc": {"lr": 0.25}}


def scheduled(made: Made, scheduler: Any, steps: range) -> list[Any]:
    """Trains; the lr of each group before each step."""
    curve = []
    for step in steps:
        curve.append([bits(group["lr"]) for group in made[0].param_groups])
        train(made, range(step, step + 1))
        scheduler.step()
    return curve


@EACH_SCHEDULER
@HOWS
def test_a_scheduler_of_the_source_alone_leaves_its_keys_for_one_built_after_the_load_C2_C9(
    tmp_path: Path, how: str, name: str
) -> None:
    source = wrapped(["a", "bc"], SOURCE)
    scheduler = SCHEDULERS[name](source[0], -1)
    scheduled(source, scheduler, range(3))
    dcp.save({"optim": source[0]}, checkpoint_id=tmp_path)
    optimizer, model = restored(tmp_path, how, wrapped(["a", "bc"]))
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    resumed = SCHEDULERS[name](optimizer, 2)
    assert getattr(resumed, "base_lrs", [0.5, 0.25]) == [0.5, 0.25]  # not those that had decayed
    resumed.load_state_dict(scheduler.state_dict())
    for group, saved in zip(optimizer.param_groups, source[0].param_groups, strict=True):
        group["lr"] = saved["lr"]  # a constructor writes lr; loading its state does not
    assert scheduled((optimizer, model), resumed, range(3, 8)) == scheduled(source, scheduler, range(3, 8))
    assert state(optimizer, model) == state(*source)


@HOWS
@EACH_SCHEDULER
def test_a_scheduler_built_before_the_load_goes_on_where_the_source_was_C2_C6_C8_C9(
    tmp_path: Path, how: str, name: str
) -> None:
    source, made = wrapped(["a", "bc"], SOURCE), wrapped(["a", "bc"], {"a": {"lr": 0.0625}})
    scheduler, built_before = SCHEDULERS[name](source[0], -1), SCHEDULERS[name](made[0], -1)
    scheduled(source, scheduler, range(3))
    dcp.save({"optim": source[0]}, checkpoint_id=tmp_path)
    inner, listed, dicts = made[0].optimizers[0], made[0].param_groups, [*made[0].param_groups]
    restored(tmp_path, how, made)
    assert made[0].param_groups is listed
    assert inner.param_groups is listed
    assert all(one is two for one, two in zip(listed, dicts, strict=True))
    assert [group["initial_lr"] for group in listed] == [0.5, 0.25]
    built_before.load_state_dict(scheduler.state_dict())
    assert scheduled(made, built_before, range(3, 8)) == scheduled(source, scheduler, range(3, 8))
    assert state(*made) == state(*source)
    # The kernel sees what is written to the groups now.
    before = weights(made[1])
    for group in made[0].param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    train(made, range(8, 9))
    assert weights(made[1]) == before


@HOWS
def test_lr_is_as_saved_after_a_load_and_only_a_scheduler_built_later_resets_it_C7(tmp_path: Path, how: str) -> None:
    source = wrapped(["a", "bc"], SOURCE)
    scheduled(source, SCHEDULERS["LambdaLR, warm-up"](source[0], -1), range(2))
    saved = [group["lr"] for group in source[0].param_groups]
    assert saved == [0.375, 0.1875]
    dcp.save({"optim": source[0]}, checkpoint_id=tmp_path)
    made = wrapped(["a", "bc"])
    before = SCHEDULERS["LambdaLR, warm-up"](made[0], -1)
    assert [group["lr"] for group in made[0].param_groups] == [0.125, 0.125]
    restored(tmp_path, how, made)
    assert [group["lr"] for group in made[0].param_groups] == saved
    assert before.last_epoch == 0  # a load moves no scheduler
    # Torch's constructor starts at the beginning of the warm-up, of the saved initial_lr.
    SCHEDULERS["LambdaLR, warm-up"](made[0], -1)
    assert [group["lr"] for group in made[0].param_groups] == [0.125, 0.0625]
