"""Groups and lr that changed between save and load, and state dicts that do not fit: right values, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot
from tests.unit.test_unknown_classes import Keeper

# Saved without a process group, by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HOWS = pytest.mark.parametrize("how", ["stock", "path"])
WARM = pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
Made = tuple[ShardedStateOptimizer, nn.ModuleDict]
Groups = Sequence[tuple[str, dict[str, Any]]]


def made(groups: Groups, *, steps: int = 0, model: nn.ModuleDict | None = None, **options: Any) -> Made:
    """An optimizer whose groups hold the layers that the letters name."""
    torch.manual_seed(0)
    model = model or nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in "abcd"})
    listed = [{"params": [model[name].weight for name in names], **values} for names, values in groups]
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(listed, **{"lr": 0.5, "foreach": False, **options}), model)
    for step in range(steps):
        for index, layer in enumerate(model.values()):
            layer.weight.grad = torch.arange(6.0).reshape(2, 3) + 100 * index + step
        optimizer.step()
    return optimizer, model


def held(one: Made) -> dict[str, Any]:
    """State by name, and the values of each parameter's group that differ between groups here."""
    optimizer, model = one
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            found |= {f"{names[id(param)]}/{key}": value for key, value in optimizer.state.get(param, {}).items()}
            found |= {f"{names[id(param)]}: {key}": group[key] for key in ("lr", "weight_decay", "betas")}
    return found


def load(path: Path, how: str, optimizer: ShardedStateOptimizer) -> None:
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    else:
        optimizer.prepare_load(path).commit()


def refused(path: Path, how: str, one: Made, text: str) -> None:
    """The load is an error with this text, and nothing has changed."""
    before = snapshot(*one)
    with pytest.raises(LoadError, match=text):
        load(path, how, one[0])
    assert before.diff(snapshot(*one)) == []


HIGH, LOW = {"lr": 0.25, "weight_decay": 0.5}, {"lr": 0.125, "weight_decay": 0.0, "betas": (0.5, 0.75)}
PAIR: Groups = [("ab", HIGH), ("cd", LOW)]
SAME: Groups = [("abcd", HIGH)]
COMES_BACK: dict[str, tuple[Groups, Groups]] = {
    "same": (PAIR, [("ab", {}), ("cd", {})]),
    "other order of groups": (PAIR, [("cd", {}), ("ab", {})]),
    "other order of parameters": (PAIR, [("ba", {}), ("dc", {})]),
    "1 -> 2": (SAME, [("ab", {}), ("cd", {})]),
    "2 -> 3": (PAIR, [("a", {}), ("b", {}), ("dc", {})]),
    "2 -> 1, of equal values": ([("ab", HIGH), ("cd", HIGH)], [("abcd", {})]),
    "one empty group": ([*PAIR, ("", {})], [("ab", {}), ("cd", {}), ("", {})]),
    "two empty groups": ([("", {}), *PAIR, ("", {})], [("ab", {}), ("", {}), ("cd", {}), ("", {})]),
    "empty groups on one side": (PAIR, [("", {}), ("ab", {}), ("cd", {})]),
}


@HOWS
@WARM
@pytest.mark.parametrize("case", COMES_BACK)
def test_lifecycle_1e_each_parameter_keeps_its_values(case: str, steps: int, how: str, tmp_path: Path) -> None:
    saved_as, loaded_as = COMES_BACK[case]
    source = made(saved_as, steps=2)
    dcp.save({"optim": source[0]}, checkpoint_id=tmp_path)
    other = made(loaded_as, steps=steps)
    load(tmp_path, how, other[0])
    assert value_differences(held(source), held(other)) == []


CONFLICTS: dict[str, tuple[Groups, str]] = {
    "2 -> 1": (
        [("abcd", {})],
        r"group 0: its parameters were saved with different 'lr': a\.weight with 0\.25, c\.weight",
    ),
    "2 -> 2, other members": ([("ac", {}), ("bd", {})], r"group 1: its parameters were saved with different 'betas'"),
    "a key that some lack": ([("abcd", {"tag": 1})], r"different 'tag'"),
}


@HOWS
@WARM
@pytest.mark.parametrize("case", CONFLICTS)
def test_lifecycle_1e_values_that_cannot_all_be_kept_are_refused(
    case: str, steps: int, how: str, tmp_path: Path
) -> None:
    loaded_as, text = CONFLICTS[case]
    dcp.save({"optim": made([("ab", {**HIGH, "tag": 1}), ("cd", LOW)], steps=2)[0]}, checkpoint_id=tmp_path)
    refused(tmp_path, how, made(loaded_as, steps=steps), text)


@HOWS
@WARM
def test_lifecycle_1e_keys_that_one_side_alone_has_are_kept(steps: int, how: str, tmp_path: Path) -> None:
    source = made([("abcd", {"tag": "mine", "initial_lr": 0.75})], steps=2)
    dcp.save({"optim": source[0]}, checkpoint_id=tmp_path)
    other = made([("abcd", {"new": 7})], steps=steps)
    load(tmp_path, how, other[0])
    group = other[0].param_groups[0]
    assert (group["tag"], group["initial_lr"], group["new"]) == ("mine", 0.75, 7)
    notes = other[0].prepare_load(tmp_path).report.notes
    assert "group 0: ['new'] is not in the checkpoint and keeps its live value." in notes


LRS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "tensor": torch.tensor,
    "one element": lambda lr: torch.tensor([lr]),
    "float64": lambda lr: torch.tensor(lr, dtype=torch.float64),
}


@HOWS
@WARM
@pytest.mark.parametrize("live", ["float", "tensor", "float64"])
@pytest.mark.parametrize("saved", ["float", "tensor", "float64"])
def test_lifecycle_1e_lr_keeps_its_live_kind_and_takes_the_saved_value(
    saved: str, live: str, steps: int, how: str, tmp_path: Path
) -> None:
    dcp.save({"optim": made([("abcd", {"lr": LRS[saved](0.25)})], steps=2)[0]}, checkpoint_id=tmp_path)
    lr = LRS[live](0.5)
    other = made([("abcd", {"lr": lr})], steps=steps)
    load(tmp_path, how, other[0])
    now = other[0].param_groups[0]["lr"]
    assert type(now) is type(lr)
    assert float(now) == 0.25
    if isinstance(lr, Tensor):
        assert now is lr
        assert now.dtype == LRS[live](0.5).dtype
    made_step(other)


def made_step(one: Made) -> None:
    for layer in one[1].values():
        layer.weight.grad = torch.ones(2, 3)
    one[0].step()


@pytest.mark.parametrize("how", ["stock", "path"])
def test_lifecycle_1e_a_load_that_fails_has_not_written_the_tensor_lr(how: str, tmp_path: Path) -> None:
    source = made([("abcd", {"lr": torch.tensor(0.25)})], steps=2)
    source[0].state[source[1]["d"].weight]["exp_avg"][0, 0] = float("nan")
    dcp.save({"optim": source[0]}, checkpoint_id=tmp_path)
    other = made([("abcd", {"lr": torch.tensor(0.5)})], steps=1)
    refused(tmp_path, how, other, r"d\.weight: state 'exp_avg' holds NaN")
    assert other[0].param_groups[0]["lr"] == 0.5


def loaded_dict(path: Path, one: Made, change: Callable[[dict[str, Any]], None], **planner: Any) -> None:
    """Loads what DCP has read, after a change to the state dict (before the reading, if DCP is told to allow it)."""
    state_dict = one[0].state_dict()
    if planner:
        dcp.load({"optim": state_dict}, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(**planner))
    else:
        dcp.load({"optim": state_dict}, checkpoint_id=path)
    change(state_dict)
    one[0].load_state_dict(state_dict)


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    return lambda state_dict: [state_dict.pop(key) for key in keys] and None


LOST: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a tensor": (drop("state.b.weight.exp_avg"), r"b\.weight: state 'exp_avg' is in the checkpoint, but"),
    "a parameter": (drop("state.b.weight.exp_avg", "state.b.weight.exp_avg_sq"), r"b\.weight: state 'exp_avg_sq'"),
    "the manifest": (drop("manifest"), r"has no 'manifest' of shardopt"),
    "a pickled one": (
        lambda one: one.update({"state.b.weight.exp_avg": 3}),
        r"not stored as a tensor but as a pickled int",
    ),
    "a plain tensor": (
        lambda one: one.update({"state.b.weight.exp_avg": torch.ones(2, 3)}),
        r"but as a pickled Tensor",
    ),
}


@WARM
@pytest.mark.parametrize("case", LOST)
def test_lifecycle_1f_a_state_dict_that_lacks_part_is_refused(case: str, steps: int, tmp_path: Path) -> None:
    dcp.save({"optim": made(PAIR, steps=2)[0]}, checkpoint_id=tmp_path)
    other = made(PAIR, steps=steps)
    before = snapshot(*other)
    with pytest.raises(LoadError, match=LOST[case][1]):
        loaded_dict(tmp_path, other, LOST[case][0])
    assert before.diff(snapshot(*other)) == []


def test_lifecycle_1f_keys_of_nobody_are_no_state(tmp_path: Path) -> None:
    source = made(PAIR, steps=2)
    dcp.save(
        {"optim": {**source[0].state_dict(), "state.e.weight.exp_avg": torch.ones(2), "x": 1}}, checkpoint_id=tmp_path
    )
    for how in ("stock", "path"):
        other = made(PAIR, steps=1)
        load(tmp_path, how, other[0])
        assert value_differences(held(source), held(other)) == []


@WARM
def test_lifecycle_1f_a_partial_load_of_a_smaller_checkpoint_is_refused(steps: int, tmp_path: Path) -> None:
    dcp.save({"optim": made([("abc", {})], steps=2)[0]}, checkpoint_id=tmp_path)
    other = made([("abcd", {})], steps=steps)
    before = snapshot(*other)
    with pytest.raises(LoadError, match=r"d\.weight: this optimizer updates it, the checkpoint does not have it"):
        loaded_dict(tmp_path, other, lambda one: None, allow_partial_load=True)
    assert before.diff(snapshot(*other)) == []


@HOWS
@WARM
def test_lifecycle_1f_entries_that_one_side_alone_has_are_never_dropped(steps: int, how: str, tmp_path: Path) -> None:
    dcp.save({"optim": made([("abcd", {"amsgrad": True})], steps=2)[0]}, checkpoint_id=tmp_path / "more")
    dcp.save({"optim": made([("abcd", {})], steps=2)[0]}, checkpoint_id=tmp_path / "less")
    if how == "stock":
        refused(
            tmp_path / "more", how, made(SAME, steps=steps), r"a\.weight: state 'max_exp_avg_sq' is in the checkpoint"
        )
        other = made([("abcd", {"amsgrad": True})], steps=steps)
        before = snapshot(*other)
        with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .*max_exp_avg_sq"):
            load(tmp_path / "less", how, other[0])
        assert before.diff(snapshot(*other)) == []
    else:
        other = made(SAME, steps=steps)
        load(tmp_path / "more", how, other[0])
        # The option comes back with the state that it needs.
        assert other[0].param_groups[0]["amsgrad"] is True
        assert "max_exp_avg_sq" in other[0].state[other[1]["a"].weight]
        made_step(other)
        other = made([("abcd", {"amsgrad": True})], steps=steps)
        load(tmp_path / "less", how, other[0])
        assert other[0].param_groups[0]["amsgrad"] is False
        assert "max_exp_avg_sq" not in other[0].state[other[1]["a"].weight]
        made_step(other)


def wide(width: int, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(width, 2, bias=False) for name in "abcd"}).to(dtype)


@HOWS
@WARM
def test_lifecycle_1f_another_shape_is_refused(steps: int, how: str, tmp_path: Path) -> None:
    source = made(SAME, steps=2)
    dcp.save({"optim": source[0]}, checkpoint_id=tmp_path)
    other = made(SAME, model=wide(4))
    if steps:
        for layer in other[1].values():
            layer.weight.grad = torch.ones(2, 4)
        other[0].step()
    refused(tmp_path, how, other, r"d\.weight: saved with shape \(2, 3\), this model has \(2, 4\)")
    before = snapshot(*other)
    with pytest.raises(LoadError, match=r"d\.weight: saved with shape"):
        other[0].load_state_dict(source[0].state_dict())
    assert before.diff(snapshot(*other), ignore=["attribute._prepared"]) == []


def keeper(value: Callable[[Tensor], Any] | None) -> Made:
    model = wide(3)
    keep = (lambda param: {}) if value is None else (lambda param: {"kept": value(param)})
    optimizer = ShardedStateOptimizer(Keeper(model.parameters(), keep), model, compute="dtensor")
    made_step((optimizer, model))
    return optimizer, model


KINDS: dict[str, Callable[[Tensor], Any] | None] = {
    "tensor": lambda param: torch.full((3,), 2.5),
    "0-d tensor": lambda param: torch.tensor(2.5),
    "int": lambda param: 3,
    "None": lambda param: None,
    "list": lambda param: [torch.ones(2), 1],
    "int8": lambda param: torch.ones(3, dtype=torch.int8),
    "other shape": lambda param: torch.ones(4),
    "nothing": None,
}


@HOWS
@pytest.mark.parametrize("live", KINDS)
@pytest.mark.parametrize("saved", KINDS)
def test_lifecycle_1f_state_of_another_kind_takes_the_place_of_the_live_one(
    saved: str, live: str, how: str, tmp_path: Path
) -> None:
    source, model = keeper(KINDS[saved])
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer, other = keeper(KINDS[live])
    load(tmp_path, how, optimizer)
    want = {name: source.state.get(param, {}) for name, param in model.named_parameters()}
    got = {name: optimizer.state.get(param, {}) for name, param in other.named_parameters()}
    assert value_differences({k: dict(v) for k, v in want.items()}, {k: dict(v) for k, v in got.items()}) == []


@HOWS
@WARM
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_lifecycle_1f_another_dtype_is_refused(dtype: torch.dtype, steps: int, how: str, tmp_path: Path) -> None:
    dcp.save({"optim": made(SAME, steps=2)[0]}, checkpoint_id=tmp_path)
    other = made(SAME, model=wide(3, dtype))
    if steps:
        for layer in other[1].values():
            layer.weight.grad = torch.ones(2, 3, dtype=dtype)
        other[0].step()
    refused(tmp_path, how, other, r"d\.weight: state 'exp_avg' was saved as float32, this optimizer keeps")
