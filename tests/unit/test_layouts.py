"""State in attributes of an optimizer: found, refused, and saved when it is declared or was seen to move."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardopt import (
    LoadError,
    PlacementError,
    PresentationError,
    ShardedStateOptimizer,
    declare_saved,
    register_layouts,
)
from shardopt.layouts import declared, objects

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Holding(torch.optim.SGD):
    """Steps by a scale that it counts down and a table that its constructor makes."""

    def __init__(self, params: Any, lr: float = 0.5, size: int = 3) -> None:
        super().__init__(params, lr=lr)
        self.table = torch.arange(float(size))
        self.scale = torch.ones(2)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        self.scale *= 0.5
        super().step()


BOTH = {"self.table": "constant", "self.scale": "saved"}


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_REGISTERED", {})


def wrapped(model: nn.Module, layouts: Mapping[str, str] | None = BOTH, **options: Any) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(Holding(model.parameters(), **options), model, layouts=layouts)


def step(optimizer: torch.optim.Optimizer, model: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()


def saved(path: Path, times: int = 3, **options: Any) -> ShardedStateOptimizer:
    model = nn.Linear(3, 2)
    optimizer = wrapped(model, **options)
    step(optimizer, model, times)
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    return optimizer


def inner(optimizer: ShardedStateOptimizer) -> Any:
    return optimizer.optimizers[0]


def test_tensors_in_attributes_are_refused_with_the_declaration_that_would_save_them(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(PlacementError, match=r"Holding.table holds a tensor.*layouts=\{'self.table': 'saved'\}"):
        wrapped(model, None).state_dict()


def test_declared_attributes_are_saved_and_loaded_and_so_is_a_number_that_steps_change(tmp_path: Path) -> None:
    saved(tmp_path)
    fresh = wrapped(nn.Linear(3, 2))
    scale, table = inner(fresh).scale, inner(fresh).table
    dcp.load({"optim": fresh}, checkpoint_id=tmp_path)
    assert inner(fresh).num_steps == 3
    assert inner(fresh).scale is scale
    assert torch.equal(scale, torch.full((2,), 0.125))
    assert inner(fresh).table is table


def test_a_constant_that_differs_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    saved(tmp_path)
    other = wrapped(nn.Linear(3, 2), size=4)
    with pytest.raises(LoadError, match=r"Holding: self.table is declared constant, and was saved with another value"):
        other.prepare_load(tmp_path)
    assert inner(other).num_steps == 0


@pytest.mark.parametrize(
    ("layouts", "what"),
    [
        ({"self.table": "saved", "self.scale": "saved"}, "self.table is constant in the checkpoint"),
        ({"self.table": "constant", "self.scale": "constant"}, "self.scale is not constant in the checkpoint"),
    ],
)
def test_attributes_that_are_declared_otherwise_are_refused(tmp_path: Path, layouts: dict[str, str], what: str) -> None:
    saved(tmp_path)
    with pytest.raises(LoadError, match=what):
        wrapped(nn.Linear(3, 2), layouts).prepare_load(tmp_path)


def test_attributes_of_another_checkpoint_stay_and_are_noted(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    other = ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model)
    inner(other).added = 3
    other._inventory.parts[0].layouts = {"self.added": "saved"}
    prepared = other.prepare_load(tmp_path)
    assert "SGD: its attributes ['added'] are not in the checkpoint, and stay." in prepared.report.notes


def test_layouts_are_registered_for_a_class_and_given_for_one_optimizer() -> None:
    given = {"self.table": "constant"}
    register_layouts(Holding, given)
    given["self.table"] = "saved"
    optimizer = wrapped(nn.Linear(3, 2), {"self.scale": "saved"})
    assert dict(optimizer._inventory.parts[0].layouts) == BOTH
    optimizer.state_dict()
    with pytest.raises(TypeError):
        optimizer._inventory.parts[0].layouts["self.scale"] = "constant"  # type: ignore[index]


@pytest.mark.parametrize(
    ("layouts", "error", "what"),
    [
        ({"momentum": "sharded"}, ValueError, "an entry of a parameter's state.*'elementwise'"),
        ({"self.table": "elementwise"}, ValueError, "an attribute of the optimizer.*'saved', 'constant'"),
        ({3: "saved"}, TypeError, "expected a dict"),
        ("self.table", TypeError, "expected a dict"),
        ({"self.nothing": "saved"}, PlacementError, r"Holding has no attributes \['nothing'\]"),
    ],
)
def test_wrong_layouts_are_refused_when_they_are_made(layouts: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        wrapped(nn.Linear(3, 2), layouts)


class Keeps(torch.optim.Optimizer):
    """Of no interest; keeps a plain tensor of the parameter's local shape, and cannot be tried."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["kept"] = param.detach().clone()


def test_a_declared_entry_is_stored_as_a_tensor_of_the_parameters_shape() -> None:
    model = nn.Linear(3, 2)
    keys: list[set[str]] = []
    for layouts in (None, {"kept": "elementwise"}):
        optimizer = ShardedStateOptimizer(Keeps(model.parameters()), model, compute="dtensor", layouts=layouts)
        step(optimizer, model)
        keys.append({key for key in optimizer.state_dict() if key.startswith("state.")})
    assert keys == [set(), {"state.weight.kept", "state.bias.kept"}]


class Counter:
    def __init__(self) -> None:
        self.n = 0


class Nested(torch.optim.SGD):
    """Counts in containers, and from its 30th step on in an attribute that the trial has not seen moving."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        self.info = {"n": 0}
        self.listed = [0]
        self.phase = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.info["n"] += 1
        self.listed[0] += 2
        self.phase = self.info["n"] // 30
        super().step()


class InObject(torch.optim.SGD):
    """Counts in an object of its own."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        self.counter = Counter()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counter.n += 1
        super().step()


@pytest.mark.parametrize("compute", ["auto", "dtensor", "owner"])
def test_numbers_in_containers_and_numbers_that_move_late_are_saved(tmp_path: Path, compute: str) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = ShardedStateOptimizer(Nested(model.parameters()), model, compute=compute)
    step(optimizer, model, 31)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    fresh = ShardedStateOptimizer(Nested(other.parameters()), other, compute=compute)
    dcp.load({"optim": fresh}, checkpoint_id=tmp_path)
    assert (inner(fresh).info, inner(fresh).listed, inner(fresh).phase) == ({"n": 31}, [62], 1)
    assert inner(fresh).info is not inner(optimizer).info


def test_a_number_in_an_object_is_refused_until_its_class_is_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_DECLARED", {})
    model = nn.Linear(3, 2)
    optimizer = ShardedStateOptimizer(InObject(model.parameters()), model)
    step(optimizer, model, 2)
    with pytest.raises(PlacementError, match=r"InObject.counter: got a .*Counter.*declare_saved\(Counter\)"):
        optimizer.state_dict()
    declare_saved(Counter)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    fresh = ShardedStateOptimizer(InObject(model.parameters()), model)
    dcp.load({"optim": fresh}, checkpoint_id=tmp_path)
    assert inner(fresh).counter.n == 2


def test_what_others_hang_on_an_optimizer_is_not_taken_for_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = ShardedStateOptimizer(Keeps(model.parameters()), model, compute="dtensor")
    inner(optimizer).scheduler = torch.optim.lr_scheduler.ConstantLR(inner(optimizer))
    inner(optimizer).model = model
    inner(optimizer).log = print
    assert optimizer._inventory.parts[0].saved_attributes == []
    optimizer.state_dict()


def test_a_constant_that_has_changed_is_refused_when_it_is_saved() -> None:
    model = nn.Linear(3, 2)
    optimizer = wrapped(model, {"self.table": "constant", "self.scale": "constant"})
    optimizer.state_dict()
    step(optimizer, model)
    with pytest.raises(PlacementError, match="Holding.scale is declared constant, and has changed"):
        optimizer.state_dict()


def test_a_rule_that_needs_a_closure_says_so_before_anything_is_written() -> None:
    model = nn.Linear(3, 2)
    optimizer = ShardedStateOptimizer(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(PresentationError, match=r"LBFGS needs a closure"):
        step(optimizer, model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert "no gradient" not in optimizer.explain()


class InFloat32(torch.optim.Optimizer):
    """SGD on a float32 copy of each parameter, which is kept in state."""

    def __init__(self, params: Any, lr: float = 2.0**-12) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["wide"] = param.detach().float().clone()
                state["wide"].add_(param.grad.float(), alpha=-group["lr"])
                param.copy_(state["wide"])


@pytest.mark.parametrize("compute", ["local", "owner", "replicated", "dtensor"])
def test_a_master_follows_weights_that_were_loaded_alone_and_keeps_what_it_knows_of_others(compute: str) -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    inner_ = InFloat32(model.parameters())
    optimizer = ShardedStateOptimizer(inner_, model, compute=compute, layouts={"wide": "master"})
    step(optimizer, model, 3)
    # Too little for bfloat16 to show.
    assert torch.equal(model.weight, torch.ones(2, 2, dtype=torch.bfloat16))
    wide: torch.Tensor = inner_.state[model.weight]["wide"]
    assert torch.equal(wide, torch.full((2, 2), 1 - 3 * 2.0**-12))
    with torch.no_grad():
        model.weight[0] = 5.0
    step(optimizer, model)
    wide = inner_.state[model.weight]["wide"]
    assert torch.equal(wide, torch.tensor([[5 - 2.0**-12] * 2, [1 - 4 * 2.0**-12] * 2]))
    assert torch.equal(model.weight[0], torch.full((2,), 5.0, dtype=torch.bfloat16))


def test_without_the_declaration_loaded_weights_are_lost() -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    optimizer = ShardedStateOptimizer(InFloat32(model.parameters()), model)
    step(optimizer, model)
    with torch.no_grad():
        model.weight.fill_(5.0)
    step(optimizer, model)
    assert not torch.equal(model.weight, torch.full((2, 2), 5.0, dtype=torch.bfloat16))
