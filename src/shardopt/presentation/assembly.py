"""Putting a wrapper together: presentations, named parameters, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError, ScopeError
from shardopt.layouts.declared import ATTRIBUTE, MASTER, RANK_LOCAL, checked_layouts, layouts_of
from shardopt.layouts.tracked import Tracked, check_device, track
from shardopt.naming import Name, name_parameters
from shardopt.presentation.choice import choose
from shardopt.presentation.dtensor import DTensorPresentation
from shardopt.presentation.inventory import Inventory, Part
from shardopt.presentation.local import LocalPresentation
from shardopt.presentation.own_shards import OwnShardsPresentation, TakesShards
from shardopt.presentation.owner import OwnerPresentation
from shardopt.presentation.presentation import Presentation
from shardopt.presentation.replicated import ReplicatedPresentation
from shardopt.presentation.trade import said_of_quantised
from shardopt.scope import Scope, ranks_of
from shardopt.torch_compat import fsdp_offloaded

__all__ = ["checked", "explain", "join", "make_part", "track_all", "track_group"]

_PRESENTATIONS: dict[str, type[Presentation]] = {
    "local": LocalPresentation,
    "dtensor": DTensorPresentation,
    "owner": OwnerPresentation,
    "replicated": ReplicatedPresentation,
    "shards": OwnShardsPresentation,
}


def checked(inners: list[torch.optim.Optimizer], wrapper: type) -> list[torch.optim.Optimizer]:
    """The optimizers, if they can be wrapped.

    Raises:
        TypeError: something is no optimizer, or a ``wrapper`` already.
        ValueError: there is none.
    """
    if not inners:
        raise ValueError("no optimizer was given")
    for inner in inners:
        if isinstance(inner, wrapper):
            raise TypeError("the optimizer is wrapped already; wrap it once.")
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got {type(inner).__name__}.")
    return inners


def make_part(inner: torch.optim.Optimizer, compute: str, layouts: Mapping[str, str] | None) -> Part:
    """One inner optimizer with the presentation that ``compute`` chooses for it, and what is declared of its state.

    Raises:
        PresentationError: ``compute`` does not suit it.
        PlacementError: it has no attribute that is declared.
        TypeError, ValueError: the layouts are none.
    """
    declared = MappingProxyType({**layouts_of(inner), **checked_layouts(layouts or {})})
    names = [name.removeprefix(ATTRIBUTE) for name in declared if name.startswith(ATTRIBUTE)]
    lacking = [name for name in names if name not in vars(inner)]
    if lacking:
        raise PlacementError(f"layouts: {type(inner).__name__} has no attributes {lacking}, which are declared.")
    choice = choose(inner, compute, set(declared.values()))
    presentation = _PRESENTATIONS[choice.compute](inner)
    presentation.needs_closure = choice.needs_closure
    presentation.masters = tuple(name for name, layout in declared.items() if layout == MASTER)
    part = Part(inner, presentation, choice, declared)
    if part.codec is not None:
        presentation.constants = part.codec.constants(inner)
        presentation.is_scratch = part.codec.is_scratch
        own = sorted(name for name, layout in declared.items() if layout == RANK_LOCAL)
        if own:
            raise PlacementError(
                f"layouts: {own} are declared 'rank_local', and state of {type(inner).__name__} is quantised, which is "
                "known: leave the declaration out."
            )
    return part


def track_all(inners: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> list[Tracked]:
    """Names and places every parameter of the optimizers, in the order of their groups.

    Raises:
        NamingError: parameters have no name, or share one.
        PlacementError: parameters have no known place, or are on a device their mesh is not; all are listed.
    """
    owners = [index for index, inner in enumerate(inners) for _ in inner.param_groups]
    # All groups at once: names must be unique among all optimizers.
    named = name_parameters([group for inner in inners for group in inner.param_groups], models)
    tracked = _tracked([(name, param, owners[group], group) for group, param, name in named])
    for item in tracked:
        inner = inners[item.optimizer]
        if isinstance(inner, TakesShards):
            item.state_device = inner.state_device
    return tracked


def _tracked(places: Sequence[tuple[Name, Tensor, int, int]]) -> list[Tracked]:
    """Each parameter with its name, optimizer and group, tracked."""
    offloaded = fsdp_offloaded()
    tracked: list[Tracked] = []
    problems: list[str] = []
    for name, param, optimizer, group in places:
        try:
            item = track(name, param, optimizer=optimizer, group=group)
            if id(param) not in offloaded:
                check_device(item)
            tracked.append(item)
        except PlacementError as error:
            problems.append(str(error))
    if problems:
        raise PlacementError("\n".join(problems))
    return tracked


def join(optimizer: Any, model: Any, vote_timeout_s: float) -> Scope:
    """Collective. The scope of the ranks that hold the parameters; this rank alone when none is sharded.

    Looks for them in whatever it was given, so that a rank where that is wrong can still tell the others.
    """
    params = list(_params_in(optimizer)) or list(_params_in(model))
    if not any(isinstance(param, DTensor) for param in params):
        return Scope.single()
    return Scope.over(ranks_of(params), timeout_s=vote_timeout_s, name="ShardedStateOptimizer")


def _params_in(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, torch.optim.Optimizer):
        yield from (param for group in given.param_groups for param in group["params"])
    elif isinstance(given, nn.Module):
        yield from given.parameters()
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _params_in(one)


def track_group(
    param_group: dict[str, Any], inventory: Inventory, models: Sequence[nn.Module], scope: Scope
) -> list[Tracked]:
    """Works out where the parameters of a group that is to be added sit; adds nothing.

    Raises:
        NamingError: a parameter is in none of the models and has no name, or is an optimizer's already.
        PlacementError: a parameter has no known place, or is on a device its mesh is not.
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
    members: list[Any] = [params] if isinstance(params, Tensor) else params
    # As torch reads a group: of a pair the name is first. Names for some only are refused, by torch.
    listed = [item[1] if isinstance(item, tuple) else item for item in members]
    paired = [item[0] for item in members if isinstance(item, tuple)]
    names = (paired if len(paired) == len(listed) else None) if paired else param_group.get("param_names")
    index = len(inventory.groups())
    named = name_parameters([{"params": listed, "param_names": names}], models, first_group=index)
    tracked = _tracked([(name, param, 0, group) for group, param, name in named])
    beyond = set(ranks_of(listed)) - set(scope.ranks)
    if beyond:
        raise ScopeError(
            f"the new parameters live on ranks {sorted(beyond)} too, the optimizer on {list(scope.ranks)}; "
            "wrap a second optimizer for them."
        )
    inventory.refuse_twice(tracked)
    return tracked


def _guarantee(inventory: Inventory) -> str:
    """What a checkpoint of all of them together is good for: as much as of the weakest one."""
    lost = [problem for part in inventory.parts for problem in part.side_storage(inventory.by_id)]
    if lost:
        return f"checkpoint: refused. {' '.join(lost)}"
    if inventory.own_index is not None and inventory.has_plain:
        return f"checkpoint: resumes on {inventory.world_size} ranks, on which each has plain parameters of its own"
    own = sorted({name for tracked in inventory.tracked for name in inventory.rank_local(tracked)})
    if own:
        return f"checkpoint: resumes on these ranks' shards only; {own} are each rank's own"
    odd = [type(part.inner).__name__ for part in inventory.parts if part.choice.compute == "dtensor"]
    if odd:
        return f"checkpoint: resumes on any number of ranks, if {', '.join(odd)} keeps state placed like its parameters"
    return "checkpoint: resumes on any number of ranks"


def explain(inventory: Inventory, scope: Scope, consensus: str) -> str:
    """Which presentation each wrapped optimizer steps in, and why."""
    lines = [
        f"{type(part.inner).__name__}: compute={part.choice.compute!r} because {part.choice.reason}"
        for part in inventory.parts
    ]
    lines += [line for part in inventory.parts for line in part.presentation.explained()]
    lines += [line for part in inventory.parts for line in said_of_quantised(inventory, part)]
    where = f"ranks {list(scope.ranks)}" if scope.size > 1 else "one rank"
    lines.append(f"{len(inventory.tracked)} parameters over {where}; consensus={consensus!r}")
    plain = [one.fqn for one in inventory.tracked if not isinstance(one.param, DTensor) and one.param.requires_grad]
    if plain and scope.size > 1:
        held = "the same on every rank" if inventory.own_index is None else "each rank's own"
        more = f" and {len(plain) - 20} more" * (len(plain) > 20)
        lines.append(f"not sharded, {held}: {', '.join(plain[:20])}{more}")
    lines.append(_guarantee(inventory))
    if plain and len(plain) < len(inventory.tracked):
        lines.append(
            "under torch.amp use shardopt.GradScaler: torch's own takes sharded parameters or others, not both"
        )
    return "\n".join(lines)
