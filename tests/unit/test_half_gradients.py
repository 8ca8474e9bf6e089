"""Gradients in float16 under GradScaler: refused where unscaling them would lose what the scale has kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from tests.support.rules import weights


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, shardopt.GradScaler])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_float16_gradients_are_refused_where_torch_refuses_them(scaler_class: Any, unscale: bool) -> None:
    model = nn.Linear(2, 2).half()
    optimizer = shardopt.ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), foreach=False), model)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = weights(model)
    operation = scaler.unscale_ if unscale else scaler.step
    with pytest.raises(ValueError, match=r"FP16 gradients|float16 \(weight, bias\)"):
        operation(optimizer)
    assert weights(model) == before
    assert not optimizer.state


def test_scaled_steps_of_several_rules_are_those_without_a_scale() -> None:
    def made() -> tuple[shardopt.ShardedStateOptimizer, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 70), nn.Linear(70, 2))
        rules = [
            torch.optim.AdamW(model[0].parameters(), lr=0.125, fused=True),
            torch.optim.SGD(model[1].parameters(), lr=0.125, momentum=0.5),
        ]
        return shardopt.ShardedStateOptimizer(rules, model), model

    optimizer, model = made()
    other, its = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(model(torch.full((2, 3), 0.5 + step)).square().mean()).backward()
        its(torch.full((2, 3), 0.5 + step)).square().mean().backward()
        scaler.step(optimizer)
        scaler.update()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    assert weights(model) == weights(its)
