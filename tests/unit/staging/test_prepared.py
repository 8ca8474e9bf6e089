"""A commit puts values in place and touches nothing else: no object, no weight, no gradient, no generator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.rules import RULES, Awkward, Rule, groups, state, train
from tests.support.snapshot import Snapshot, snapshot


def wrap(model: nn.Module, **options: Any) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), **options), model)


def save(path: Path, **parts: Any) -> None:
    with warnings.catch_warnings():
        # DCP warns of every save and load without a process group.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(parts, checkpoint_id=path)


def load(path: Path, **parts: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(parts, checkpoint_id=path)


def by(how: str, path: Path, optimizer: ShardedStateOptimizer) -> None:
    if how == "stock":
        load(path, optim=optimizer)
    else:
        optimizer.prepare_load(path).commit()


def trained(steps: int, **options: Any) -> tuple[ShardedStateOptimizer, Awkward]:
    model = Awkward()
    optimizer = wrap(model, **options)
    train(optimizer, model, range(steps))
    return optimizer, model


HOWS = pytest.mark.parametrize("how", ["stock", "path"])


def unexpected(before: Snapshot, after: Snapshot, allowed: tuple[str, ...]) -> list[str]:
    """Differences outside of what may change, and every object that was replaced anywhere."""
    found = before.diff(after, ignore=["attribute._changes", "attribute._prepared"])
    return [line for line in found if "replaced" in line or "moved" in line or not line.startswith(allowed)]


@HOWS
def test_J7_C3_a_warm_load_keeps_every_object(how: str, tmp_path: Path) -> None:
    source, model = trained(2, lr=torch.tensor(0.25), fused=True)
    save(tmp_path, optim=source)
    optimizer, other = trained(3, lr=torch.tensor(0.5), fused=True)
    other.give_gradients(9)
    optimizer.register_step_post_hook(lambda *_: None)
    other.vector.register_hook(lambda grad: grad)
    lr = optimizer.param_groups[0]["lr"]
    before = snapshot(optimizer, other)
    by(how, tmp_path, optimizer)
    after = snapshot(optimizer, other)
    # The group's lr is the tensor in the defaults, as torch made it.
    assert unexpected(before, after, ("state.", "group[0]['lr']", "attribute.optimizers[0].defaults['lr']")) == []
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25
    assert state(optimizer, other) == state(source, model)


@HOWS
def test_A4_T1_a_fresh_load_with_gradients_present_brings_all_state_and_nothing_else(how: str, tmp_path: Path) -> None:
    source, model = trained(2, lr=0.25)
    save(tmp_path, optim=source)
    optimizer, other = trained(0, lr=0.5)
    other.give_gradients(9)
    before = snapshot(optimizer, other)
    by(how, tmp_path, optimizer)
    assert unexpected(before, snapshot(optimizer, other), ("state", "group[0]['lr']")) == []
    assert state(optimizer, other) == state(source, model)
    assert groups(optimizer) == groups(source)


@HOWS
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("rule", RULES[::5], ids=str)
def test_A4_loading_steps_nothing(rule: Rule, warm: bool, how: str, tmp_path: Path) -> None:
    model, other = Awkward(), Awkward()
    source = ShardedStateOptimizer(rule.build(model.parameters()), model)
    optimizer = ShardedStateOptimizer(rule.build(other.parameters()), other)
    train(source, model, range(2))
    save(tmp_path, optim=source)
    if warm:
        train(optimizer, other, range(7, 10))
    other.give_gradients(9)
    before = snapshot(optimizer, other)
    by(how, tmp_path, optimizer)
    assert unexpected(before, snapshot(optimizer, other), ("state", "group[0]")) == []
    assert state(optimizer, other) == state(source, model)
    assert groups(optimizer) == groups(source)


@HOWS
def test_A10_sgd_without_momentum_stays_free_of_state(how: str, tmp_path: Path) -> None:
    model, other = Awkward(), Awkward()
    source, optimizer = (ShardedStateOptimizer(torch.optim.SGD(m.parameters()), m) for m in (model, other))
    for one, its_model in ((source, model), (optimizer, other)):
        train(one, its_model, range(2))
        # Torch leaves {"momentum_buffer": None} or {} behind, by version and kernel.
        one.state.clear()
    assert set(source.state_dict()) == {"manifest"}
    save(tmp_path, optim=source)
    by(how, tmp_path, optimizer)
    assert len(optimizer.state) == 0
    train(optimizer, other, [2])
    assert optimizer.sharded_state() == {}


@HOWS
def test_an_empty_dict_is_not_state(how: str, tmp_path: Path) -> None:
    source, _ = trained(0)
    with_empty, model = trained(0)
    for param in model.parameters():
        assert with_empty.state[param] == {}  # asking makes one
    assert with_empty.state_dict().keys() == source.state_dict().keys()
    save(tmp_path, optim=with_empty)
    optimizer, other = trained(2)
    by(how, tmp_path, optimizer)
    assert state(optimizer, other) == {}
    train(optimizer, other, [0])


@HOWS
def test_a_warm_optimizer_loses_the_state_that_the_checkpoint_lacks(how: str, tmp_path: Path) -> None:
    source, model = trained(1)
    del source.state[model.matrix]
    save(tmp_path, optim=source)
    optimizer, other = trained(3)
    optimizer.state[other.vector]["extra"] = torch.ones(())
    by(how, tmp_path, optimizer)
    assert other.matrix not in optimizer.state
    assert set(optimizer.state[other.vector]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state(optimizer, other) == state(source, model)


@HOWS
def test_A6_a_parameter_that_was_never_used_is_started_later(how: str, tmp_path: Path) -> None:
    source, _ = trained(2)
    save(tmp_path, optim=source)
    optimizer, other = trained(0)
    by(how, tmp_path, optimizer)
    assert other.idle not in optimizer.state
    other.give_gradients(2)
    other.idle.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[other.idle]["step"] == 1
    assert optimizer.state[other.matrix]["step"] == 3


def test_dropping_a_prepared_load_changes_nothing(tmp_path: Path) -> None:
    source, _ = trained(2)
    save(tmp_path, optim=source)
    optimizer, other = trained(3)
    before = snapshot(optimizer, other)
    prepared = optimizer.prepare_load(tmp_path)
    assert len(prepared.report.restored) == 3 * 6
    assert prepared.report.notes == []
    del prepared
    assert before.diff(snapshot(optimizer, other), ignore=["attribute._changes", "attribute._prepared"]) == []


def test_a_state_dict_of_another_optimizer_is_copied_not_shared() -> None:
    source, model = trained(2)
    optimizer, other = trained(0)
    optimizer.load_state_dict(source.state_dict())
    assert state(optimizer, other) == state(source, model)
    mine = {value.data_ptr() for entries in optimizer.state.values() for value in entries.values() if value.numel()}
    theirs = {value.data_ptr() for entries in source.state.values() for value in entries.values() if value.numel()}
    assert not mine & theirs


def test_torchs_own_state_dict_is_refused_with_what_it_is() -> None:
    optimizer, other = trained(2)
    before = snapshot(optimizer, other)
    with pytest.raises(LoadError, match=r"no 'manifest' of shardopt.*torch's own optimizer state dict, which names"):
        optimizer.load_state_dict(optimizer.optimizers[0].state_dict())
    with pytest.raises(LoadError, match=r"no 'manifest' of shardopt \(its keys begin \[\]\). Load into what"):
        optimizer.load_state_dict({})
    assert before.diff(snapshot(optimizer, other)) == []


def test_a_state_dict_made_for_other_boxes_is_refused(mesh: DeviceMesh) -> None:
    optimizer, other = trained(2)
    handles = optimizer.state_dict()
    handles["state.vector.exp_avg"].box = type(handles["state.vector.exp_avg"].box)((1,), (6,))
    before = snapshot(optimizer, other)
    with pytest.raises(LoadError, match=r"vector: state 'exp_avg': the state dict was made for the box \(1,\)\+\(6,\)"):
        optimizer.load_state_dict(handles)
    assert before.diff(snapshot(optimizer, other)) == []


def test_an_absent_handle_in_place_of_state_is_refused() -> None:
    optimizer, other = trained(2)
    handles = optimizer.state_dict() | {"state.vector.exp_avg": wrap(other).state_dict()["state.vector.exp_avg"]}
    with pytest.raises(LoadError, match="vector: state 'exp_avg'"):
        optimizer.load_state_dict(handles)


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    source, _ = trained(1)
    save(tmp_path, optim=source)
    model = nn.ParameterDict({"vector": nn.Parameter(torch.ones(2)), "other": nn.Parameter(torch.ones(2))})
    optimizer = ShardedStateOptimizer(torch.optim.Adam(model.values(), lr=torch.ones(1)), model)
    optimizer.param_groups[0]["lr"] = torch.ones(2, dtype=torch.int32)
    with pytest.raises(LoadError) as caught:
        optimizer.prepare_load(tmp_path)
    text = str(caught.value)
    for part in ("other: this optimizer updates", "matrix: the checkpoint has", "saved by torch.optim.adamw.AdamW"):
        assert part in text
    assert "vector: saved with shape (7,), this model has (2,)" in text
    assert "group 0: 'lr' was saved as 0.001 and cannot be held by torch.int32" in text
    assert len(caught.value.problems) == 10


@HOWS
def test_a_checkpoint_of_plain_parameters_loads_into_dtensors_and_back(
    how: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    plain, sharded = nn.Linear(3, 5), nn.Linear(3, 5)
    fully_shard(sharded, mesh=mesh)
    one, two = wrap(plain), wrap(sharded)
    for param in plain.parameters():
        param.grad = torch.ones_like(param)
    one.step()
    dcp.save({"optim": one}, checkpoint_id=tmp_path / "plain")
    by(how, tmp_path / "plain", two)
    dcp.save({"optim": two}, checkpoint_id=tmp_path / "sharded")
    one.state.clear()
    by(how, tmp_path / "sharded", one)
    assert torch.equal(two.sharded_state()["state.weight.exp_avg"].full_tensor(), one.state[plain.weight]["exp_avg"])
