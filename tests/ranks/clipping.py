"""Jobs that clip gradients of sharded models, and torch's clipping of the unsharded ones to compare them with."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardopt import clip_grad_norm_
from shardopt.torch_compat import local_box
from tests.ranks.topologies import TOPOLOGIES, Net
from tests.support.gather import whole
from tests.support.models import Shape, Topology, build, local_tensor, set_gradients

SHAPE = Shape(rows=(1, 2, 3, 5), width=5, hidden=6, ignored=("scale", "heads.1.bias"))
"""Empty and uneven shards, and plain gradients beside DTensors."""


def placed(params: Iterable[Tensor]) -> list[Any]:
    """What must not change of gradients: the objects, their memory, its layout and its place."""
    grads = [param.grad for param in params if param.grad is not None]
    return [
        (id(grad), local_tensor(grad).data_ptr(), local_tensor(grad).stride(), getattr(grad, "placements", None))
        for grad in grads
    ]


def spied(action: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result, and how many collectives it took."""
    with CommDebugMode() as mode:
        result = action()
    return result, mode.get_total_counts()


def oracle(grads: dict[str, Tensor | None], max_norm: float, order: float) -> tuple[Tensor, dict[str, Tensor]]:
    """torch's norm of whole gradients, and what it makes of them."""
    params = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items() if grad is not None}
    for name, param in params.items():
        param.grad = grads[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm, order)
    return norm, {name: param.grad for name, param in params.items()}


def compared(model: nn.Module, grads: dict[str, Tensor | None], max_norm: float, order: float) -> dict[str, Any]:
    """Clips, and sets the outcome beside that of the unsharded gradients. Collective.

    Returns:
        The norm, torch's, whether it was a plain 0-d tensor and gradients stayed in place, and the largest relative
        difference of a gradient, by name.
    """
    expected, clipped = oracle(grads, max_norm, order)
    before = placed(model.parameters())
    norm = clip_grad_norm_(model.parameters(), max_norm, order)
    facts = type(norm) is Tensor and norm.shape == () and placed(model.parameters()) == before
    names = sorted(clipped)
    got = whole({name: model.get_parameter(name).grad for name in names})
    differences = {name: (got[name].double() - clipped[name].double()).abs().max().item() for name in names}
    # Of what one unit in the last place of the largest gradient is.
    top = max(grad.double().abs().max().item() for grad in clipped.values())
    return {"norm": norm, "expected": expected, "facts": facts, "worst": max(differences.values()) / top}


def small_job(topology: Topology, dtype: torch.dtype, max_norm: float, order: float) -> dict[str, Any]:
    """FSDP2's topologies."""
    model, plain = (build(one, Shape(**{**vars(SHAPE), "dtype": dtype})) for one in (topology, "plain"))
    for one in (model, plain):
        set_gradients(one, 1, without={"heads.3.weight"})
    return compared(model, {name: param.grad for name, param in plain.named_parameters()}, max_norm, order)


def topology_job(name: str, max_norm: float, order: float) -> dict[str, Any]:
    """Those of the training runs, with partial gradients where they have some."""
    topology = TOPOLOGIES[name]
    model, plain = Net(), Net()
    topology.place(model)
    source = torch.Generator().manual_seed(1)
    grads: dict[str, Tensor | None] = {}
    for key, param in plain.named_parameters():
        grads[key] = None if key == "odd.idle" else torch.randn(param.shape, generator=source)
        target = model.get_parameter(key)
        if grads[key] is None:
            continue
        if key in topology.halves:
            part = grads[key] * 0.25 if dist.get_rank() == 0 else grads[key] * 0.75
            target.grad = DTensor.from_local(part, target.device_mesh, [Partial()], run_check=False)
        elif isinstance(target, DTensor):
            # By numbers of elements: torch does not distribute into strided placements.
            target.grad = torch.zeros_like(target, requires_grad=False)
            local_tensor(target.grad).copy_(strided_part(target, grads[key]))
        else:
            target.grad = grads[key].clone()
    return compared(model, grads, max_norm, order)


def strided_part(param: DTensor, full: Tensor) -> Tensor:
    """This rank's part of a whole tensor; no collective, for torch remembers meshes of earlier jobs in the process."""
    offset, size = local_box(param)
    return full[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]


def missing_job(topology: Topology, patterns: int, order: float) -> list[tuple[float, float, int]]:
    """Random patterns of missing gradients; norm, torch's, and the number of collectives of each."""
    model = build(topology, SHAPE)
    plain = build("plain", SHAPE)
    found = []
    for pattern in range(patterns):
        set_gradients(model, pattern)
        set_gradients(plain, pattern)
        absent = [absences(rank, pattern, topology, dict(model.named_parameters())) for rank in range(world())]
        for name in absent[dist.get_rank()]:
            model.get_parameter(name).grad = None
        grads: dict[str, Tensor | None] = {}
        for name, param in plain.named_parameters():
            grads[name] = torch.where(kept(model, name, absent), param.grad, 0.0)
        expected, _ = oracle(grads, 0.5, order)
        norm, count = spied(lambda: clip_grad_norm_(model.parameters(), 0.5, order))
        found.append((norm.item(), expected.item(), count))
    return found


def world() -> int:
    return dist.get_world_size()


def absences(rank: int, pattern: int, topology: Topology, params: dict[str, Tensor]) -> Collection[str]:
    """Names of parameters without a gradient on a rank: any for shards, the same on all ranks for replicas."""
    shard = {"hsdp": rank % 2, "fsdp_tp": rank // 2}.get(topology, rank)
    chance = random.Random(f"{pattern}").choice([0.0, 0.3, 0.7, 1.0])
    absent = set()
    for name, param in params.items():
        key = rank if isinstance(param, DTensor) and param.device_mesh.ndim == 2 and topology == "fsdp_tp" else shard
        key = key if isinstance(param, DTensor) else "all"
        if random.Random(f"{pattern}/{key}/{name}").random() < chance:
            absent.add(name)
    # One rank without any gradient.
    if pattern % 5 == 1 and topology == "fsdp" and rank == pattern % world():
        absent |= {name for name, param in params.items() if isinstance(param, DTensor)}
    return absent


def kept(model: Any, name: str, absent: list[Collection[str]]) -> Tensor:
    """Which elements of a parameter have a gradient on a rank that holds them."""
    everywhere: list[Any] = [None] * world()
    dist.all_gather_object(everywhere, model.global_indices[name])
    mask = torch.zeros(model.get_parameter(name).shape, dtype=torch.bool)
    for rank, places in enumerate(everywhere):
        if name not in absent[rank]:
            mask.view(-1)[places.reshape(-1)] = True
    return mask


def sharded_pair() -> tuple[nn.Parameter, nn.Parameter, Tensor]:
    """Two parameters on a mesh over the world, sharded and replicated, and a gradient for either."""
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("fsdp",))
    full = torch.arange(1.0, 11.0).reshape(5, 2)  # 5 rows: the last of 4 ranks has none
    sharded = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))
    replicated = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Replicate()]))
    return sharded, replicated, full


def odd_job(case: str, order: float) -> tuple[Tensor, Tensor, Any]:
    """Gradients that are not placed like their parameter; the norm, torch's, and whether it stayed in place."""
    sharded, replicated, full = sharded_pair()
    mesh, rank = sharded.device_mesh, dist.get_rank()
    expected = full.clone()
    if case == "replicate":
        sharded.grad = distribute_tensor(full.clone(), mesh, [Replicate()])
    elif case == "shard of replicated":
        replicated.grad = distribute_tensor(full, mesh, [Shard(0)])
    elif case == "partial":  # rank 0 has nothing of it: it takes part with zeros
        replicated.grad = DTensor.from_local(full * rank, mesh, [Partial()], run_check=False) if rank else None
        expected = full * sum(range(world()))
    elif case == "partial of sharded":  # of opposite signs, so that norms of the parts would be too large
        sharded.grad = DTensor.from_local(full * (-1) ** rank * (rank + 1), mesh, [Partial()], run_check=False)
        expected = full * sum((-1) ** one * (one + 1) for one in range(world()))
    elif case == "average":
        replicated.grad = DTensor.from_local(full * rank, mesh, [Partial("avg")], run_check=False)
        expected = full * sum(range(world())) / world()
    elif case == "nobody":
        expected = torch.zeros(())
    if case != "nobody":
        other = sharded if sharded.grad is None else replicated
        if other is sharded:
            other.grad = distribute_tensor(full, mesh, [Shard(0)])
        else:
            other.grad = distribute_tensor(full, mesh, [Replicate()])
        expected = torch.stack([expected, full])
    params = [sharded, replicated]
    before = placed(params)
    local = [local_tensor(param.grad).clone() for param in params if param.grad is not None]
    norm = clip_grad_norm_(params, 1.0, order)
    factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    grads = [param.grad for param in params if param.grad is not None]
    same = all(torch.equal(local_tensor(one), old * factor) for one, old in zip(grads, local, strict=True))
    return norm, torch.linalg.vector_norm(expected, order), same and placed(params) == before


def two_axes_job(order: float) -> tuple[Tensor, Tensor]:
    """Sharded along one axis and partial along the other; two ranks that hold the same rows have none of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "sum"))
    full = torch.arange(1.0, 7.0).reshape(3, 2)
    param = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0), Replicate()]))
    row, column = mesh.get_coordinate() or (0, 0)
    if row == 0:
        local = full[:2] * (column * 3 - 1)
        param.grad = DTensor.from_local(
            local, mesh, [Shard(0), Partial()], run_check=False, shape=(3, 2), stride=(2, 1)
        )
    return clip_grad_norm_([param], 1.0, order), torch.linalg.vector_norm(full[:2], order)


def half_job(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients whose norm is more than float16 can hold; the norm, and a clipped element."""
    mesh = init_device_mesh("cpu", (world(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(8, 2, dtype=dtype), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.full((8, 2), 49152.0, dtype=dtype), mesh, [Shard(0)])
    norm = clip_grad_norm_([param], 4.0)
    return norm, param.grad.full_tensor()


def nonfinite_job(value: float, order: float, rank: int, raises: bool) -> tuple[Tensor, Tensor]:
    """One rank has a NaN or inf; norm and torch's. What is left of gradients is torch's too, or unchanged."""
    sharded, replicated, full = sharded_pair()
    grad = full.clone()
    grad[rank * -(-5 // world()), 0] = value
    sharded.grad = distribute_tensor(grad, sharded.device_mesh, [Shard(0)])
    replicated.grad = distribute_tensor(full, sharded.device_mesh, [Replicate()])
    other = [nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(5, 2))]
    for param, one in zip(other, (grad, full), strict=True):
        param.grad = one.clone()
    expected = torch.nn.utils.clip_grad_norm_(other, 1.0, order)
    if raises:
        with pytest.raises(RuntimeError, match="unchanged"):
            clip_grad_norm_([sharded, replicated], 1.0, order, error_if_nonfinite=True)
        assert torch.equal(sharded.grad.full_tensor().nan_to_num(7.0), grad.nan_to_num(7.0))
        assert torch.equal(replicated.grad.full_tensor(), full)
        return expected, expected
    norm = clip_grad_norm_([sharded, replicated], 1.0, order)
    got = torch.stack([sharded.grad.full_tensor(), replicated.grad.full_tensor()])
    assert torch.equal(got.nan_to_num(7.0), torch.stack([param.grad for param in other]).nan_to_num(7.0))
    return norm, expected
