"""Attributes of an optimizer that are part of its state: what they hold, in a form that shows a change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["changed", "held_in"]

# What torch notes on an optimizer, and what a checkpoint has anyway.
_NOT_LOOKED_AT = frozenset(
    ("_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured", "defaults", "param_groups", "state", "step")
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 6

# Of what is not looked into: functions, modules, and what is nested too deep.
_OPAQUE = "?"


def held_in(optimizer: torch.optim.Optimizer, *, objects: bool) -> dict[str, Any]:
    """What each attribute holds, copied: numbers and text, in containers too. Tensors are left out of it.

    Args:
        optimizer: whose.
        objects: whether attributes of other objects are looked into as well.
    """
    return {
        name: _copied(value, objects, 0)
        for name, value in vars(optimizer).items()
        if name not in _NOT_LOOKED_AT and "hooks" not in name
    }


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Names of attributes that hold something else than before, or were not there."""
    return {name for name, value in after.items() if value != _OPAQUE and before.get(name, _OPAQUE) != value}


def _copied(value: Any, objects: bool, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        # By kind too: 1, 1.0 and True are equal, and NaN is not.
        return type(value).__name__, repr(value)
    if depth == _MAX_DEPTH or isinstance(value, Tensor):
        return _OPAQUE
    if isinstance(value, Mapping):
        return "dict", [(repr(key), _copied(item, objects, depth + 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [_copied(item, objects, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, value))
    inside = vars(value) if objects and hasattr(value, "__dict__") and not callable(value) else None
    if inside is None or isinstance(value, (torch.nn.Module, torch.Generator)):
        return _OPAQUE
    return type(value).__name__, [(name, _copied(item, objects, depth + 1)) for name, item in inside.items()]
