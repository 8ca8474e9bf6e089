"""Values given to a load, and values whose kind differs between the sides: checked before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardopt import LoadError, ShardedStateOptimizer
from shardopt.layouts.catalog import spec_of
from tests.support.rules import RULES, Awkward, Rule, train
from tests.support.snapshot import snapshot
from tests.unit.test_load_options import Made, model_of, saved, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def refused(made: Made, path: Path, text: str, **options: Any) -> None:
    before = snapshot(*made)
    with pytest.raises(LoadError) as caught:
        made[0].prepare_load(path, **options)
    assert text in str(caught.value)
    assert before.diff(snapshot(*made)) == []


def by_parameter(steps: int = 0) -> Made:
    """A group for each parameter."""
    model = model_of("ab")
    optimizer = torch.optim.AdamW([{"params": [param]} for param in model.parameters()])
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return ShardedStateOptimizer(optimizer, model), model


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "{'lr': nan} is nan"),
        ({"lr": torch.tensor(float("nan"))}, "is tensor(nan)"),
        ({"lr": torch.tensor([0.5, 0.25])}, "is a tensor of shape (2,), where 0.125 is"),
        ({"lr": "warm"}, "is a str, where 0.125 is"),
        ({"lr": True}, "is a bool, where 0.125 is"),
        ({"betas": (0.9,)}, "has 1 items, where (0.9, 0.999) has 2"),
        ({"betas": [0.9, 0.99]}, "is a list, where (0.9, 0.999) is"),
        ({"betas": (0.9, "a lot")}, "is a str, where 0.999 is"),
        ({"betas": (0.9, 1.5)}, "Invalid beta parameter at index 1: 1.5"),
        ({"betas": (0.9, float("nan"))}, "is nan"),
        ({"weight_decay": -0.5}, "Invalid weight_decay value: -0.5"),
        ({"amsgrad": 1}, "is a int, where False is"),
        ({"foreach": True}, "says which kernel runs"),
        ({"fused": "yes"}, "says which kernel runs"),
        ({"momentum": 0.9}, "no parameter group of this optimizer has such a key"),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_given_value_that_no_constructor_would_take_is_refused(
    given: dict[str, Any], text: str, steps: int, tmp_path: Path
) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    refused(wrapped(model_of("ab"), steps=steps), tmp_path, text, hyperparameters=given)


def test_a_given_value_is_judged_with_the_values_it_will_stand_beside(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1, cls=torch.optim.SGD, momentum=0.9, nesterov=True))
    live = wrapped(model_of("ab"), cls=torch.optim.SGD)
    refused(live, tmp_path, "Nesterov momentum requires a momentum", hyperparameters={"momentum": 0.0})
    live[0].prepare_load(tmp_path, hyperparameters={"momentum": 0.5}).commit()
    assert (live[0].param_groups[0]["momentum"], live[0].param_groups[0]["nesterov"]) == (0.5, True)


def test_initial_lr_that_only_some_groups_have_is_given_to_those_that_were_saved_with_it(tmp_path: Path) -> None:
    source, model = by_parameter(steps=1)
    for group, initial in zip(source.param_groups, (0.5, 0.25), strict=True):
        group["initial_lr"] = initial
    saved(tmp_path, (source, model))
    live = by_parameter()
    live[0].param_groups[0]["initial_lr"] = 0.5  # the second group has none
    live[0].prepare_load(tmp_path, hyperparameters={"initial_lr": 2.0}).commit()
    assert [group["initial_lr"] for group in live[0].param_groups] == [2.0, 2.0]


def test_a_learning_rate_that_vanishes_in_the_live_dtype_is_refused_C3(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1, lr=1e-9))
    live = wrapped(model_of("ab"), lr=torch.tensor(0.5, dtype=torch.float16), foreach=False)
    refused(live, tmp_path, "'lr' was saved as 1e-09 and cannot be held by torch.float16")
    refused(live, tmp_path, "'lr' is given as 100000.0 and cannot be held", hyperparameters={"lr": 1e5})
    live[0].prepare_load(tmp_path, hyperparameters={"lr": 0.1}).commit()
    assert live[0].param_groups[0]["lr"].dtype == torch.float16


TENSORS = (torch.tensor(0.75), torch.tensor(0.875))


def test_betas_keep_the_live_kind_C2(tmp_path: Path) -> None:
    # Only a foreach-less, capturable optimizer takes tensors.
    options: dict[str, Any] = {"lr": torch.tensor(0.125), "capturable": True, "foreach": False}
    saved(tmp_path / "tensors", wrapped(model_of("ab"), betas=tuple(t.clone() for t in TENSORS), **options))
    saved(tmp_path / "floats", wrapped(model_of("ab"), betas=(0.75, 0.875)))
    floats = wrapped(model_of("ab"), betas=(0.5, 0.625))
    loaded = floats[0].prepare_load(tmp_path / "tensors")
    assert any("'betas' was saved as a tensor and stays a float" in note for note in loaded.report.notes)
    loaded.commit()
    assert floats[0].param_groups[0]["betas"] == (0.75, 0.875)
    assert [type(item) for item in floats[0].param_groups[0]["betas"]] == [float, float]

    mine = (torch.tensor(0.5), torch.tensor(0.625))
    tensors = wrapped(model_of("ab"), betas=mine, **options)
    loaded = tensors[0].prepare_load(tmp_path / "floats")
    assert any("'betas' was saved as a float and stays a tensor" in note for note in loaded.report.notes)
    loaded.commit()
    assert all(held is own for held, own in zip(tensors[0].param_groups[0]["betas"], mine, strict=True))
    assert [item.item() for item in mine] == [0.75, 0.875]


def test_groups_that_were_one_do_not_share_objects(tmp_path: Path) -> None:
    source = wrapped(model_of("ab"), steps=1)
    source[0].param_groups[0].update(notes=["x"], scale=torch.ones(2))
    saved(tmp_path, source)
    live, _ = by_parameter()
    mine = torch.full((2,), 0.5)
    live.prepare_load(tmp_path, hyperparameters={"scale": mine}).commit()
    first, second = live.param_groups
    assert first["notes"] == second["notes"] == ["x"]
    assert first["notes"] is not second["notes"]
    first["scale"].fill_(3.0)
    assert second["scale"].tolist() == mine.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("rule", [rule for rule in RULES if "fused" not in rule.options], ids=str)
def test_known_classes_keep_the_entries_that_are_known_of_them(rule: Rule) -> None:
    model = Awkward()
    optimizer = rule.build(model.parameters())
    train(optimizer, model, range(1))
    spec = spec_of(optimizer)
    assert spec is not None
    (group,) = optimizer.param_groups
    kept = {entry for state in optimizer.state.values() for entry, value in state.items() if value is not None}
    assert kept == {*spec.entries(group), *spec.scalars}
