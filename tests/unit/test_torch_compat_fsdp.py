"""What shardopt relies on in FSDP2 and DTensor: each test here fails first when torch changes that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
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
    assert fsdp_stand_ins(model) == {}
    with torch.no_grad():
        model(torch.ones(1, 2))
    shown = dict(model.named_parameters())
    # The root stays whole after a forward pass, its child does not.
    assert [name for name in params if shown[name] is not params[name]] == ["1.weight", "1.bias"]
    stand_ins = fsdp_stand_ins(model)
    assert all(stand_ins.get(id(shown[name]), shown[name]) is params[name] for name in params)
    model.reshard()
    assert all(param is params[name] for name, param in model.named_parameters())
    assert fsdp_stand_ins(nn.Linear(2, 2)) == {}


def test_fsdp_stand_ins_know_parameters_that_are_sharded_on_a_smaller_mesh_after_forward(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    fully_shard(model[0], mesh=mesh, reshard_after_forward=1)
    fully_shard(model, mesh=mesh)
    params = dict(model.named_parameters())
    with torch.no_grad():
        model(torch.ones(1, 2))
    (group,) = [model[0]._get_fsdp_state()._fsdp_param_group]
    # On one rank FSDP has no smaller mesh, so the object is put where the larger ones would have it.
    (weight, _) = group.fsdp_params
    weight._sharded_post_forward_param = nn.Parameter(torch.ones(1))
    assert fsdp_stand_ins(model)[id(weight._sharded_post_forward_param)] is params["0.weight"]


def test_fsdp_stand_ins_read_one_group_and_several(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    fully_shard(model, mesh=mesh)
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    with torch.no_grad():
        model(torch.ones(1, 2))
    expected = fsdp_stand_ins(model)
    assert len(expected) == 2

    class Single:
        _fsdp_param_group: Any = None

    class Several:
        _fsdp_param_groups = (group, group)

    for other, found in ((Single, {}), (Several, expected)):
        monkeypatch.setattr(model, "_get_fsdp_state", other, raising=False)
        assert fsdp_stand_ins(model) == found
    Single._fsdp_param_group = group
    monkeypatch.setattr(model, "_get_fsdp_state", Single, raising=False)
    assert fsdp_stand_ins(model) == expected


def test_fsdp_offloaded_are_the_parameters_under_the_policy(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh)
    assert fsdp_offloaded(model) == set(map(id, model[0].parameters()))
    with torch.no_grad():
        model[0](torch.ones(1, 2))
    assert fsdp_offloaded(model) == {id(fsdp_stand_ins(model).get(id(p), p)) for p in model[0].parameters()}


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
