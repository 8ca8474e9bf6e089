"""Many small parameters with quantised state at once: what each rank keeps is saved, and read on other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from examples.own_codec import Momentum8
from shardopt import ShardedStateOptimizer
from shardopt.geometry import Box
from shardopt.torch_compat import local_box
from tests.ranks.quantised_runs import VOTE_TIMEOUT_S, Kept, drawn, kept

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One parameter.

    Attributes:
        shape: of it.
        block: elements of its blocks.
        smallest: least number of elements of a shard that is quantised.
        dims: along which it is sharded, one for each dim of a mesh; None is replicated.
    """

    shape: tuple[int, ...]
    block: int
    smallest: int
    dims: tuple[int | None, ...]


def placed(case: Case, number: int, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter on this rank."""
    dims = [None if dim is None or dim >= len(case.shape) else dim for dim in case.dims[: mesh.ndim]]
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return nn.Parameter(distribute_tensor(drawn(f"p{number}", case.shape, 0), mesh, placements))


class Cases(nn.Module):
    """A parameter for each case."""

    def __init__(self, cases: Sequence[Case], mesh: DeviceMesh) -> None:
        super().__init__()
        for number, case in enumerate(cases):
            self.register_parameter(f"p{number}", placed(case, number, mesh))


def wrapped(cases: Sequence[Case], mesh_shape: tuple[int, ...], compute: str) -> tuple[Cases, ShardedStateOptimizer]:
    mesh = init_device_mesh("cpu", mesh_shape)
    model = Cases(cases, mesh)
    groups = [
        {"params": [param], "block": case.block, "smallest": case.smallest}
        for param, case in zip(model.parameters(), cases, strict=True)
    ]
    return model, ShardedStateOptimizer(Momentum8(groups), model, compute=compute, vote_timeout=VOTE_TIMEOUT_S)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    for name, param in model.named_parameters():
        whole = drawn(name, param.shape, number)
        if isinstance(param, DTensor):
            box = Box(*local_box(param))
            local = whole[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))].contiguous()
            param.grad = DTensor.from_local(
                local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        else:
            param.grad = whole
    optimizer.step()


def state_of(optimizer: ShardedStateOptimizer) -> dict[str, Kept]:
    inventory = optimizer._inventory
    found: dict[str, Kept] = {}
    for tracked in inventory.tracked:
        box = tracked.state_box
        for value in inventory.quantised(tracked).values():
            assert box is not None
            found[tracked.fqn] = kept(box, value)
    return found


def save_job(cases: Sequence[Case], mesh_shape: tuple[int, ...], compute: str, root: str) -> dict[str, Kept]:
    """Two steps and a save."""
    model, optimizer = wrapped(cases, mesh_shape, compute)
    for number in (1, 2):
        step(model, optimizer, number)
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    return state_of(optimizer)


def load_job(
    cases: Sequence[Case], mesh_shape: tuple[int, ...], compute: str, root: str, dense: bool, by_path: bool
) -> tuple[dict[str, Kept], list[str]]:
    """A load into a new optimizer; ``dense`` ones quantise nothing."""
    if dense:
        cases = [Case(case.shape, case.block, 1 << 30, case.dims) for case in cases]
    _, optimizer = wrapped(cases, mesh_shape, compute)
    if not by_path:
        dcp.load({"optim": optimizer}, checkpoint_id=root)
        return state_of(optimizer), []
    prepared = optimizer.prepare_load(root, hyperparameters="keep")
    prepared.commit()
    return state_of(optimizer), sorted({name for names in prepared.report.requantised.values() for name in names})


def whole(ranks: Sequence[Mapping[str, Kept]], case: Case, name: str) -> Array:
    """What the state of a parameter means, put together."""
    result = np.full(case.shape, np.nan, dtype=np.float32)
    for one in ranks:
        if name in one:
            box = one[name].box
            result[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))] = one[name].values
    return result


class PerShard(torch.optim.SGD):
    """Keeps what nobody can interpret: a number for each rank, and a list of tensors of odd sizes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                rank = dist.get_rank() if dist.is_initialized() else 0
                state.setdefault("sketch", [torch.full((rank + 2,), float(rank)), rank])
                state["sketch"][0].add_(1.0)
        super().step()


OWN = {"sketch": "rank_local"}


def rank_local_job(world_size: int, root: str, load: bool, layouts: dict[str, str] | None, by_path: bool) -> Any:
    """Saves, or loads, state that is each rank's own; what it is afterwards, or the error."""
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    inner = PerShard(model.parameters(), lr=0.5)
    compute = "local" if layouts == OWN else "dtensor"
    optimizer = ShardedStateOptimizer(inner, model, compute=compute, layouts=layouts, vote_timeout=VOTE_TIMEOUT_S)
    alone = "resumes on these ranks' shards only; ['sketch'] are each rank's own" in optimizer.explain()
    assert alone == (layouts == OWN)
    try:
        if load and by_path:
            optimizer.prepare_load(root).commit()
        elif load:
            dcp.load({"optim": optimizer}, checkpoint_id=root)
        else:
            step(model, optimizer, 1)
            step(model, optimizer, 2)
            dcp.save({"optim": optimizer}, checkpoint_id=root)
    except Exception as error:
        assert not inner.state or not load
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
        return f"{type(error).__name__}: {error}"
    sketch = inner.state[model.weight]["sketch"]
    return sketch[0].tolist(), sketch[1]


def failing_codec_job(root: str, broken: str) -> tuple[str, bool]:
    """A state that one rank alone has spoilt: the error of a save, and whether the group works on."""
    cases = [Case((64, 8), 32, 64, (0,)), Case((9, 9), 16, 16, (0,))]
    model, optimizer = wrapped(cases, (2,), "local")
    step(model, optimizer, 1)
    inner: Any = optimizer.optimizers[0]
    state = inner.state[model.get_parameter("p0")]
    if dist.get_rank() == 1:
        if broken == "scales":
            state["scale"] = state["scale"][:-1].clone()
        elif broken == "dense":
            del state["scale"]
            state["momentum"] = state["momentum"].float()
        else:
            inner.state.pop(model.get_parameter("p0"))
    said = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"optim": optimizer}, checkpoint_id=root)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, total.item() == 2
