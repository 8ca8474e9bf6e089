"""Parameters that are frozen, unused, tied or of no module, on one side or both: all state comes back, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot

HOWS = pytest.mark.parametrize("how", ["stock", "path"])


class Model(nn.Module):
    """``body`` twice, of which the second may be the first; a head; a parameter of its own for the optimizer."""

    def __init__(self, mesh: DeviceMesh | None, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 2)
        if tied:
            self.second.weight = self.first.weight
        self.outside = [nn.Parameter(torch.ones(2))]  # in a list, so of no module
        if mesh is not None:
            fully_shard(self, mesh=mesh)

    def forward(self) -> None:
        raise AssertionError("never run")


@dataclass
class Side:
    """How one side is made.

    Attributes:
        frozen: prefixes of parameters that need no gradient; they are in the groups.
        left_out: prefixes of parameters that are in no group.
        idle: prefixes of parameters that get no gradient.
        steps: that are taken.
        tied: whether ``second`` is ``first``.
        outside: whether the optimizer has the parameter of no module.
        gradients: whether gradients are there when it is saved or loaded.
        late: prefixes of parameters that get gradients in the last step only, and the others not.
    """

    frozen: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    steps: int = 2
    tied: bool = False
    outside: bool = False
    gradients: bool = False
    late: tuple[str, ...] = ()

    def make(self, mesh: DeviceMesh | None, *, steps: int | None = None) -> tuple[ShardedStateOptimizer, Model]:
        """A model with its optimizer."""
        model = Model(mesh, tied=self.tied)
        named = [(name, param) for name, param in model.named_parameters() if not name.startswith(self.left_out or "-")]
        if self.outside:
            named.append(("temperature", model.outside[0]))
        optimizer = ShardedStateOptimizer(torch.optim.AdamW(named, lr=0.125), model)
        for step in range(self.steps if steps is None else steps):
            self._give_gradients(named, step)
            optimizer.step()
            optimizer.zero_grad()
        for name, param in named:
            param.requires_grad_(not name.startswith(self.frozen or "-"))
        if self.gradients:
            self._give_gradients(named, 9)
        return optimizer, model

    def _give_gradients(self, named: list[tuple[str, Any]], step: int) -> None:
        for index, (name, param) in enumerate(named):
            if not name.startswith((*self.frozen, *self.idle) or "-") and (
                step or not name.startswith(self.late or "-")
            ):
                param.grad = torch.full_like(param, 1.0 + index + 10 * step, requires_grad=False)


def held(optimizer: ShardedStateOptimizer) -> dict[str, Any]:
    """All state by the names in the groups."""
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            for entry, value in optimizer.state.get(param, {}).items():
                found[f"{name}.{entry}"] = value.to_local() if isinstance(value, DTensor) else value
    return found


def renamed(state: dict[str, Any], **names: str) -> dict[str, Any]:
    """With the state of one module under a second name too."""
    copies = {
        f"{new}{key.removeprefix(old)}": value
        for key, value in state.items()
        for old, new in names.items()
        if key.startswith(old)
    }
    return state | copies


Expect = Callable[[dict[str, Any]], dict[str, Any]]


def everything(saved: dict[str, Any]) -> dict[str, Any]:
    return saved


def without(*prefixes: str) -> Expect:
    return lambda saved: {key: value for key, value in saved.items() if not key.startswith(prefixes)}


HEAD = ("head",)
# How it is saved, how it is loaded, and what comes back of what was saved.
COMES_BACK: dict[str, tuple[Side, Side, Expect]] = {
    "frozen on both sides": (Side(frozen=HEAD), Side(frozen=HEAD), everything),
    "frozen with state": (Side(), Side(frozen=HEAD), everything),
    "tied on both sides": (Side(tied=True), Side(tied=True), everything),
    "frozen without state, then trained": (Side(frozen=HEAD, steps=1), Side(), everything),
    "trained, then frozen": (Side(), Side(frozen=HEAD, steps=0), everything),
    "never used": (Side(idle=HEAD), Side(idle=HEAD), everything),
    "never used by the source": (Side(idle=HEAD), Side(), everything),
    "used late": (Side(late=HEAD), Side(), everything),
    "gradients when it is loaded": (Side(), Side(gradients=True), everything),
    "gradients when it is saved": (Side(gradients=True), Side(), everything),
    "gradients and no state when it is saved": (Side(gradients=True, steps=0), Side(), everything),
    "of no module": (Side(outside=True), Side(outside=True), everything),
    "tied, then apart": (Side(tied=True), Side(), lambda saved: renamed(saved, first="second")),
    "apart, then tied": (Side(), Side(tied=True), without("second")),
}
REFUSED: dict[str, tuple[Side, Side, str]] = {
    "in no group of the source": (
        Side(left_out=HEAD),
        Side(),
        "head.weight: this optimizer updates it, the checkpoint",
    ),
    "in no group of the target": (Side(), Side(left_out=HEAD), "head.weight: the checkpoint has it, this optimizer"),
    "of no module, by the target alone": (Side(), Side(outside=True), "temperature: this optimizer updates it"),
    "of no module, by the source alone": (Side(outside=True), Side(), "temperature: the checkpoint has it"),
}


def load(path: Path, how: str, optimizer: ShardedStateOptimizer) -> None:
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    else:
        optimizer.prepare_load(path).commit()


@HOWS
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("case", COMES_BACK)
def test_lifecycle_1d_all_state_comes_back(
    case: str, sharded: bool, steps: int, how: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    saved_as, loaded_as, expect = COMES_BACK[case]
    source, _ = saved_as.make(mesh if sharded else None)
    before = held(source)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    assert value_differences(before, held(source)) == []
    optimizer, model = loaded_as.make(mesh if sharded else None, steps=steps)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    if how == "stock" and case == "tied, then apart":
        # The second name's keys are not there, and only a load by path asks for those of the first.
        with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .* optim\.state\.second\."):
            load(tmp_path, how, optimizer)
        return
    load(tmp_path, how, optimizer)
    assert value_differences(expect(before), held(optimizer)) == []
    assert value_differences(weights, {name: param.detach() for name, param in model.named_parameters()}) == []
    # It can be saved again, and goes on.
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / "again")
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    optimizer.step()


@HOWS
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("case", REFUSED)
def test_lifecycle_1d_is_refused_by_name_and_nothing_changes(
    case: str, sharded: bool, steps: int, how: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    saved_as, loaded_as, text = REFUSED[case]
    source, _ = saved_as.make(mesh if sharded else None)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer, model = loaded_as.make(mesh if sharded else None, steps=steps)
    before = snapshot(optimizer, model)
    error: type[BaseException] = LoadError
    if how == "stock" and "this optimizer updates it" in text:
        # It asks for keys that are not there, which DCP itself refuses.
        error, text = dcp.api.CheckpointException, "Missing key in checkpoint state_dict: optim.state."
    with pytest.raises(error, match=text):
        load(tmp_path, how, optimizer)
    assert before.diff(snapshot(optimizer, model), ignore=["attribute._prepared"]) == []
