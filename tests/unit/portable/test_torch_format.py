"""What torch's own functions saved of an unwrapped optimizer is loaded bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh

from shardopt import LoadError, ShardedStateOptimizer
from shardopt.portable.manifest import ElementwiseEntry, ValueEntry
from shardopt.portable.manifest_reader import read_manifest
from shardopt.portable.reader import read_checkpoint
from tests.support.rules import Awkward, bits, groups, state, train, weights
from tests.unit.portable.torch_checkpoints import FLAT, RULES, saved_state, trained, two_groups, wrapped

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@FLAT
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
@pytest.mark.parametrize("rule", RULES)
def test_state_and_groups_are_the_same_bits_and_so_are_the_next_steps(
    rule: str, steps: int, flat: bool, tmp_path: Path
) -> None:
    plain, model = trained(RULES[rule])
    dcp.save({"model": model, "optim": saved_state(plain, model, flat=flat)}, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped(RULES[rule], steps=steps)
    its_model.load_state_dict(model.state_dict())
    before = weights(its_model)
    optimizer.prepare_load(tmp_path).commit()
    assert weights(its_model) == before
    assert state(optimizer, its_model) == state(plain, model)
    assert groups(optimizer) == groups(plain)
    for one, params in ((plain, model), (optimizer, its_model)):
        train(one, params, range(2, 5))
    assert weights(its_model) == weights(model)
    assert state(optimizer, its_model) == state(plain, model)


@FLAT
def test_groups_are_matched_by_their_members_names(flat: bool, tmp_path: Path) -> None:
    plain, model = trained(lambda params: torch.optim.Adam(params, betas=(0.5, 0.75), lr=torch.tensor(0.5)))
    plain.param_groups[1]["betas"] = (0.25, 0.125)
    plain.param_groups[1]["initial_lr"] = 3.0
    dcp.save({"optim": saved_state(plain, model, flat=flat)}, checkpoint_id=tmp_path)
    its_model = Awkward(1)
    params = [*its_model.parameters()]
    lr = torch.tensor(1.0)
    inner = torch.optim.Adam([{"params": params[4:], "lr": lr}, {"params": params[:3]}, {"params": params[3:4]}])
    ShardedStateOptimizer(inner, its_model).prepare_load(tmp_path).commit()
    found = [(group["betas"], group.get("initial_lr"), float(group["lr"])) for group in inner.param_groups]
    assert found == [((0.25, 0.125), 3.0, 0.5), ((0.5, 0.75), None, 0.5), ((0.25, 0.125), 3.0, 0.5)]
    assert inner.param_groups[0]["lr"] is lr


@FLAT
@pytest.mark.parametrize("place", ["", "optim", "a.b"])
def test_the_optimizer_is_found_wherever_it_was_saved(place: str, flat: bool, tmp_path: Path) -> None:
    plain, model = trained()
    saved = saved_state(plain, model, flat=flat)
    for name in reversed(place.split(".") if place else []):
        saved = {name: saved}
    dcp.save({**saved, "model": model}, checkpoint_id=tmp_path)
    for prefix in (None, place):
        optimizer, its_model = wrapped()
        optimizer.prepare_load(tmp_path, prefix=prefix).commit()
        assert state(optimizer, its_model) == state(plain, model)
    with pytest.raises(LoadError, match=rf"nothing'.* nor one in torch's format; found \['{place}'\]"):
        optimizer.prepare_load(tmp_path, prefix="nothing")


@FLAT
def test_values_of_groups_keep_their_types(flat: bool, tmp_path: Path) -> None:
    values = {"lr": np.float32(0.1), "count": np.int64(3), "none": None, "text": "x", "on": True, "pair": (1, 2.5)}
    plain, model = trained()
    plain.param_groups[1].update(values)
    dcp.save({"optim": saved_state(plain, model, flat=flat)}, checkpoint_id=tmp_path)
    optimizer, _ = wrapped()
    optimizer.prepare_load(tmp_path).commit()
    found = {key: optimizer.param_groups[1][key] for key in values}
    assert (found, [*map(type, found.values())]) == (values, [*map(type, values.values())])


def test_a_parameter_named_like_torchs_keys_is_no_optimizer(tmp_path: Path) -> None:
    model = nn.ModuleDict({"param_groups": nn.Linear(2, 1)})
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model)
    model["param_groups"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    optimizer.prepare_load(tmp_path).commit()


def test_several_optimizers_need_a_prefix(tmp_path: Path) -> None:
    plain, model = trained()
    own = wrapped(steps=1)[0]
    saved = {"one": saved_state(plain, model, flat=False), "two": saved_state(plain, model, flat=True), "own": own}
    dcp.save(saved, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped()
    with pytest.raises(LoadError, match=r"3 optimizers are saved here, under \['own', 'one', 'two'\]; pass prefix="):
        optimizer.prepare_load(tmp_path)
    optimizer.prepare_load(tmp_path, prefix="two").commit()
    assert state(optimizer, its_model) == state(plain, model)


def test_names_are_canonical(tmp_path: Path) -> None:
    plain, model = trained()
    saved = saved_state(plain, model, flat=False)
    saved["state"] = {f"_orig_mod.{name}": entries for name, entries in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [f"_orig_mod.{name}" for name in group["params"]]
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped()
    optimizer.prepare_load(tmp_path).commit()
    assert state(optimizer, its_model) == state(plain, model)


def test_names_may_be_parts_of_each_other_and_numbers(tmp_path: Path) -> None:
    model = nn.ModuleDict({"0": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "0_0": nn.Linear(2, 1)})
    plain = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    plain.step()
    for flat in (False, True):
        path = tmp_path / str(flat)
        dcp.save({"model": model, "optim": saved_state(plain, model, flat=flat)}, checkpoint_id=path)
        inner = torch.optim.AdamW(model.parameters())
        ShardedStateOptimizer(inner, model).prepare_load(path).commit()
        assert bits([*inner.state.values()]) == bits([*plain.state.values()])


def test_a_rules_own_dtype_is_kept_when_the_parameters_have_theirs_T8(tmp_path: Path) -> None:
    model = Awkward().bfloat16()
    plain = torch.optim.AdamW(two_groups(model))
    train(plain, model, range(1))
    saved = saved_state(plain, model, flat=False)
    for entries in saved["state"].values():
        entries.update(exp_avg=entries["exp_avg"].float(), exp_avg_sq=entries["exp_avg_sq"].float())
    dcp.save({"optim": saved, "model": model}, checkpoint_id=tmp_path)
    other = Awkward(1).bfloat16()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(two_groups(other)), other)
    optimizer.prepare_load(tmp_path).commit()
    assert bits(optimizer.state[other.matrix]["exp_avg"]) == bits(saved["state"]["matrix"]["exp_avg"])


@pytest.mark.parametrize("rule", ["AdamW", "ASGD", "NAdam"])
def test_scalars_of_a_scalar_parameter_are_told_from_its_state(rule: str, tmp_path: Path) -> None:
    # Where they live may differ: a step counter is on the host, a moment on the parameter's device.
    dcp.save({"optim": saved_state(*trained(RULES[rule]), flat=False)}, checkpoint_id=tmp_path)
    optimizer, _ = wrapped(RULES[rule])
    handles = read_checkpoint(tmp_path, optimizer._inventory.by_fqn)
    entries = {
        name: {key: type(entry) for key, entry in record.entries.items()}
        for name, record in read_manifest(handles["manifest"].contents().numpy().tobytes()).parameters.items()
    }
    assert entries["scalar"] == entries["matrix"]
    assert set(entries["matrix"].values()) == {ElementwiseEntry, ValueEntry}


def test_sharded_tensors_of_old_are_read_like_any_other_J6(mesh: DeviceMesh, tmp_path: Path) -> None:
    """As FSDP1 wrote them: the metadata has global shapes, so nothing tells them from DTensors."""

    def old(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.dim() or not tensor.numel():
            return tensor
        shard = Shard.from_tensor_and_offsets(tensor.contiguous(), [0] * tensor.dim(), dist.get_rank())
        return init_from_local_shards([shard], *tensor.shape)

    plain, model = trained()
    saved = saved_state(plain, model, flat=False)
    saved["state"] = {name: {key: old(one) for key, one in own.items()} for name, own in saved["state"].items()}
    assert isinstance(saved["state"]["matrix"]["exp_avg"], ShardedTensor)
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped()
    optimizer.prepare_load(tmp_path).commit()
    assert state(optimizer, its_model) == state(plain, model)
