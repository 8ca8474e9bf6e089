"""Trainable parameters that get no gradient in the first step are named once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from shardopt import ShardedStateOptimizer


def test_parameters_without_a_gradient_are_named_once_E1_K8(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("used", "unused", "frozen")})
    model["frozen"].weight.requires_grad_(False)
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    assert "no gradient" not in repr(optimizer)
    with caplog.at_level(logging.WARNING, logger="shardopt"):
        for _ in range(3):
            model["used"].weight.grad = torch.ones(1, 2)
            optimizer.step()
    sentence = "1 trainable parameters got no gradient in the first step: unused.weight"
    assert [record.getMessage() for record in caplog.records] == [
        f"{sentence}. They are not updated, and have no state, until they get one."
    ]
    assert optimizer.explain().splitlines()[-1] == sentence


def test_a_model_whose_every_parameter_is_used_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    before = optimizer.explain()
    model(torch.ones(1, 2)).sum().backward()
    with caplog.at_level(logging.WARNING, logger="shardopt"):
        optimizer.step()
    assert not caplog.records
    assert optimizer.explain() == before


def test_a_step_under_graph_capture_is_refused_before_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("hook"))
    monkeypatch.setattr(optimizer._scope, "vote", lambda *_, **__: called.append("vote"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Exception, match="step outside of its capture"):
        optimizer.step()
    assert called == []
