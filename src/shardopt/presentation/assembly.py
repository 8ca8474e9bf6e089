"""Putting a wrapper together: presentations, named parameters, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.errors import ScopeError
from shardopt.layouts.tracked import Tracked, track
from shardopt.naming import name_parameters
from shardopt.presentation.dtensor import DTensorPresentation
from shardopt.presentation.inventory import Inventory, Part
from shardopt.presentation.local import LocalPresentation
from shardopt.presentation.presentation import choose
from shardopt.scope import Scope, ranks_of

__all__ = ["join", "make_part", "track_all", "track_group"]

_PRESENTATIONS = {"local": LocalPresentation, "dtensor": DTensorPresentation}


def make_part(inner: torch.optim.Optimizer, compute: str) -> Part:
    """One inner optimizer with the presentation that ``compute`` chooses for it."""
    choice = choose(inner, compute)
    return Part(inner, _PRESENTATIONS[choice.compute](inner), choice)


def track_all(inners: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> list[Tracked]:
    """Names and places every parameter of the optimizers, in the order of their groups."""
    tracked: list[Tracked] = []
    first_group = 0
    for index, inner in enumerate(inners):
        named = name_parameters(inner.param_groups, models, first_group=first_group)
        tracked += [track(name, param, optimizer=index, group=group) for group, param, name in named]
        first_group += len(inner.param_groups)
    return tracked


def join(tracked: Sequence[Tracked], vote_timeout_s: float) -> Scope:
    """Collective. The scope of the ranks that hold the parameters; this rank alone when none is sharded."""
    params = [item.param for item in tracked]
    if not any(isinstance(param, DTensor) for param in params):
        return Scope.single()
    return Scope.over(ranks_of(params), timeout_s=vote_timeout_s, name="ShardedStateOptimizer")


def track_group(
    param_group: dict[str, Any], inventory: Inventory, models: Sequence[nn.Module], scope: Scope
) -> list[Tracked]:
    """Works out where the parameters of a group that is to be added sit; adds nothing.

    Raises:
        NamingError: a parameter is in none of the models, or is an optimizer's already.
        PresentationError: the groups no longer hold the parameters they were wrapped with.
        ScopeError: a parameter lives on ranks that are not the optimizer's.
        TypeError: the parameters are in a set, whose order differs between ranks.
    """
    inventory.check_groups()
    params = param_group["params"]
    if isinstance(params, set):
        raise TypeError("parameters of a group need an order that is the same on all ranks; pass them in a list.")
    if not isinstance(params, (Tensor, list)):
        # One look uses a generator up, and the wrapped optimizer needs to look too.
        params = param_group["params"] = list(params)
    listed = [params] if isinstance(params, Tensor) else params
    listed = [item[1] if isinstance(item, tuple) else item for item in listed]
    index = len(inventory.groups())
    tracked = [
        track(name, param, optimizer=0, group=group)
        for group, param, name in name_parameters([{"params": listed}], models, first_group=index)
    ]
    beyond = set(ranks_of(listed)) - set(scope.ranks)
    if beyond:
        raise ScopeError(
            f"the new parameters live on ranks {sorted(beyond)} too, the optimizer on {list(scope.ranks)}; "
            "wrap a second optimizer for them."
        )
    inventory.refuse_twice(tracked)
    inventory.parts[0].presentation.check_new(tracked)
    return tracked
