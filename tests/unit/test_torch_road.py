"""Torch's own functions for optimizer state, and torch.save: they change nothing, and lose nothing in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_road
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardopt import ShardedStateOptimizer
from tests.support.rules import Awkward, train
from tests.support.snapshot import snapshot

SENTENCE = (
    r"^torch\.distributed\.checkpoint\.state_dict does not suit a ShardedStateOptimizer.*dcp\.save\(\{'optim': "
    r"optimizer\}, \.\.\.\) and dcp\.load.*prepare_load\(path\)\.commit\(\)\.$"
)

Call = Callable[[nn.Module, Any, dict[str, Any], StateDictOptions], Any]

CALLS: dict[str, Call] = {
    "get_optimizer_state_dict": lambda model, one, saved, options: torch_road.get_optimizer_state_dict(
        model, one, options=options
    ),
    "get_state_dict": lambda model, one, saved, options: torch_road.get_state_dict(model, one, options=options),
    "set_optimizer_state_dict": lambda model, one, saved, options: torch_road.set_optimizer_state_dict(
        model, one, saved, options=options
    ),
    # It loads the model first: here the values that the model has.
    "set_state_dict": lambda model, one, saved, options: torch_road.set_state_dict(
        model, one, model_state_dict=dict(model.state_dict()), optim_state_dict=saved, options=options
    ),
}


def refused(optimizer: ShardedStateOptimizer, model: Awkward, call: Call, **options: Any) -> list[str]:
    """What a refused call has changed."""
    twin = Awkward()
    plain = torch.optim.AdamW(twin.parameters())
    train(plain, twin, range(2))
    twin.give_gradients(0)
    saved = torch_road.get_optimizer_state_dict(twin, plain, options=StateDictOptions(**options))
    before = snapshot(optimizer, model)
    with pytest.raises(TypeError, match=SENTENCE):
        call(model, optimizer, saved, StateDictOptions(**options))
    return before.diff(snapshot(optimizer, model))


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
@pytest.mark.parametrize("gradients", [False, True], ids=["no-gradients", "gradients"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "warm"])
@pytest.mark.parametrize("call", CALLS)
def test_torchs_functions_are_refused_and_change_nothing_T1_A1(
    call: str, steps: int, gradients: bool, options: dict[str, Any]
) -> None:
    model = Awkward()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125)), model)
    train(optimizer, model, range(steps))
    if gradients:
        model.give_gradients(steps)
    assert refused(optimizer, model, CALLS[call], **options) == []


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params: torch.optim.SGD(params, momentum=0.9, dampening=0.5),
    "SGD without state": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("call", CALLS)
def test_a_refused_look_leaves_no_trace_in_training_A1_A2(call: str, rule: str) -> None:
    runs = []
    for look in (False, True):
        model = Awkward()
        optimizer = ShardedStateOptimizer(RULES[rule](model.parameters()), model)
        if look:
            assert refused(optimizer, model, CALLS[call]) == []
        train(optimizer, model, range(3))
        runs.append(snapshot(optimizer, model))
    assert runs[0].diff(runs[1], identities=False) == []


def test_several_wrapped_optimizers_are_refused_too_T1() -> None:
    model = Awkward()
    first, *others = model.parameters()
    inners = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others)]
    optimizer = ShardedStateOptimizer(inners, model)
    for call in CALLS.values():
        assert refused(optimizer, model, call) == []


def test_anybody_else_may_read_the_state() -> None:
    model = Awkward()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = ShardedStateOptimizer(inner, model)
    assert optimizer.state is inner.state
