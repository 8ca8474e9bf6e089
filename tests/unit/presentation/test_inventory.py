"""What a wrapper looks after: where scalars live, and state that belongs to nobody."""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import PlacementError, ShardedStateOptimizer
from shardopt.geometry import Box
from shardopt.layouts.tracked import Tracked
from shardopt.naming import Name
from shardopt.presentation.choice import Choice
from shardopt.presentation.dtensor import DTensorPresentation
from shardopt.presentation.inventory import Inventory, Part
from tests.support.rules import ELEMENTWISE

OPTIONS: list[dict[str, Any]] = [{}, {"foreach": True}, {"capturable": True}]
CASES = [
    (name, options)
    for name, cls in ELEMENTWISE.items()
    for options in OPTIONS
    if set(options) <= inspect.signature(cls).parameters.keys()
]


def inventory_of(inner: torch.optim.Optimizer, param: torch.Tensor) -> tuple[Inventory, Tracked]:
    inventory = Inventory([Part(inner, DTensorPresentation(inner), Choice("dtensor", "a test"))], world_size=1)
    tracked = Tracked(Name("weight"), param, tuple(param.shape), Box.whole(param.shape), 0, 0)
    inventory.add([tracked])
    return inventory, tracked


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_new_scalar_is_put_where_the_class_puts_it(name: str, options: dict[str, Any]) -> None:
    # The meta device stands for any accelerator: the state is made there, although the update itself is refused.
    param = nn.Parameter(torch.empty(2, device="meta"))
    param.grad = torch.empty(2, device="meta")
    inner = ELEMENTWISE[name]([param], **options)
    with contextlib.suppress(RuntimeError, AssertionError):
        inner.step()
    scalars = {entry: value.device for entry, value in inner.state[param].items() if value.ndim == 0}
    assert scalars or name == "SGD"
    inventory, tracked = inventory_of(inner, param)
    group = inner.param_groups[0]
    assert {entry: inventory.scalar_device(tracked, group, entry) for entry in scalars} == scalars


def test_the_scalars_of_some_classes_are_beside_the_parameter() -> None:
    param = nn.Parameter(torch.empty(2, device="meta"))
    for inner, beside in (
        (torch.optim.ASGD([param]), True),
        (torch.optim.NAdam([param]), False),
        (torch.optim.NAdam([param], capturable=True), True),
    ):
        inventory, tracked = inventory_of(inner, param)
        device = inventory.scalar_device(tracked, inner.param_groups[0], "step")
        assert device == torch.device("meta" if beside else "cpu")


def test_state_of_a_tensor_in_no_group_is_left_out_and_said_once_A18(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.AdamW([model.weight])
    optimizer = ShardedStateOptimizer(inner, model)
    keys = set(optimizer.state_dict())
    inner.state[model.bias] = {"exp_avg": torch.zeros(2)}
    with caplog.at_level(logging.WARNING, logger="shardopt"):
        assert set(optimizer.state_dict()) == keys
        optimizer.state_dict()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("shardopt")] == [
        "AdamW holds state for a tensor of shape (2,) that is in none of its groups; it is not saved."
    ]


def test_state_under_a_key_that_is_neither_tensor_nor_name_is_refused() -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters())
    optimizer = ShardedStateOptimizer(inner, model)
    inner.state[("global", "step")] = 3  # type: ignore[index]
    with pytest.raises(
        PlacementError,
        match=r"AdamW keeps state under \('global', 'step'\), which is neither a parameter nor a name",
    ):
        optimizer.state_dict()
