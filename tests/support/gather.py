"""Whole values of parameters, gradients and optimizer state, to compare runs of different world sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.raw_values import facts

__all__ = ["gathered", "gathered_gradients", "gathered_parameters", "whole"]


@runtime_checkable
class _HasShardedState(Protocol):
    def sharded_state(self) -> Mapping[str, Tensor]: ...


def gathered(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """All state of an optimizer with whole tensors on the CPU. Collective if anything is a DTensor.

    Args:
        optimizer: a `ShardedStateOptimizer`, whose ``sharded_state()`` is asked first, or any torch optimizer.
        model: names the parameters.

    Returns:
        ``state.<fqn>.<entry>`` -> whole tensor or Python value; ``group.<fqn>.<key>`` -> the group's value for that
        parameter; equal on every rank.

    Raises:
        ValueError: if ranks hold different entries, or different values of an entry that is not sharded.
    """
    names = {param: name for name, param in model.named_parameters()}
    found: dict[str, Any] = {}
    for param, entries in optimizer.state.items():
        found.update({f"state.{names[param]}.{entry}": value for entry, value in entries.items()})
    if isinstance(optimizer, _HasShardedState):
        found.update(optimizer.sharded_state())
    for group in optimizer.param_groups:
        for param in group["params"]:
            values = {key: value for key, value in group.items() if key != "params"}
            found.update({f"group.{names[param]}.{key}": value for key, value in values.items()})
    return whole(found)


def gathered_parameters(model: nn.Module) -> dict[str, Any]:
    """Name -> whole parameter. Collective if anything is a DTensor."""
    return whole(dict(model.named_parameters()))


def gathered_gradients(model: nn.Module) -> dict[str, Any]:
    """Name -> whole gradient, or None. Collective if anything is a DTensor."""
    return whole({name: param.grad for name, param in model.named_parameters()})


def whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same dict with every DTensor whole and every tensor a detached copy on the CPU, in order of keys.

    Collective if there is a process group. Everything that is no DTensor must be equal on all ranks.

    Raises:
        ValueError: naming the keys that only some ranks have or that differ, before any tensor is gathered.
    """
    keys = sorted(values)
    if dist.is_initialized():
        _check_equal_on_all_ranks({key: _digest(key, values[key]) for key in keys})
    return {key: _whole(values[key]) for key in keys}


def _check_equal_on_all_ranks(digests: dict[str, str]) -> None:
    everywhere: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, digests)
    for rank, there in enumerate(everywhere):
        differing = {key for key in {**there, **everywhere[0]} if there.get(key) != everywhere[0].get(key)}
        if differing:
            raise ValueError(f"ranks 0 and {rank} differ in {sorted(differing)}: missing on one of them, or not equal")


def _digest(key: str, value: Any) -> str:
    """Of a DTensor what is the same on every rank, of all else the bytes too."""
    if isinstance(value, DTensor):
        return repr((value.dtype, tuple(value.shape), value.placements))
    seen = [
        (path, fact.type_name, sorted(map(repr, fact.details.items())), fact.content)
        for path, fact in facts(key, value)
    ]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.cpu().clone()
    if value.dtype.is_floating_point and value.dtype.itemsize == 1:
        # gloo refuses 8-bit floats ("Invalid scalar type"), so their bytes travel.
        local = value.to_local().view(torch.uint8)
        as_bytes = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        return as_bytes.full_tensor().view(value.dtype).cpu()
    if value.dtype == torch.int16:
        # Nor does it take these; their bits travel as those of another type of that size.
        local = value.to_local().view(torch.bfloat16)
        as_bits = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        return as_bits.full_tensor().view(torch.int16).cpu()
    return value.full_tensor().cpu().clone()
