"""State that others lose, invent or damage: made lazily, partial, of odd kinds, or saved from other groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.optim.lr_scheduler import ExponentialLR

from shardopt import LoadError, PlacementError, ShardedStateOptimizer
from tests.support.rules import groups, state, weights
from tests.support.snapshot import snapshot
from tests.support.tamper import read_tensors, rewritten

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Made = tuple[ShardedStateOptimizer, nn.ModuleDict]
NAMES = "abcd"
HOWS = pytest.mark.parametrize("how", ["stock", "path"])
STEPS_TAKEN = pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])


def model_of(names: str = NAMES, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """Linear layers of these names, a letter each."""
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in names}).to(dtype)


def train(optimizer: torch.optim.Optimizer, model: nn.ModuleDict, steps: range, names: str = NAMES) -> None:
    """Takes these steps, with gradients for the named layers only."""
    for step in steps:
        for name, param in model.named_parameters():
            param.grad = torch.full_like(param, 1.0 + step + ord(name[0])) if name[0] in names else None
        optimizer.step()
        optimizer.zero_grad()


def wrapped(
    steps: int = 0, *, cls: Any = torch.optim.AdamW, names: str = NAMES, compute: str = "auto", **options: Any
) -> Made:
    """A wrapped optimizer that has trained the named layers."""
    model = model_of()
    optimizer = ShardedStateOptimizer(cls(model.parameters(), **options), model, compute=compute)
    train(optimizer, model, range(steps), names)
    return optimizer, model


def load(how: str, optimizer: ShardedStateOptimizer, path: Path) -> None:
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    else:
        optimizer.prepare_load(path).commit()


def save(path: Path, made: Made) -> Made:
    dcp.save({"optim": made[0]}, checkpoint_id=path)
    return made


def refused(how: str, made: Made, path: Path, *texts: str) -> None:
    """The load fails with all of these texts and changes nothing."""
    before = snapshot(*made)
    with pytest.raises(LoadError) as caught:
        load(how, made[0], path)
    for text in texts:
        assert text in str(caught.value)
    assert before.diff(snapshot(*made)) == []


LR: dict[str, Callable[[float], Any]] = {"float": float, "tensor": torch.tensor}


@HOWS
@pytest.mark.parametrize("scheduled", ["both", "source", "target", "neither"])
@pytest.mark.parametrize("live", LR)
@pytest.mark.parametrize("saved", LR)
def test_every_kind_of_lr_loads_into_every_other_with_and_without_a_scheduler_T6(
    saved: str, live: str, scheduled: str, how: str, tmp_path: Path
) -> None:
    # Powers of two: a float and a tensor lr agree exactly.
    source, model = wrapped(lr=LR[saved](0.5), foreach=False)
    scheduler = ExponentialLR(source, gamma=0.5) if scheduled in ("both", "source") else None
    for step in range(2):
        train(source, model, range(step, step + 1))
        if scheduler is not None:
            scheduler.step()
    save(tmp_path, (source, model))
    optimizer, other = wrapped(lr=LR[live](0.25), foreach=False)
    its_scheduler = ExponentialLR(optimizer, gamma=0.5) if scheduled in ("both", "target") else None
    (group,) = optimizer.param_groups
    lr = group["lr"]
    load(how, optimizer, tmp_path)
    assert optimizer.param_groups[0] is group
    assert type(group["lr"]) is type(lr)
    assert (group["lr"] is lr) == (live == "tensor")
    assert float(group["lr"]) == (0.125 if scheduler is not None else 0.5)
    # What only the live side has is kept, what only the checkpoint has is taken over.
    expected = {"both": 0.5, "source": 0.5, "target": 0.25}.get(scheduled)
    assert (None if "initial_lr" not in group else float(group["initial_lr"])) == expected
    assert state(optimizer, other) == state(source, model)
    train(optimizer, other, range(2, 3))
    if its_scheduler is not None:
        its_scheduler.step()
        assert float(group["lr"]) == (0.0625 if scheduler is not None else 0.25)


def grouped(*members: str, steps: int = 0, lr: tuple[float, ...] = (0.5, 0.25)) -> Made:
    """Groups of layers, each with an lr of its own."""
    model = model_of()
    chosen = [
        {"params": [model[name].weight for name in one], "lr": rate} for one, rate in zip(members, lr, strict=False)
    ]
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(chosen), model)
    train(optimizer, model, range(steps))
    return optimizer, model


@HOWS
@STEPS_TAKEN
def test_one_group_becomes_two_which_both_take_its_values_T7(how: str, steps: int, tmp_path: Path) -> None:
    source, model = save(tmp_path, grouped("abcd", steps=2, lr=(0.125,)))
    optimizer, other = grouped("db", "ca", steps=steps)
    load(how, optimizer, tmp_path)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert state(optimizer, other) == state(source, model)


@HOWS
@STEPS_TAKEN
def test_two_groups_become_one_only_if_they_agree_T7(how: str, steps: int, tmp_path: Path) -> None:
    save(tmp_path / "differ", grouped("ab", "cd", steps=2))
    source, model = save(tmp_path / "agree", grouped("ab", "cd", steps=2, lr=(0.5, 0.5)))
    optimizer, other = grouped("cadb", steps=steps)
    text = "group 0: its parameters were saved with different 'lr': c.weight with 0.25, a.weight with 0.5."
    refused(how, (optimizer, other), tmp_path / "differ", text)
    load(how, optimizer, tmp_path / "agree")
    assert groups(optimizer) == [groups(source)[0]]
    assert state(optimizer, other) == state(source, model)


class CountsInGroup(torch.optim.Optimizer):
    """Counts steps in its group, corrects by them, and decays whether or not there is a gradient; has no lr."""

    calls = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"step": 0, "decay": 0.5})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        type(self).calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                param.mul_(group["decay"])
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.mul_(0.5).add_(param.grad)
                    param.sub_(moment / (1 - 0.5 ** group["step"]))


def counting(steps: int) -> Made:
    return wrapped(steps, cls=CountsInGroup, compute="dtensor")


@pytest.mark.parametrize("early", [0, 2])
def test_a_counter_in_a_group_does_not_move_when_it_is_read_A2(early: int, tmp_path: Path) -> None:
    (bare, model), (optimizer, other) = counting(early), counting(early)
    save(tmp_path, (optimizer, other))
    optimizer.prepare_load(tmp_path)
    assert optimizer.param_groups[0]["step"] == early
    for one, its_model in ((bare, model), (optimizer, other)):
        train(one, its_model, range(early, early + 2))
    assert weights(other) == weights(model)
    assert groups(optimizer) == groups(bare)


@HOWS
@STEPS_TAKEN
def test_a_rule_that_cannot_step_without_moving_weights_is_loaded_without_a_step_A4(
    how: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = save(tmp_path, counting(2))
    optimizer, other = counting(steps)
    before = weights(other)
    monkeypatch.setattr(CountsInGroup, "calls", 0)
    load(how, optimizer, tmp_path)
    assert CountsInGroup.calls == 0
    assert weights(other) == before
    assert state(optimizer, other) == state(source, model)
    assert optimizer.param_groups[0]["step"] == 2


@HOWS
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_state_follows_the_checkpoint_whichever_half_is_frozen_A5_K4(cls: Any, how: str, tmp_path: Path) -> None:
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    source, model = wrapped(2, cls=cls, names="ab", **options)
    # Frozen since: it keeps the state it has, and so does the checkpoint.
    model["a"].weight.requires_grad_(False)
    train(source, model, range(2, 3), "b")
    save(tmp_path, (source, model))
    want = state(source, model)
    assert {name for name, entries in want.items() if entries} == {"a.weight", "b.weight"}
    optimizer, other = wrapped(1, cls=cls, names="cd", **options)
    for name in "ab":
        other[name].weight.requires_grad_(False)
    load(how, optimizer, tmp_path)
    assert state(optimizer, other) == want
    save(tmp_path / "again", (optimizer, other))
    again, third = wrapped(cls=cls, **options)
    load(how, again, tmp_path / "again")
    assert state(again, third) == want
    # Unfrozen at last: what was saved goes on, what never was trained starts.
    for one, its_model in ((source, model), (optimizer, other)):
        its_model.requires_grad_(True)
        train(one, its_model, range(3, 5))
    assert state(optimizer, other) == state(source, model)


@STEPS_TAKEN
def test_a_checkpoint_that_lacks_a_parameter_is_refused_by_name_or_taken_when_asked_A8(
    steps: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"lr": 0.125, "momentum": 0.9}
    source = model_of("abc")
    optimizer = ShardedStateOptimizer(torch.optim.SGD(source.parameters(), **options), source)
    train(optimizer, source, range(2))
    save(tmp_path, (optimizer, source))
    live, other = wrapped(steps, cls=torch.optim.SGD, **options)
    kept = state(live, other).get("d.weight")
    refused("path", (live, other), tmp_path, "d.weight: this optimizer updates it, the checkpoint does not have it")
    prepared = live.prepare_load(tmp_path, strict=False)
    assert prepared.report.missing == ["d.weight"]
    prepared.commit()
    found = state(live, other)
    assert found.pop("d.weight", None) == kept
    assert found == state(optimizer, source)


def manifest_of(path: Path) -> Any:
    return json.loads(read_tensors(path)["optim.manifest"].numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_was_saved_is_named_and_a_checkpoint_without_it_is_refused_A11(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, other = model_of(dtype=dtype), model_of(dtype=dtype)
    source, optimizer = (ShardedStateOptimizer(torch.optim.AdamW(one.parameters()), one) for one in (model, other))
    train(source, model, range(2))
    save(tmp_path / "good", (source, model))
    named = {
        f"optim.state.{fqn}.{entry}"
        for fqn, record in manifest_of(tmp_path / "good")["parameters"].items()
        for entry, described in record["entries"].items()
        if "dtype" in described
    }
    stored = read_tensors(tmp_path / "good")
    assert named == set(stored) - {"optim.manifest"}
    assert len(named) == 2 * len(NAMES)
    assert all(stored[key].numel() for key in named)
    with rewritten(tmp_path / "good", tmp_path / "emptied") as tensors:
        for key in named:
            del tensors[key]
    refused("path", (optimizer, other), tmp_path / "emptied", "8 entries that the checkpoint does not have")
    before = snapshot(optimizer, other)
    with pytest.raises(CheckpointException):
        load("stock", optimizer, tmp_path / "emptied")
    # With torch's leave to skip what is missing, it is still no load that "succeeds".
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(LoadError, match=r"a.weight: state 'exp_avg' was not read: the load skipped its key"):
        dcp.load({"optim": optimizer}, checkpoint_id=tmp_path / "emptied", planner=planner)
    assert before.diff(snapshot(optimizer, other)) == []
    load("path", optimizer, tmp_path / "good")
    assert state(optimizer, other) == state(source, model)


@HOWS
@pytest.mark.parametrize("lost", ["exp_avg", "step"])
def test_what_can_be_saved_can_be_loaded_though_part_of_it_is_missing_A17(how: str, lost: str, tmp_path: Path) -> None:
    source, model = wrapped(2)
    del source.state[model["b"].weight][lost]
    save(tmp_path, (source, model))
    for steps in (0, 1):
        optimizer, other = wrapped(steps)
        load(how, optimizer, tmp_path)
        assert state(optimizer, other) == state(source, model)


@HOWS
def test_a_live_lr_that_cannot_hold_the_saved_one_is_refused_before_state_changes_A17(how: str, tmp_path: Path) -> None:
    save(tmp_path, wrapped(2, lr=0.25))
    made = wrapped(1, lr=torch.tensor(1), foreach=False)
    refused(how, made, tmp_path, "group 0: 'lr' was saved as 0.25 and cannot be held by torch.int64")


def test_what_is_handed_to_a_save_is_live_memory_and_no_copy_A17() -> None:
    optimizer, _ = wrapped(2)
    live = {value.data_ptr() for entries in optimizer.state.values() for value in entries.values() if value.dim()}
    handles = optimizer.state_dict()
    lent = [tensor.data_ptr() for key, one in handles.items() if key != "manifest" for tensor in one.tensors]
    assert len(lent) == 2 * len(NAMES)
    assert set(lent) == live


EMPTIES: dict[str, Any] = {
    "dict": {},
    "list": [],
    "tuple": (),
    "none": None,
    "nested": {"inner": {}, "list": [[], None]},
}


class KeepsEmpties(torch.optim.Optimizer):
    """Empty containers in its groups and beside its state."""

    def __init__(self, params: Any, kept: dict[str, Any]) -> None:
        super().__init__(params, kept)
        self.kept = kept

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(self.kept)


@HOWS
def test_empty_containers_are_values_like_others_A19(how: str, tmp_path: Path) -> None:
    source, model = save(tmp_path, wrapped(1, cls=KeepsEmpties, compute="dtensor", kept=EMPTIES))
    full: dict[str, Any] = {key: [1, 2] for key in EMPTIES}
    optimizer, other = wrapped(1, cls=KeepsEmpties, compute="dtensor", kept=full)
    load(how, optimizer, tmp_path)
    assert state(optimizer, other) == state(source, model)
    assert groups(optimizer) == groups(source)
    held = optimizer.state[other["a"].weight]
    assert held == EMPTIES
    assert [type(value) for value in held.values()] == [type(value) for value in EMPTIES.values()]


def test_every_entry_that_cannot_be_saved_is_named_A13() -> None:
    optimizer, model = wrapped(1)
    optimizer.state[model["a"].weight] |= {"odd": object(), "strange": [lambda: None]}
    optimizer.state[model["b"].weight][3] = 1  # type: ignore[index]
    with pytest.raises(PlacementError) as caught:
        optimizer.state_dict()
    for text in ("a.weight.odd", "a.weight.strange[0]", "b.weight: state key 3 is a int; only strings are saved"):
        assert text in str(caught.value)
