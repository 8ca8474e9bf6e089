"""Building what a wrapper wires together, on every rank or on none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardopt.errors import RankFailureError
from shardopt.layouts.tracked import Tracked
from shardopt.portable.beside import digest_of
from shardopt.presentation.assembly import checked, join, make_part, track_all
from shardopt.presentation.inventory import Inventory, Part
from shardopt.presentation.ownership import Balance
from shardopt.scope import Scope, differences
from shardopt.staging.consensus import Consensus, check_options

__all__ = ["construct"]

# How long ranks wait for one whose own time-out is no number of seconds.
_DEFAULT_TIMEOUT_S = 600.0


def construct(
    optimizer: Any,
    model: Any,
    wrapper: type,
    *,
    compute: str,
    mode: str,
    vote_timeout_s: float,
    plain: str,
    layouts: Mapping[str, str] | None,
) -> tuple[Inventory, Consensus]:
    """Collective. The parameters of the optimizers, and how their ranks agree; steps nothing and makes no state.

    The ranks meet whatever is wrong on one of them, so that this is everybody's error and nobody waits.

    Raises:
        ValueError, TypeError, ShardoptError: something is wrong on this rank.
        RankFailureError: that is so on another rank, or ranks wrap different things; what differs is listed.
    """
    failure: BaseException | None = None
    inners: list[Any] = []
    models: list[nn.Module] = []
    parts: list[Part] = []
    tracked: list[Tracked] = []
    timeout_s = vote_timeout_s
    try:
        check_options(mode, vote_timeout_s, plain)
    except (ValueError, TypeError) as error:
        failure, timeout_s = error, _DEFAULT_TIMEOUT_S
    try:
        inners = _listed(optimizer, torch.optim.Optimizer, "optimizer")
        models = _listed(model, nn.Module, "model")
        parts = [make_part(inner, compute, layouts) for inner in checked(inners, wrapper)]
        for part in parts:
            part.constant_digests |= {name: digest_of(vars(part.inner)[name], name) for name in part.constants}
        tracked = track_all(inners, models)
    except BaseException as error:
        failure = failure or error
    try:
        scope = join(inners or optimizer, models or model, timeout_s)
    except Exception as error:
        # What has gone wrong before is what the user has to mend first.
        raise failure or error from (error if failure else None)
    own = scope.index if plain == "per_rank" and scope.size > 1 else None
    inventory = Inventory(parts, scope.size, models, own, scope.index)
    try:
        if failure is None:
            inventory.check(tracked)
    except BaseException as error:
        failure = error
    held: dict[str, str] = {} if failure else _described(parts, tracked, {"consensus": mode, "plain": plain})
    _vote(scope, failure, held)
    consensus = Consensus(mode, scope)
    _join(inventory, consensus)
    inventory.add(tracked)
    return inventory, consensus


def _join(inventory: Inventory, consensus: Consensus) -> None:
    """Collective. Gives the presentations their ranks."""

    def agree(operation: str, problem: BaseException | None, digest: bytes, facts: int) -> int:
        return facts | consensus.vote(operation, problem, every_step=True, digest=digest, facts=facts)

    balance = Balance(consensus.scope.size)
    for part in inventory.parts:
        part.presentation.join(consensus.scope, balance, agree)


def _listed(given: Any, kind: type, name: str) -> list[Any]:
    """One or several, as a list; the optimizers themselves are looked at where they are wrapped."""
    if isinstance(given, kind):
        return [given]
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, Mapping)) else [given]
    wrong = [one for one in listed if not isinstance(one, nn.Module)] if kind is nn.Module else []
    if wrong:
        raise TypeError(
            f"{name}: expected a torch.nn.Module or a list of them, got a {type(wrong[0]).__name__}; the order is "
            "ShardedStateOptimizer(optimizer, model)."
        )
    return listed


def _vote(scope: Scope, failure: BaseException | None, held: Mapping[str, str]) -> None:
    """Collective. Raises unless all ranks are well and hold the same."""
    digest = b"" if failure else hashlib.blake2b(repr(held).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    try:
        scope.vote("construct", problem=failure, digest=digest)
    except RankFailureError as verdict:
        # In full, and of its own type: a vote's text is short.
        if failure is not None:
            raise failure from verdict
        if not verdict.disagree or verdict.failures or verdict.missing:
            raise
        raise RankFailureError(
            f"construct: ranks wrap different things:\n{differences(scope, held)}\nGive every rank the same "
            "optimizers, groups and options over the same model.",
            operation=verdict.operation,
            disagree=verdict.disagree,
        ) from None


def _described(parts: Sequence[Part], tracked: Sequence[Tracked], options: Mapping[str, Any]) -> dict[str, str]:
    """What has to be the same on all ranks, by what a message calls it."""
    held = {f"the option {name}": repr(value) for name, value in options.items()}
    for index, part in enumerate(parts):
        kind = type(part.inner)
        held[f"optimizer {index}: its class"] = f"{kind.__module__}.{kind.__qualname__}"
        held[f"optimizer {index}: compute"] = part.choice.compute
        held |= {f"optimizer {index}: {name}": value for name, value in part.presentation.told.items()}
        # It decides how often ranks vote on a save.
        held[f"optimizer {index}: codec"] = "none" if part.codec is None else part.codec.name
        held[f"optimizer {index}: layouts"] = repr(sorted(part.layouts.items()))
    members: dict[int, list[str]] = {index: [] for index in range(sum(len(part.inner.param_groups) for part in parts))}
    for item in tracked:
        members[item.group].append(item.fqn)
    held |= {f"parameter group {index}: its parameters": repr(names) for index, names in members.items()}
    for item in tracked:
        placements = item.param.placements if isinstance(item.param, DTensor) else "not sharded"
        held[f"{item.fqn}: the parameter"] = repr((item.shape, item.param.dtype, item.name.aliases, placements))
        state = parts[item.optimizer].presentation.described(item)
        if state:
            held[f"{item.fqn}: state that it has already"] = state
    return held
