"""A model whose parameters are cut well and badly, and the ways in which training runs lay it out over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Never run: gradients are set.

    Every shard of ``even`` is a multiple of 64 elements on every topology. Of ``odd``, 1, 2 and 3 rows leave the last
    of 4 ranks with nothing, 5 and 7 rows leave them with less; tensor parallelism cuts the 7 rows before FSDP does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Module()
        self.even.column = nn.Linear(64, 24, bias=False)
        self.odd = nn.Module()
        self.odd.column = nn.Linear(3, 7, bias=False)
        self.odd.row = nn.Linear(14, 5, bias=False)
        self.odd.rows1 = nn.Parameter(torch.empty(1, 3))
        self.odd.rows2 = nn.Parameter(torch.empty(2))
        self.odd.rows3 = nn.Parameter(torch.empty(3, 2))
        self.odd.idle = nn.Parameter(torch.empty(4))  # never gets a gradient, so never has state
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=source))


@dataclass(frozen=True)
class Topology:
    """One layout.

    Attributes:
        world_size: ranks it needs.
        place: lays a model out; collective.
        halves: parameters whose gradients arrive as partial sums, half of each on each of 2 ranks.
    """

    world_size: int
    place: Callable[[Net], None]
    halves: tuple[str, ...] = ()


def _fsdp(world_size: int) -> Topology:
    return Topology(world_size, lambda model: _shard(model, init_device_mesh("cpu", (world_size,))))


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def _hsdp(model: Net) -> None:
    _shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh, {"even.column": columns, "odd.column": columns, "odd.row": rows})


def _fsdp_over_tensor_parallel(model: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    _tensor_parallel(model, mesh["tensor"])
    _shard(model, mesh["data"])


def _tensor_parallel_alone(model: Net) -> None:
    """As with SequenceParallel norms: replicated DTensors get partial sums; the rest stays plain."""
    mesh = init_device_mesh("cpu", (2,))
    _tensor_parallel(model, mesh)
    for name in ("rows2", "rows3"):
        _replace(model.odd, name, mesh, Replicate())


def _experts(model: Net) -> None:
    """Dense parameters over all ranks, experts over pairs of ranks and sharded again within the other pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    for module, name in ((model.odd, "rows3"), (model.odd.column, "weight")):
        _replace(module, name, mesh["expert"], Shard(0))
    _shard(model.odd, mesh["shard"])
    _shard(model, init_device_mesh("cpu", (4,)))


def _replace(module: nn.Module, name: str, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    setattr(module, name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, [placement])))


def _along_dim_1(model: Net) -> None:
    def placement(param: nn.Parameter) -> Shard:
        return Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else Shard(0)

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=placement)


def _with_plain_parameters(model: Net) -> None:
    plain = {model.odd.row.weight, model.odd.rows1, model.odd.rows3, model.odd.idle}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=plain)


TOPOLOGIES: dict[str, Topology] = {
    **{f"fsdp{world_size}": _fsdp(world_size) for world_size in (1, 2, 3, 4)},
    "hsdp2x2": Topology(4, _hsdp),
    "fsdp2+tp2": Topology(4, _fsdp_over_tensor_parallel),
    "tp2": Topology(2, _tensor_parallel_alone, halves=("odd.rows2", "odd.rows3")),
    "dense4+experts2x2": Topology(4, _experts),
    "dim1": Topology(2, _along_dim_1),
    "fsdp2+plain": Topology(2, _with_plain_parameters),
}
