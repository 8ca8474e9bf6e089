"""Wrapping, looking and saving leave training bit for bit as it would have been.

Elsewhere, asking a fresh optimizer for its state takes a step to make it: counters start at 1, moments are polluted by
weight decay, the first updates are too small. A1, A2 and A3 are the names of these bugs in our list.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.rules import ELEMENTWISE, Awkward, Rule, state, train, weights
from tests.support.snapshot import snapshot

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LOOKS: dict[str, Callable[[ShardedStateOptimizer, Path], Any]] = {
    "state_dict": lambda one, _: one.state_dict(),
    "repr": lambda one, _: repr(one),
    "explain": lambda one, _: one.explain(),
    "sharded_state": lambda one, _: one.sharded_state(),
    "save": lambda one, path: dcp.save({"optim": one}, checkpoint_id=path),
    "async_save": lambda one, path: dcp.async_save({"optim": one}, checkpoint_id=path).result(),
    "prepare_load": lambda one, _: one.prepare_load(one.state_dict()),
    "groups": lambda one, _: (one.param_groups, one.defaults, one.optimizers, bool(one.state)),
}
# Coupled weight decay pollutes moments, dampening skips the first step, a tensor lr loses its identity.
TRICKY = [
    Rule(torch.optim.Adam, {"weight_decay": 0.1, "lr": torch.tensor(0.125), "foreach": False}),
    Rule(torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    Rule(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    Rule(torch.optim.Rprop, {}),
]


@pytest.mark.parametrize("rule", TRICKY, ids=lambda rule: rule.cls.__name__)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("early", [0, 2], ids=["fresh", "warm"])
def test_A1_A2_a_look_changes_nothing_now_or_later(look: str, rule: Rule, early: int, tmp_path: Path) -> None:
    model, other = Awkward(), Awkward()
    bare = rule.build(model.parameters())
    optimizer = ShardedStateOptimizer(rule.build(other.parameters()), other)
    train(bare, model, range(early))
    train(optimizer, other, range(early))
    # With gradients in place, as after a backward: a dummy step would use or drop them.
    other.give_gradients(early)
    before = snapshot(optimizer, other)
    LOOKS[look](optimizer, tmp_path)
    assert before.diff(snapshot(optimizer, other), ignore=["attribute._prepared"]) == []
    train(bare, model, range(early, early + 3))
    train(optimizer, other, range(early, early + 3))
    assert weights(other) == weights(model)
    assert state(optimizer, other) == state(bare, model)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_A1_every_class_is_read_before_its_first_step(name: str) -> None:
    model, other = Awkward(), Awkward()
    bare = ELEMENTWISE[name](model.parameters())
    optimizer = ShardedStateOptimizer(ELEMENTWISE[name](other.parameters()), other)
    before = snapshot(optimizer, other)
    optimizer.state_dict()
    assert before.diff(snapshot(optimizer, other)) == []
    train(bare, model, range(3))
    train(optimizer, other, range(3))
    assert weights(other) == weights(model)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_A3_wrapping_is_not_a_step(name: str) -> None:
    model, other = Awkward(), Awkward()
    bare, inner = (ELEMENTWISE[name](one.parameters()) for one in (model, other))
    train(bare, model, range(2))
    train(inner, other, range(2))
    other.give_gradients(2)
    before = snapshot(inner, other)
    optimizer = ShardedStateOptimizer(inner, other)
    assert before.diff(snapshot(inner, other)) == []
    train(bare, model, range(2, 4))
    train(optimizer, other, range(2, 4))
    assert weights(other) == weights(model)


@pytest.mark.parametrize("fails", ["an unknown key", "another manifest"])
def test_a_load_that_is_refused_changes_nothing(fails: str) -> None:
    model, other = Awkward(), Awkward()
    bare = torch.optim.Adam(model.parameters())
    optimizer = ShardedStateOptimizer(torch.optim.Adam(other.parameters()), other)
    train(bare, model, range(2))
    train(optimizer, other, range(2))
    saved = optimizer.state_dict()
    if fails == "an unknown key":
        del saved["state.vector.exp_avg"]
    else:
        stranger = Awkward()
        saved["manifest"] = ShardedStateOptimizer(torch.optim.AdamW(stranger.parameters()), stranger).state_dict()[
            "manifest"
        ]
    before = snapshot(optimizer, other)
    with pytest.raises(LoadError, match="the optimizer's state cannot be loaded"):
        optimizer.load_state_dict(saved)
    assert before.diff(snapshot(optimizer, other)) == []
    train(bare, model, range(2, 4))
    train(optimizer, other, range(2, 4))
    assert weights(other) == weights(model)
