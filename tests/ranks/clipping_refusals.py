"""Jobs in which clipping is refused, or in which ranks have other parameters or meshes than usual."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardopt import RankFailureError, ScopeError, clip_grad_norm_
from tests.ranks.clipping import sharded_pair, spied


def with_gradient(value: Tensor, mesh: DeviceMesh, placements: Any) -> nn.Parameter:
    """A parameter whose gradient is the value, placed alike."""
    param = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, placements))
    param.grad = distribute_tensor(value.clone(), mesh, placements)  # which may keep the memory
    return param


def gradient_job(case: str) -> tuple[str, str, bool]:
    """One rank has a gradient that cannot be counted; the error and whether this rank's other gradient is as it was."""
    sharded, replicated, full = sharded_pair()
    mesh, is_last = sharded.device_mesh, dist.get_rank() == dist.get_world_size() - 1
    plain = nn.Parameter(torch.zeros(5, 2))
    sharded.grad = distribute_tensor(full, mesh, [Shard(0)])
    if case == "sparse" and is_last:
        plain.grad = full.to_sparse()
    elif case == "max" and is_last:
        replicated.grad = DTensor.from_local(full, mesh, [Partial("max")], run_check=False)
    elif case == "mesh" and is_last:
        other = DeviceMesh("cpu", torch.tensor([dist.get_rank()]), _init_backend=False)
        replicated.grad = DTensor.from_local(full, other, [Replicate()], run_check=False)
    elif case == "usual here, partial there":
        placement = Partial() if is_last else Replicate()
        replicated.grad = DTensor.from_local(full, mesh, [placement], run_check=False)
    elif case == "sharded here, partial there":
        placement, local = (Partial(), full) if is_last else (Shard(0), full.chunk(dist.get_world_size())[0])
        replicated.grad = DTensor.from_local(local, mesh, [placement], run_check=False, shape=(5, 2), stride=(2, 1))
    try:
        clip_grad_norm_([sharded, replicated, plain], 1.0)
    except (RankFailureError, ScopeError) as error:
        return type(error).__name__, str(error), torch.equal(sharded.grad.full_tensor(), full)
    raise AssertionError("nothing was raised")


def crossing_job(dense: str) -> tuple[str, str, int]:
    """Dense parameters on pairs of ranks, or on all of them; experts on the other pairs, others on each."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = grid["b"] if dense == "pairs" else init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    experts = grid["a"]
    if dense == "namesakes":  # axes of the same names, but of other ranks
        mesh, experts = grid, DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("a", "b"))["a"]
    shards = [Shard(0)] * mesh.ndim
    params = [with_gradient(torch.ones(4, 2), mesh, shards), with_gradient(torch.ones(4, 2), experts, [Shard(0)])]
    caught: list[BaseException] = []

    def attempt() -> Tensor:
        try:
            return clip_grad_norm_(params, 1.0)
        except ScopeError as error:
            caught.append(error)
            return torch.zeros(())

    _, count = spied(attempt)
    return type(caught[0]).__name__, str(caught[0]), count


def slice_on_some_ranks_job() -> tuple[str, str]:
    """A part of the model that only ranks 0 and 1 have, on a mesh of their own; all ranks share the rest."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    params = [with_gradient(torch.ones(4, 2), mesh, [Shard(0)])]
    pair = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("pair",))
    if dist.get_rank() < 2:
        params.append(with_gradient(torch.ones(4, 2), pair, [Shard(0)]))
    try:
        clip_grad_norm_(params, 1.0)
    except ScopeError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def several_meshes_job(order: float) -> tuple[Tensor, Tensor, int]:
    """A mesh of all ranks, two 2-d ones, slices of either, a transposed slice and a plain parameter."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert data", "expert"))
    full = torch.arange(1.0, 19.0).reshape(6, 3) / 8
    places: list[tuple[DeviceMesh, list[Any]]] = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Replicate(), Shard(1)]),
        (grid, [Shard(0), Replicate()]),
        (grid, [Replicate(), Replicate()]),
        (grid["data"], [Shard(0)]),
        (grid["tensor"], [Shard(1)]),
        (grid["tensor"], [Replicate()]),
        (other, [Shard(0), Shard(0)]),
        (other["expert data"], [Shard(1)]),
    ]
    values = [full * (index + 1) for index in range(len(places) + 1)]
    params = [with_gradient(value, *place) for value, place in zip(values, places, strict=False)]
    plain = nn.Parameter(torch.zeros_like(full))
    plain.grad = values[-1].clone()
    norm, count = spied(lambda: clip_grad_norm_([*params, plain], 1.0, order))
    return norm, torch.linalg.vector_norm(torch.stack(values), order), count


def reversed_ranks_job() -> tuple[Tensor, Tensor]:
    """A mesh whose ranks are not in ascending order, which the process groups' ranks are."""
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(1.0, 11.0).reshape(5, 2)
    # Cut by hand: distribute_tensor gives the parts out in the order of the process group.
    local = full.tensor_split([3])[mesh.get_local_rank("shard")]
    params: list[nn.Parameter] = []
    for on, placements in ((mesh, [Replicate(), Shard(0)]), (mesh["shard"], [Shard(0)])):
        whole = DTensor.from_local(local, on, placements, run_check=False, shape=(5, 2), stride=(2, 1))
        params.append(nn.Parameter(torch.zeros_like(whole)))
        params[-1].grad = whole.clone()
    return clip_grad_norm_(params, 1.0), torch.linalg.vector_norm(torch.stack([full, full]))


def doubles_job() -> tuple[Tensor, Tensor, int]:
    """Kinds of parameters together, an empty one too; norm, the true one, and an optimizer in place of parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = [torch.full((3, 2), 2.0, dtype=kind) for kind in (torch.float64, torch.float32, torch.bfloat16)]
    params = [with_gradient(value, mesh, [Shard(0)]) for value in values]
    params.append(with_gradient(torch.zeros(0, 2), mesh, [Shard(0)]))
    norm = clip_grad_norm_(torch.optim.SGD(params, lr=1.0), 100.0)
    empty = clip_grad_norm_(params[3:], 1.0, float("inf"))
    return norm, torch.tensor(72.0, dtype=torch.float64).sqrt(), int(empty)
