"""State that a rule keeps under a name and not under a parameter: saved with the optimizer, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardopt import FormatError, LoadError, PlacementError, ShardedStateOptimizer
from shardopt.portable.beside import read_beside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Counting(torch.optim.SGD):
    """Keeps under names how often it has stepped, in several kinds, and a slow average of its first gradient."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        self.state["steps"] = torch.zeros(1, dtype=torch.long)  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        state["steps"] += 1
        state["average"] = {"short": 0.5 * state.get("average", {"short": 1.0})["short"], "n": int(state["steps"])}
        super().step()


def wrapped(model: nn.Module, cls: type[Counting] = Counting) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(cls(model.parameters()), model)


def step(optimizer: torch.optim.Optimizer, model: nn.Module, times: int) -> None:
    for _ in range(times):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()


def named(optimizer: Any) -> dict[str, Any]:
    return {key: value for key, value in optimizer.state.items() if isinstance(key, str)}


@pytest.mark.parametrize("way", ["dcp.load", "prepare_load", "dict"])
def test_it_is_saved_and_loaded(tmp_path: Path, way: str) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = wrapped(model), wrapped(other)
    step(optimizer, model, 3)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    counter: Tensor = named(fresh)["steps"]
    if way == "dcp.load":
        dcp.load({"optim": fresh}, checkpoint_id=tmp_path)
    elif way == "prepare_load":
        prepared = fresh.prepare_load(tmp_path)
        assert int(counter) == 0
        prepared.commit()
    else:
        fresh.load_state_dict(optimizer.state_dict())
    assert named(fresh)["average"] == {"short": 0.125, "n": 3}
    assert named(fresh)["steps"] is counter
    assert int(counter) == 3
    step(optimizer, model, 1)
    assert int(counter) == 3


def test_what_was_not_saved_is_not_there_afterwards(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, later = wrapped(model), wrapped(other)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    step(later, other, 2)
    later.prepare_load(tmp_path).commit()
    assert named(later) == {"steps": torch.zeros(1, dtype=torch.long)}


def test_of_another_class_nothing_is_taken(tmp_path: Path) -> None:
    class Other(Counting):
        pass

    model = nn.Linear(3, 2)
    optimizer = wrapped(model)
    step(optimizer, model, 2)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    other = wrapped(model, Other)
    with pytest.raises(LoadError, match="Other"):
        other.prepare_load(tmp_path)
    prepared = other.prepare_load(tmp_path, fresh=["*"])
    assert any("what was saved under names" in note for note in prepared.report.notes)
    prepared.commit()
    assert int(named(other)["steps"]) == 0


def test_values_without_a_form_are_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    optimizer = wrapped(model)
    inner: Any = optimizer.optimizers[0]
    inner.state["odd"] = object()
    inner.state["large"] = torch.zeros(100_000)
    with pytest.raises(PlacementError, match=r"Counting.state\['odd'\]: got a builtins.object, which has no exact"):
        optimizer.state_dict()
    del inner.state["odd"]
    with pytest.raises(PlacementError, match=r"Counting.state\['large'\]"):
        optimizer.state_dict()
    del inner.state["large"]
    inner.state[("a", 1)] = 2
    with pytest.raises(PlacementError, match="neither a parameter nor a name"):
        optimizer.state_dict()


@pytest.mark.parametrize("saved", [3, [], [3], [{"steps": 3}], [{"steps": {}}]])
def test_damaged_state_under_names_is_refused_and_not_left_out(saved: Any) -> None:
    with pytest.raises(FormatError, match="beside"):
        read_beside({"beside": saved}, 0, torch.device("cpu"))
