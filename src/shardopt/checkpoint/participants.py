"""Which ranks take part in a save or load, worked out by each of them alone, and their scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shardopt.optimizer import ShardedStateOptimizer
from shardopt.scope import Scope, ranks_of
from shardopt.torch_compat import fsdp_stand_ins

__all__ = ["ranks_holding", "scope_of"]

_NAME = "shardopt checkpoint"

# A meeting costs as much as a vote, so a scope is kept as long as the process group whose store it votes over.
_scopes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Scope]] = WeakKeyDictionary()


def scope_of(state: Mapping[str, Any], *, timeout_s: float) -> Scope:
    """Collective when these ranks save or load for the first time. The ranks that hold what is in the dict.

    They are those of the meshes of all its DTensors, of models and optimizers too; without any, all ranks of the
    process group, as for ``dcp.save``; without a process group, this one.

    Raises:
        ScopeError: the others did not come in time, or have other ranks.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    ranks = ranks_holding(state)
    if group is None:
        return Scope.single()
    ranks = ranks or tuple(range(dist.get_world_size()))
    known = _scopes.setdefault(group, {})
    if ranks not in known:
        known[ranks] = Scope.over(ranks, timeout_s=timeout_s, name=_NAME)
    return known[ranks]


def ranks_holding(value: object) -> tuple[int, ...]:
    """The ranks of all meshes in it; ``()`` without any, and for what shows its tensors in its state only."""
    return ranks_of(_tensors(value))


def _tensors(value: object) -> Iterator[Tensor]:
    """Tensors that can be seen without asking anything for its state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        # After a forward pass FSDP2 shows whole parameters, which do not say who holds them.
        stand_ins = fsdp_stand_ins()
        for tensor in (*value.parameters(), *value.buffers()):
            yield stand_ins.get(id(tensor), tensor)
    elif isinstance(value, (ShardedStateOptimizer, torch.optim.Optimizer)):
        yield from (param for group in value.param_groups for param in group["params"])
    elif isinstance(value, (Mapping, list)):
        # Most long lists are of numbers.
        kinds = object if isinstance(value, Mapping) else (Tensor, Mapping, list)
        for item in value.values() if isinstance(value, Mapping) else value:
            if isinstance(item, kinds):
                yield from _tensors(item)
