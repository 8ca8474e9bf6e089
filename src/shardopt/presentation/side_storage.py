"""What an optimizer keeps as attributes, beside its state: its step may read it, and no state dict has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import PresentationError

__all__ = ["refuse_remembered", "side_storage"]

# Saved, or made anew by GradScaler for each step.
_KNOWN = frozenset({"state", "param_groups", "defaults", "grad_scale", "found_inf"})


def side_storage(inner: torch.optim.Optimizer, saved: Container[int], known: Collection[str] = ()) -> list[str]:
    """Where the optimizer holds tensors, or optimizers with state, that are not in its groups and its state.

    Looks into attributes and containers in them, not into other objects.

    Args:
        inner: the optimizer.
        saved: ids of parameters.
        known: attributes that have been declared.

    Returns:
        One sentence for each attribute.
    """
    in_groups = {id(value) for group in inner.param_groups for value in group.values()}
    # An optimizer may have its state as a property, over an attribute of another name.
    state = inner.state
    problems: list[str] = []
    for name, value in vars(inner).items():
        found = () if name in _KNOWN or name in known or value is state else _found(value, inner, set())
        for what in (item for item in found if id(item) not in saved and id(item) not in in_groups):
            kind = f"a tensor of shape {tuple(what.shape)}" if isinstance(what, Tensor) else "an optimizer with state"
            problems.append(
                f"{type(inner).__name__}.{name} holds {kind} that is in no state and no parameter group; nothing says "
                "where it belongs. Keep it in state, per parameter, or in a parameter group; or declare it: "
                f"layouts={{'self.{name}': 'saved'}}, or 'constant' if only its constructor sets it."
            )
            break
    return problems


def refuse_remembered(inner: torch.optim.Optimizer, known: Collection[str] = ()) -> None:
    """Checks that the optimizer finds its parameters in its groups, and has not noted them elsewhere.

    What it has noted would be updated in place of what it is shown. A group's own list may have a second name.

    Args:
        inner: the optimizer.
        known: attributes whose parameters no step updates.

    Raises:
        PresentationError: an attribute holds parameters, or another optimizer.
    """
    around = [name for name, value in vars(inner).items() if isinstance(value, torch.optim.Optimizer)]
    if around:
        raise PresentationError(
            f"{type(inner).__name__} is made around another optimizer (self.{around[0]}), which has groups and state "
            "of its own that only it steps; wrap that one."
        )
    lists = {id(group["params"]) for group in inner.param_groups}
    params = {id(param) for group in inner.param_groups for param in group["params"]}
    noted = [
        name
        for name, value in vars(inner).items()
        if name not in _KNOWN
        and name not in known
        and any(id(found) in params for found in _noted(value, lists, set()))
    ]
    if noted:
        raise PresentationError(
            f"{type(inner).__name__} holds its parameters in {', '.join(f'self.{name}' for name in noted)} too, and "
            "would update those in place of what it is shown; it must look for them in its groups. compute='dtensor' "
            "shows it the parameters themselves."
        )


def _noted(value: Any, lists: Container[int], seen: set[int]) -> Iterator[Tensor]:
    """Tensors in attributes and containers in them, keys of dicts too; not in the groups' own lists."""
    if id(value) in seen or id(value) in lists:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in (*value.keys(), *value.values()):
            yield from _noted(item, lists, seen)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from _noted(item, lists, seen)


def _found(value: Any, inner: torch.optim.Optimizer, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.optim.Optimizer):
        if value is not inner and value.state is not inner.state and value.state:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _found(item, inner, seen)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from _found(item, inner, seen)
