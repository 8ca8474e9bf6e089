"""Classes that may load each other's state: only those that were declared, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardopt import ShardedStateOptimizer, declare_interchangeable
from shardopt.layouts import interchange
from tests.support.rules import state
from tests.unit.test_load_options import Made, model_of, refused, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Mine(torch.optim.AdamW):
    """The same rule under another name."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Declarations are the process's."""
    before = [set(known) for known in interchange._ALIKE]
    yield
    interchange._ALIKE[:] = before


def made(cls: Any, steps: int = 0) -> Made:
    model = model_of("ab")
    optimizer = ShardedStateOptimizer(cls(model.parameters(), lr=0.125), model, compute="dtensor")
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer, model


@pytest.mark.parametrize("pair", [(Mine, torch.optim.AdamW), (torch.optim.AdamW, Mine)], ids=["from", "to"])
@pytest.mark.parametrize(
    "names", [(Mine, torch.optim.AdamW), ("tests.unit.layouts.test_interchange.Mine", "torch.optim.adamw.AdamW")]
)
def test_declared_classes_load_each_other(pair: Any, names: Any, tmp_path: Path) -> None:
    was, now = pair
    source = saved(tmp_path, made(was, steps=2))
    refused(made(now), tmp_path, "were saved by", "shardopt.declare_interchangeable says so")
    declare_interchangeable(*names)
    live = made(now)
    live[0].prepare_load(tmp_path).commit()
    assert state(*live) == state(*source)


def test_declarations_add_up() -> None:
    declare_interchangeable("a.A", "b.B")
    declare_interchangeable("c.C", "d.D")
    assert not interchange.is_interchangeable("a.A", "d.D")
    declare_interchangeable("b.B", "c.C")
    assert interchange.is_interchangeable("a.A", "d.D")
    assert not interchange.is_interchangeable("a.A", "e.E")


@pytest.mark.parametrize(
    ("classes", "error", "text"),
    [
        ((), ValueError, "expected two"),
        (("a.A", "a.A"), ValueError, "expected two"),
        (("AdamW", "a.A"), TypeError, "module and name"),
        ((Path, "a.A"), TypeError, "module and name"),
    ],
    ids=str,
)
def test_what_is_no_class_cannot_be_declared(classes: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        declare_interchangeable(*classes)


def test_declared_classes_must_have_what_the_other_needs(tmp_path: Path) -> None:
    saved(tmp_path, made(torch.optim.SGD, steps=1))
    declare_interchangeable(torch.optim.SGD, torch.optim.Adam)
    optimizer, model = made(torch.optim.SGD)
    optimizer.param_groups[0]["momentum"] = 0.5
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved(tmp_path / "momentum", (optimizer, model))
    refused(made(torch.optim.Adam), tmp_path / "momentum", "but not ['exp_avg', 'exp_avg_sq', 'step']")
