"""Optimizers whose state torch's own functions save, and wrapped ones to load it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardopt import ShardedStateOptimizer
from tests.support.rules import Awkward, train

Build = Callable[[Any], torch.optim.Optimizer]


RULES: dict[str, Build] = {
    "AdamW": torch.optim.AdamW,
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.125)),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "no state": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    # Rows and columns of a matrix: neither has the parameter's shape.
    "Adafactor": lambda params: torch.optim.Adafactor(full(params)),
}


FLAT = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])


def trained(
    build: Build = torch.optim.AdamW, *, steps: int = 2, seed: int = 0
) -> tuple[torch.optim.Optimizer, Awkward]:
    model = Awkward(seed)
    optimizer = build(two_groups(model))
    train(optimizer, model, range(steps))
    return optimizer, model


def full(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without parameters of no elements, by whose number Adafactor divides."""
    return [{**group, "params": [param for param in group["params"] if param.numel()]} for group in groups]


def two_groups(model: Awkward) -> list[dict[str, Any]]:
    params = [*model.parameters()]
    return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.25}]


def saved_state(optimizer: torch.optim.Optimizer, model: nn.Module, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def wrapped(build: Build = torch.optim.AdamW, *, steps: int = 0) -> tuple[ShardedStateOptimizer, Awkward]:
    inner, model = trained(build, steps=steps, seed=1)
    compute = "dtensor" if isinstance(inner, torch.optim.Adafactor) else "auto"
    return ShardedStateOptimizer(inner, model, compute=compute), model
