"""Meshes to ranks: who holds a set of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from shardopt.errors import ScopeError
from shardopt.torch_compat import mesh_ranks, root_mesh_ranks

__all__ = ["ranks_of", "unite"]


def ranks_of(params: Iterable[Tensor]) -> tuple[int, ...]:
    """The ranks that hold these parameters: global, sorted, the same on each of them.

    Every rank works this out alone, from the meshes of its own parameters (see ``unite``). Plain parameters
    add nothing: they say nothing about other ranks. ``()`` when no parameter is a DTensor.

    Raises:
        ScopeError: there are DTensors but no process group.
    """
    # By identity: equal meshes may have been sliced from different ones.
    meshes = {id(param.device_mesh): param.device_mesh for param in params if isinstance(param, DTensor)}
    if meshes and not dist.is_initialized():
        raise ScopeError(
            "parameters are DTensors, but there is no process group for their ranks to agree over; call "
            "torch.distributed.init_process_group, and destroy it only after the last use of the optimizer"
        )
    return unite({(mesh_ranks(mesh), root_mesh_ranks(mesh)) for mesh in meshes.values()})


def unite(meshes: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...]:
    """The scope of parameters on these meshes.

    One mesh, or one that contains all the others, gives its own ranks. Otherwise the meshes cross, such as
    the data-parallel and the expert meshes of a rank, and no rank sees all of them: rank 0 of a 2x2 grid has
    the meshes {0, 1} and {0, 2}, rank 1 has {0, 1} and {1, 3}, so their unions differ. The mesh that all were
    sliced from is the same on every rank. Without a common one the union is all there is to go by; where ranks
    come to different unions, the construction of the scope says so.

    Args:
        meshes: for each mesh its ranks, and the ranks of the mesh it was sliced from (its own when it was not).
    """
    union = {rank for ranks, _ in meshes for rank in ranks}
    roots = {frozenset(root) for _, root in meshes}
    is_covered = any(union == set(ranks) for ranks, _ in meshes)
    return tuple(sorted(union if is_covered or len(roots) != 1 else roots.pop()))
