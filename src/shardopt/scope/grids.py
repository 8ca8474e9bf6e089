"""The table over which the ranks of a set of parameters add up norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardopt.errors import ScopeError
from shardopt.torch_compat import mesh_ranks

__all__ = ["HAS_ODD", "HAS_PROBLEM", "NUM_FACTS", "Grids", "combined"]

_T = TypeVar("_T")

# Columns of the table of all ranks. After these, for each grid and each set of its axes: the norm of what this rank
# holds of the gradients that are replicated along those axes.
_RANK, HAS_PROBLEM, HAS_ODD, NUM_FACTS = 0, 1, 2, 3


class Grids:
    """The meshes of the parameters that span all of their ranks, in an order that is the same on each rank.

    Other meshes must be slices of one of them; what they hold is taken as replicated along the axes they lack, as it
    is under FSDP with tensor parallelism. So one exchange over one mesh serves all.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        meshes = {id(param.device_mesh): param.device_mesh for param in params if isinstance(param, DTensor)}
        if meshes and not dist.is_initialized():
            raise ScopeError(
                "clip_grad_norm_: parameters are DTensors, but there is no process group to add up their norms over; "
                "call torch.distributed.init_process_group first"
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        union = tuple(sorted({rank for mesh in meshes.values() for rank in mesh_ranks(mesh)}))
        # By what they are, not by identity: equal meshes may be several objects.
        wide = {_sort_key(mesh): mesh for mesh in meshes.values() if mesh_ranks(mesh) == union}
        self.meshes: list[DeviceMesh] = [wide[key] for key in sorted(wide)]
        if meshes and (not wide or self.rank not in union):
            raise ScopeError(_crossing(self.rank, meshes.values()))
        self._starts: list[int] = [NUM_FACTS]
        for mesh in self.meshes:
            self._starts.append(self._starts[-1] + 2**mesh.ndim)
        # Without a mesh there is one column, for plain gradients.
        self.num_columns: int = self._starts[-1] if self.meshes else NUM_FACTS + 1
        self._axes: dict[int, tuple[int, tuple[int, ...]] | None] = {}

    @property
    def plain_column(self) -> int:
        """Of gradients that every rank has, whole."""
        return self.num_columns - 1 if not self.meshes else self._starts[1] - 1

    def column(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> int | None:
        """Of gradients with these placements, partial ones summed up; None if the mesh is no slice of a grid."""
        if id(mesh) not in self._axes:
            self._axes[id(mesh)] = self._place(mesh)
        place = self._axes[id(mesh)]
        if place is None:
            return None
        grid, axes = place
        sharded = sum(
            1 << axis
            for axis, one in zip(axes, placements, strict=True)
            if not (one.is_replicate() or one.is_partial())
        )
        return self._starts[grid] + (2 ** self.meshes[grid].ndim - 1 - sharded)

    def _place(self, mesh: DeviceMesh) -> tuple[int, tuple[int, ...]] | None:
        """Which grid, and which of its axes, the mesh is a slice of, at this rank's coordinates."""
        for number, grid in enumerate(self.meshes):
            if _sort_key(mesh) == _sort_key(grid):
                return number, tuple(range(grid.ndim))
        for number, grid in enumerate(self.meshes):
            names, here = grid.mesh_dim_names or (), grid.get_coordinate()
            if here is None or not mesh.mesh_dim_names or not set(mesh.mesh_dim_names) <= set(names):
                continue
            axes = tuple(names.index(name) for name in mesh.mesh_dim_names)
            part = grid.mesh[tuple(slice(None) if axis in axes else here[axis] for axis in range(grid.ndim))]
            if torch.equal(part.permute(*(sorted(axes).index(axis) for axis in axes)), mesh.mesh):
                return number, axes
        return None

    def no_slice(self, mesh: DeviceMesh) -> str:
        """What to say of a mesh that has no column."""
        return (
            f"its mesh {mesh} is no slice, through this rank, of {self.meshes[0]}, so ranks cannot tell copies from "
            "different parameters; slice it from that mesh by name, or place the parameter on all of its ranks"
        )

    def gathered(self, row: list[float]) -> Tensor:
        """Collective: every rank's row, float64 on the host, [num_ranks, num_columns]."""
        table = torch.tensor(row, dtype=torch.float64).unsqueeze(0)
        if not self.meshes:
            return table
        # On the device that the mesh communicates on; with offloaded gradients the backend may know no other.
        table = table.to(self.meshes[0].device_type)
        for group in _groups(self.meshes[0]):
            everywhere = [torch.empty_like(table) for _ in range(dist.get_world_size(group))]
            dist.all_gather(everywhere, table, group=group)
            table = torch.cat(everywhere)
        return table.cpu()

    def exchanged(self, items: list[_T]) -> list[_T]:
        """Collective: every rank's items, in the same order on each rank."""
        for group in _groups(self.meshes[0]) if self.meshes else ():
            everywhere: list[list[_T]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everywhere, items, group=group)
            items = [item for there in everywhere for item in there]
        return items

    def total(self, table: Tensor, order: float) -> float:
        """The norm of all: of replicas the largest, then over shards; the same bits on every rank.

        The largest, because ranks may lack a gradient that their replicas have.
        """
        if not self.meshes:
            return combined(table[0, NUM_FACTS:].tolist(), order)
        row_of = {int(rank): row for row, rank in enumerate(table[:, _RANK].tolist())}
        norms: list[float] = []
        for start, mesh in zip(self._starts, self.meshes, strict=False):
            grid = table[[row_of[rank] for rank in mesh.mesh.flatten().tolist()]].reshape(*mesh.shape, -1)
            for replicated in range(2**mesh.ndim):
                column = grid[..., start + replicated]
                axes = [axis for axis in range(mesh.ndim) if replicated >> axis & 1]
                norms += (column.amax(axes) if axes else column).flatten().tolist()
        return combined(norms, order)


def combined(norms: Sequence[float], order: float) -> float:
    """The norm of what has these norms. Neither the order of the list nor the size of its numbers matters."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if math.isinf(order) or largest == 0 or math.isinf(largest):
        return largest
    try:
        # Scaled, or the squares of large float64 gradients would overflow; fsum rounds once, in any order.
        return largest * math.fsum((norm / largest) ** order for norm in norms if norm) ** (1 / order)
    except OverflowError:
        return math.inf


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Of the mesh's axes, in order, without those of one rank."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def _sort_key(mesh: DeviceMesh) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[str, ...], str]:
    """Orders meshes alike on every rank; those first that need fewest messages."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    num_messages = sum(size > 1 for size in mesh.shape)
    return num_messages, tuple(mesh.shape), ranks, mesh.mesh_dim_names or (), mesh.device_type


def _crossing(rank: int, meshes: Iterable[DeviceMesh]) -> str:
    there = sorted({mesh_ranks(mesh) for mesh in meshes})
    return (
        f"clip_grad_norm_: on rank {rank} the parameters are on the ranks {', '.join(map(str, there))}, and no mesh of "
        "theirs contains all of these and this rank, so ranks would come to different norms. Place the parameters on "
        "meshes of which one contains the others (experts on a 2-d mesh over all ranks of the dense parameters), or "
        "clip each part on its own."
    )
