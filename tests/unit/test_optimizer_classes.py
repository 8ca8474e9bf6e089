"""Every element-wise class of torch.optim with each of its flags: wrapped, it is the bare one; also after a load."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import PresentationError, ShardedStateOptimizer
from shardopt.layouts.catalog import spec_of, why_never
from tests.support.rules import ELEMENTWISE, NOT_ELEMENTWISE, RULES, Awkward, Rule, groups, state, train, weights

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WHOLE = {"Adafactor": "owner", "LBFGS": "replicated", "Muon": "owner"}
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=str)


def wrapped(rule: Rule, model: Awkward) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(rule.build(model.parameters()), model)


def test_the_table_holds_all_of_torch_optim() -> None:
    assert {"Adagrad", "AdamW", "ASGD", "Rprop", "SGD"} <= set(ELEMENTWISE)
    assert len(RULES) > 5 * len(ELEMENTWISE)
    model = torch.nn.Linear(2, 2, bias=False)
    for cls in ELEMENTWISE.values():
        assert spec_of(cls(model.parameters())) is not None
    for name in NOT_ELEMENTWISE:
        inner = getattr(torch.optim, name)(model.parameters())
        if why_never(inner) is not None:
            with pytest.raises(PresentationError, match="SparseAdam cannot be wrapped: .*use Adam"):
                ShardedStateOptimizer(inner, model)
            continue
        assert ShardedStateOptimizer(inner, model).explain().startswith(f"{name}: compute={WHOLE[name]!r}")
        with pytest.raises(PresentationError, match=rf"{name} (needs|keeps) .*compute='{WHOLE[name]}', or"):
            ShardedStateOptimizer(inner, model, compute="local")


@EACH_RULE
def test_the_wrapped_optimizer_is_the_bare_one(rule: Rule) -> None:
    model, other = Awkward(), Awkward()
    before = weights(model)
    bare, optimizer = rule.build(model.parameters()), wrapped(rule, other)
    keys = set(optimizer.state_dict())
    train(bare, model, range(4))
    train(optimizer, other, range(4))
    assert weights(other) == weights(model) != before
    assert state(optimizer, other) == state(bare, model)
    assert groups(optimizer) == groups(bare)
    trained = [
        (name, optimizer.state[param]) for name, param in other.named_parameters() if param.ndim and name != "idle"
    ]
    kept = {f"state.{name}.{entry}" for name, entries in trained for entry, value in entries.items() if value.ndim}
    assert kept == {key for key in keys if key.startswith(tuple(f"state.{name}." for name, _ in trained))}
    assert set(optimizer.state_dict()) == keys


@EACH_RULE
def test_saved_and_loaded_it_goes_on_as_it_would_have(rule: Rule, tmp_path: Path) -> None:
    model, other, third = Awkward(), Awkward(seed=1), Awkward(seed=2)
    optimizer, fresh, warm = wrapped(rule, model), wrapped(rule, other), wrapped(rule, third)
    train(optimizer, model, range(3))
    train(warm, third, range(50, 52))
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    saved, values = state(optimizer, model), groups(optimizer)
    at_save = copy.deepcopy(model.state_dict())
    train(optimizer, model, range(3, 6))
    for loaded, its_model in ((fresh, other), (warm, third)):
        its_model.load_state_dict(at_save)
        dcp.load({"optim": loaded}, checkpoint_id=tmp_path)
        assert state(loaded, its_model) == saved
        assert groups(loaded) == values
        train(loaded, its_model, range(3, 6))
        assert weights(its_model) == weights(model)
        assert state(loaded, its_model) == state(optimizer, model)
