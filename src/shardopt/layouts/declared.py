"""What users say about state that nothing can be known of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from shardopt.layouts.interchange import qualified

__all__ = [
    "ATTRIBUTE",
    "CONSTANT",
    "ELEMENTWISE",
    "MASTER",
    "RANK_LOCAL",
    "SAME",
    "SAVED",
    "checked_layouts",
    "layouts_of",
    "register_layouts",
]

ELEMENTWISE = "elementwise"
"""Of an entry of a parameter's state: a number for each element of the parameter, sharded like it."""
MASTER = "master"
"""Of an entry: the parameter itself in a wider dtype, of which the parameter is the nearest rounding."""
SAME = "same"
"""Of an entry of a parameter's state: a tensor of another shape than the parameter's, the same on every rank."""
RANK_LOCAL = "rank_local"
"""Of an entry: each rank's own and nobody else's to interpret, for the same ranks with the same shards only."""
SAVED = "saved"
"""Of an attribute: part of the optimizer's state, the same on every rank; saved and loaded with it."""
CONSTANT = "constant"
"""Of an attribute: made by the constructor and never changed; compared with the checkpoint's, not loaded."""

ATTRIBUTE = "self."
"""What the name of an attribute of the optimizer begins with, among names of entries."""

_NONE: Mapping[str, str] = MappingProxyType({})
# By the class's qualified name.
_REGISTERED: dict[str, Mapping[str, str]] = {}


def register_layouts(optimizer_class: type[torch.optim.Optimizer] | str, layouts: Mapping[str, str]) -> None:
    """Says for every optimizer of a class where state belongs that cannot be placed otherwise.

    Declare it on every rank, before the optimizer is wrapped. ``ShardedStateOptimizer(layouts=...)`` says it for one.

    Args:
        optimizer_class: the class, or its module and name; a subclass is a class of its own.
        layouts: ``{"momentum": "elementwise"}``, ``"master"``, ``"same"`` or ``"rank_local"`` for an entry of a
            parameter's state; ``{"self.scales": "saved"}`` or ``"constant"`` for an attribute of the optimizer.

    Raises:
        TypeError: what is declared is no mapping of names to layouts, or there is no such class.
        ValueError: a layout is unknown, or does not suit the name.
    """
    _REGISTERED[qualified(optimizer_class)] = checked_layouts(layouts)


def layouts_of(optimizer: torch.optim.Optimizer) -> Mapping[str, str]:
    """What is registered for the optimizer's class."""
    return _REGISTERED.get(qualified(type(optimizer)), _NONE)


def checked_layouts(layouts: Mapping[str, str]) -> Mapping[str, str]:
    """A copy that does not change any more.

    Raises:
        TypeError, ValueError: see ``register_layouts``.
    """
    if not isinstance(layouts, Mapping) or not all(isinstance(name, str) for name in layouts):
        raise TypeError(f"layouts={layouts!r}: expected a dict from names to layouts.")
    for name, layout in layouts.items():
        allowed = (SAVED, CONSTANT) if name.startswith(ATTRIBUTE) else (ELEMENTWISE, MASTER, SAME, RANK_LOCAL)
        if layout not in allowed:
            kind = "an attribute of the optimizer" if name.startswith(ATTRIBUTE) else "an entry of a parameter's state"
            raise ValueError(
                f"layouts={{{name!r}: {layout!r}}}: {name!r} is {kind}, for which a layout is one of "
                f"{', '.join(map(repr, allowed))}; attributes are written {ATTRIBUTE + 'name'!r}."
            )
    return MappingProxyType(dict(layouts))
