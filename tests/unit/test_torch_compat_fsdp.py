"""What shardopt relies on in FSDP2 and DTensor: each test here fails first when torch changes that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardopt.torch_compat import fsdp_offloaded, fsdp_stand_ins, local_shard, placed_like, spec_token


def test_fsdp_stand_ins_lead_back_to_the_sharded_parameters(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = dict(model.named_parameters())
    assert not any(shown in fsdp_stand_ins() for shown in map(id, params.values()))
    with torch.no_grad():
        model(torch.ones(1, 2))
    shown = dict(model.named_parameters())
    # The root stays whole after a forward pass, its child does not.
    assert [name for name in params if shown[name] is not params[name]] == ["1.weight", "1.bias"]
    stand_ins = fsdp_stand_ins()
    assert all(stand_ins.get(id(shown[name]), shown[name]) is params[name] for name in params)
    assert not set(stand_ins) & set(map(id, params.values()))
    model.reshard()
    assert all(param is params[name] for name, param in model.named_parameters())


def test_fsdp_stand_ins_know_replicas_and_parameters_on_a_smaller_mesh(mesh: DeviceMesh) -> None:
    model: Any = nn.Linear(2, 3)
    replicate(model, mesh=mesh)
    params = dict(model.named_parameters())
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert all(fsdp_stand_ins()[id(shown)] is params[name] for name, shown in model.named_parameters())
    # What a module shows when reshard_after_forward is a number. One rank has no smaller mesh, so it is put there.
    weight, _ = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    weight._sharded_post_forward_param = nn.Parameter(torch.ones(1))
    assert fsdp_stand_ins()[id(weight._sharded_post_forward_param)] is params["weight"]


def test_fsdp_stand_ins_read_one_group_and_several(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Linear(2, 3)
    fully_shard(model, mesh=mesh)
    group = model._get_fsdp_state()._fsdp_param_group
    with torch.no_grad():
        model(torch.ones(1, 2))
    shown = set(map(id, model.parameters()))

    class Single:
        _fsdp_param_group: Any = None

    class Several:
        _fsdp_param_groups = (group, group)

    monkeypatch.setattr(model, "_get_fsdp_state", Single, raising=False)
    assert not shown & set(fsdp_stand_ins())
    Single._fsdp_param_group = group
    assert shown <= set(fsdp_stand_ins())
    monkeypatch.setattr(model, "_get_fsdp_state", Several, raising=False)
    assert shown <= set(fsdp_stand_ins())


def test_fsdp_offloaded_are_the_parameters_under_the_policy(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh)
    first, last = (set(map(id, part.parameters())) for part in model)
    assert first <= fsdp_offloaded()
    assert not last & fsdp_offloaded()
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert first <= fsdp_offloaded()


def test_placed_like_keeps_the_local_tensor_where_it_is() -> None:
    # The mesh has no hardware behind it: whatever moved the tensor there would fail.
    elsewhere = DeviceMesh("cuda", torch.tensor([0, 1]), _init_backend=False, _rank=1)
    whole = torch.arange(6.0).reshape(3, 2)
    made = DTensor(whole[2:], DTensorSpec(elsewhere, (Shard(0),), tensor_meta=_meta(whole)), requires_grad=False)
    local = torch.ones(1, 2, dtype=torch.bfloat16)
    placed = placed_like(made, local)
    assert placed.shape == (3, 2)
    assert (placed.dtype, placed.stride(), placed.placements) == (torch.bfloat16, (2, 1), (Shard(0),))
    assert placed.device_mesh is elsewhere
    assert local_shard(placed).data_ptr() == local.data_ptr()
    assert local_shard(placed).device.type == "cpu"


def test_placed_like_is_what_from_local_makes(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)]))
    local = torch.ones(3, 2)
    ours = placed_like(param, local)
    theirs = DTensor.from_local(local, mesh, [Shard(0)], shape=param.shape, stride=param.stride())
    assert spec_token(ours) == spec_token(theirs)
    assert not ours.requires_grad
    ours.add_(1)
    assert torch.equal(ours.full_tensor(), torch.full((3, 2), 2.0))
    assert torch.equal(local, torch.full((3, 2), 2.0))


def _meta(whole: torch.Tensor) -> TensorMeta:
    return TensorMeta(whole.shape, whole.stride(), whole.dtype)
