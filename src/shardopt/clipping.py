"""Gradient clipping by the norm of the whole model, whatever its parameters are sharded over."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from shardopt.errors import RankFailureError, ScopeError
from shardopt.scope.grids import HAS_ODD, HAS_PROBLEM, NUM_FACTS, Grids, combined
from shardopt.torch_compat import (
    foreach_norms,
    foreach_scale,
    gradients_of,
    local_shard,
    mesh_ranks,
    same_spec,
    spec_token,
)

__all__ = ["Norms", "clip_grad_norm_", "norm_and_factor", "tensor_norms"]

Norms = Callable[[Sequence[Tensor], float], "list[float]"]
"""The norm of each of several plain tensors, of an order."""

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What this rank holds of one gradient, and the column of the table that its norm belongs to."""

    local: Tensor
    column: int


@dataclass(frozen=True, slots=True)
class _Odd:
    """What all ranks need to know of a gradient that is not placed like its parameter."""

    rank: int
    index: int  # in the list of parameters
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of this rank's shard
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why this rank cannot take part; every rank raises."""

    rank: int
    is_scope: bool
    text: str


@dataclass(slots=True)
class _Found:
    """This rank's gradients."""

    pieces: list[_Piece]
    odd: list[_Odd]
    problems: list[_Problem]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | torch.optim.Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Collective. Scales gradients in place so that their norm, over all ranks, is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` for parameters on any mixture of meshes, plain ones among them. Every rank
    passes the same parameters, in the same order. Which of them have a gradient may differ; a missing one counts as
    zeros. Of replicas, each element counts once: plain gradients and what is on a slice of the others' mesh must be
    the same on all ranks, which is not checked. In the usual case ranks exchange one row of numbers per mesh axis and
    wait for it on the host; gradients that are not placed like their parameter take more.

    Args:
        parameters: a tensor, several, or an optimizer, which stands for all of its parameters.
        max_norm: not negative.
        norm_type: order of the norm, positive; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or infinite; otherwise gradients become NaN or zeros, as torch's.
        foreach: False takes gradients one by one.

    Returns:
        The norm before scaling: 0-d, no DTensor, the same bits on every rank, on the first parameter's device;
        float64 if a parameter is, else float32.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is out of range.
        TypeError: something in ``parameters`` is no tensor.
        ScopeError: no parameter's mesh contains the others, or there is no process group.
        RankFailureError: on some rank a gradient is sparse, or not placed such that it could be counted. The same
            error on every rank, and no gradient has changed.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    params = _listed(parameters)
    with torch.no_grad():
        grads = gradients_of(params)
        total, factor = norm_and_factor(
            params,
            grads,
            max_norm,
            norm_type,
            norms=lambda tensors, order: tensor_norms(tensors, order, foreach),
            error_if_nonfinite=error_if_nonfinite,
        )
        if factor != 1.0:
            _scale_([_local(grad) for grad in grads if grad is not None], factor, foreach)
    return total


def norm_and_factor(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    max_norm: float,
    norm_type: float,
    *,
    norms: Norms,
    error_if_nonfinite: bool,
    problem: BaseException | None = None,
) -> tuple[Tensor, float]:
    """Collective. The norm of all gradients, and what to multiply them with; errors are ``clip_grad_norm_``'s.

    Args:
        params: all parameters, each once.
        grads: theirs.
        max_norm: not negative.
        norm_type: order of the norm.
        norms: gives the norm of each of several plain tensors.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        problem: why this rank cannot clip; every rank raises.
    """
    max_norm, order = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; it must not be negative")
    if not order > 0:
        raise ValueError(f"norm_type is {order!r}; it must be positive, inf for the largest absolute value")
    found = _total_norm(params, grads, order, norms, problem)
    total = torch.tensor(found, dtype=torch.float64).to(_result_dtype(params))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {order} of all gradients is {total.item()}, so they cannot be clipped; they are "
            "unchanged. With error_if_nonfinite=False they are scaled by it all the same."
        )
    # In the result's precision, as torch does; clamp lets NaN through.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0).item()
    return total.to(_local(params[0]).device) if params else total, factor


def _listed(parameters: Tensor | Iterable[Tensor] | torch.optim.Optimizer) -> list[Tensor]:
    """Each parameter once."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, torch.optim.Optimizer):
        parameters = [param for group in parameters.param_groups for param in group["params"]]
    params = list(parameters)
    if not params and isinstance(parameters, types.GeneratorType):
        # As torch does: model.parameters() kept in a variable is empty the second time.
        warnings.warn("`parameters` is an empty generator, no gradient is clipped.", stacklevel=3)
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(f"parameters contains a {type(param).__name__}; pass tensors or an optimizer")
    return list({id(param): param for param in params}.values())


def _result_dtype(params: Sequence[Tensor]) -> torch.dtype:
    # By parameters, not by gradients: ranks without a gradient come to the same.
    return torch.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in params) else torch.float32


def _total_norm(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], order: float, norms_of: Norms, why: BaseException | None
) -> float:
    """Collective. The norm of all gradients, the same on every rank.

    Raises:
        RankFailureError, ScopeError: a rank has a problem; on every rank.
    """
    grids = Grids(params)
    found = _find(params, grads, grids)
    if why is not None:
        found.problems.append(_Problem(grids.rank, False, str(why)))
    norms = norms_of([piece.local for piece in found.pieces], order)
    columns = [piece.column for piece in found.pieces]
    table = grids.gathered(_row(grids, found, columns, norms, order))
    _raise_together(grids, table, found.problems)
    total = grids.total(table, order)
    if not table[:, HAS_ODD].any():
        return total
    odd = grids.exchanged(found.odd)
    columns.clear()
    norms.clear()
    for index in sorted({one.index for one in odd}):
        param = params[index]
        piece = _reduced(index, param, grads[index], odd, grids, found.problems) if isinstance(param, DTensor) else None
        if piece is not None:
            columns.append(piece.column)
            norms += norms_of([piece.local], order)
    table = grids.gathered(_row(grids, found, columns, norms, order))
    _raise_together(grids, table, found.problems)
    return combined([total, grids.total(table, order)], order)


def _find(params: Sequence[Tensor], grads: Sequence[Tensor | None], grids: Grids) -> _Found:
    """Sorts this rank's gradients into those that count as they are, those that all ranks must talk about, and bad."""
    found = _Found([], [], [])
    columns: dict[int, int | None] = {}  # by spec object, which gradients share with their parameters
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        column: int | None = grids.plain_column
        if isinstance(param, DTensor):
            token = id(spec_token(param))
            if token not in columns:
                columns[token] = grids.column(param.device_mesh, param.placements)
            column = columns[token]
        if column is None and isinstance(param, DTensor):
            text = f"{_where(index, param)}: {grids.no_slice(param.device_mesh)}"
            found.problems.append(_Problem(grids.rank, True, text))
        elif grad is not None and column is not None:
            _file(found, index, param, grad, column, grids.rank)
    return found


def _file(found: _Found, index: int, param: Tensor, grad: Tensor, column: int, rank: int) -> None:
    local = _local(grad)
    if _is_usual(param, grad) and local.layout == torch.strided:
        found.pieces.append(_Piece(local, column))
        return
    problem = _unusable(param, grad)
    if problem:
        found.problems.append(_Problem(rank, False, f"{_where(index, param)}: {problem}"))
    elif not isinstance(grad, DTensor) or not isinstance(param, DTensor) or same_spec(grad, param):
        found.pieces.append(_Piece(local, column))
    else:
        found.odd.append(_Odd(rank, index, tuple(grad.placements), tuple(local.shape), local.dtype))


def _is_usual(param: Tensor, grad: Tensor) -> bool:
    """Whether the gradient is a DTensor placed by its parameter's own object, as FSDP2 makes it: it counts as it is."""
    return (
        isinstance(param, DTensor)
        and isinstance(grad, DTensor)
        and spec_token(grad) is spec_token(param)
        and not any(placement.is_partial() for placement in param.placements)
    )


def _unusable(param: Tensor, grad: Tensor) -> str:
    """Why this gradient cannot be counted; empty if it can."""
    if _local(grad).layout != torch.strided:
        return f"its gradient is sparse ({_local(grad).layout}); make it dense (grad.to_dense(), sparse=False)"
    if isinstance(param, DTensor) != isinstance(grad, DTensor):
        return f"it is a {_kind(param)}, its gradient a {_kind(grad)}; give it a gradient of its own kind"
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return ""
    if any(placement.is_partial() for placement in param.placements):
        return f"it is placed {param.placements}, which is not one tensor; shard or replicate it"
    if grad.device_mesh != param.device_mesh:
        return f"its gradient is on {grad.device_mesh}, the parameter on {param.device_mesh}; redistribute it"
    for one in grad.placements:
        if one.is_partial() and (type(one) is not Partial or one.reduce_op not in ("sum", "avg")):
            return f"its gradient is placed {grad.placements}; only sums and averages can be completed, redistribute it"
    return ""


def _reduced(
    index: int, param: DTensor, grad: Tensor | None, odd: Sequence[_Odd], grids: Grids, problems: list[_Problem]
) -> _Piece | None:
    """Collective over the parameter's mesh: this rank's piece of a gradient that is not placed like its parameter.

    Partial values are summed up, in a copy. Ranks without the gradient take part with zeros.

    Args:
        odd: what all ranks of the grid have found.
        problems: gets what is wrong here; the caller tells the other ranks.
    """
    mesh = param.device_mesh
    peers = {one.rank: one for one in odd if one.index == index and one.rank in mesh_ranks(mesh)}
    if not peers:
        return None
    example = next(iter(peers.values()))
    is_agreed = {(one.placements, one.dtype) for one in peers.values()} == {(example.placements, example.dtype)}
    is_odd = grids.rank in peers
    if not is_agreed or (grad is not None and not is_odd):
        placed = f"{tuple(grad.placements)} in {grad.dtype}" if isinstance(grad, DTensor) else "missing"
        text = f"its gradient is {placed} here, {example.placements} in {example.dtype} on rank {example.rank}"
        problems.append(_Problem(grids.rank, False, f"{_where(index, param)}: {text}; place it alike on all ranks"))
    column = grids.column(mesh, example.placements)
    if not is_agreed or column is None:
        return None  # on every rank of the mesh
    mine = local_shard(grad) if isinstance(grad, DTensor) and is_odd else None
    local = _summed(mine, mesh, example, peers)
    return None if local is None else _Piece(local, column)


def _summed(mine: Tensor | None, mesh: DeviceMesh, example: _Odd, peers: Mapping[int, _Odd]) -> Tensor | None:
    """Collective over the axes along which gradients are partial: their sum or average; None if no rank has one."""
    here = mesh.get_coordinate()
    partial = {axis: one for axis, one in enumerate(example.placements) if isinstance(one, Partial)}
    if not partial or here is None:
        return mine
    around = mesh.mesh[tuple(slice(None) if axis in partial else at for axis, at in enumerate(here))]
    shape = next((peers[rank].shape for rank in around.flatten().tolist() if rank in peers), None)
    if shape is None:
        return None
    value = torch.zeros(shape, dtype=example.dtype, device=mesh.device_type)
    if mine is not None:
        value.copy_(mine)
    for axis, placement in partial.items():
        dist.all_reduce(value, group=mesh.get_group(axis))
        if placement.reduce_op == "avg":
            value.div_(mesh.size(axis))
    return value


def _row(
    grids: Grids, found: _Found, columns: Sequence[int], norms: Sequence[float], order: float
) -> list[float]:  # [num_columns]
    """This rank's row of the table."""
    by_column: list[list[float]] = [[] for _ in range(grids.num_columns)]
    for column, norm in zip(columns, norms, strict=True):
        by_column[column].append(norm)
    facts = [float(grids.rank), float(bool(found.problems)), float(bool(found.odd))]
    return facts + [combined(here, order) for here in by_column[NUM_FACTS:]]


def _raise_together(grids: Grids, table: Tensor, problems: list[_Problem]) -> None:
    """Collective if a rank has a problem: then every rank raises the same error."""
    if not table[:, HAS_PROBLEM].any():
        return
    known = sorted(grids.exchanged(problems), key=lambda one: one.rank)
    lines = "\n".join(f"  rank {one.rank}: {one.text}" for one in known)
    message = f"clip_grad_norm_ has changed no gradient on any rank:\n{lines}"
    if any(one.is_scope for one in known):
        raise ScopeError(message)
    raise RankFailureError(message, operation="clip_grad_norm_", failures={one.rank: one.text for one in known})


def tensor_norms(tensors: Sequence[Tensor], order: float, foreach: bool | None) -> list[float]:
    """The norm of each tensor, in float32 at least: that of a float16 tensor may be more than float16 can hold."""
    norms = [0.0] * len(tensors)
    for (_, dtype), places in _alike(tensors).items():
        accumulator = torch.float32 if dtype in _NARROW else None
        group = [tensors[place] for place in places]
        if foreach is False:
            found = [torch.linalg.vector_norm(one, order, dtype=accumulator) for one in group]
        else:
            found = foreach_norms(group, order, dtype=accumulator)
        for place, norm in zip(places, torch.stack(list(found)).tolist(), strict=True):
            norms[place] = norm
    return norms


def _scale_(tensors: Sequence[Tensor], factor: float, foreach: bool | None) -> None:
    for (device, dtype), places in _alike(tensors).items():
        group = [tensors[place] for place in places]
        # On the host, torch's foreach rounds the factor to the tensors' dtype: below 6e-8 it would be 0 in float16.
        if foreach is False or (device.type == "cpu" and dtype in _NARROW):
            for one in group:
                one.mul_(factor)
        else:
            foreach_scale(group, factor)


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Where in the list the tensors of each device and dtype are, without empty ones."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    return groups


def _local(tensor: Tensor) -> Tensor:
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def _kind(tensor: Tensor) -> str:
    return "DTensor" if isinstance(tensor, DTensor) else "plain tensor"


def _where(index: int, param: Tensor) -> str:
    return f"parameter {index} of shape {tuple(param.shape)}"
