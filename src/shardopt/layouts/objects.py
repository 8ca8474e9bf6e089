"""Classes whose objects may be saved with the state: told by name in a checkpoint, and never imported by a load."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["declare_saved", "fields_of_object", "rebuilt", "saved_as", "saved_class"]

_DECLARED: dict[str, type] = {}

# Of pytorch-optimizer: what its rules keep in state and in groups. Found where its modules are loaded already.
_UTILS = "pytorch_optimizer.optimizer.utils"
_KNOWN: frozenset[str] = frozenset(
    (
        "pytorch_optimizer.optimizer.scion.LMONorm",
        f"{_UTILS}.galore.GaLoreProjector",
        *(f"{_UTILS}.graft.{name}" for name in ("AdaGradGraft", "Graft", "LayerWiseGrafting", "RMSPropGraft")),
        *(f"{_UTILS}.graft.{name}" for name in ("SGDGraft", "SQRTNGraft")),
        *(f"{_UTILS}.partition.{name}" for name in ("BlockPartitioner", "PreConditionerType")),
        f"{_UTILS}.preconditioner.PreConditioner",
    )
)


def declare_saved(*classes: type) -> None:
    """Lets objects of these classes be saved where a rule keeps them in its state or in a parameter group.

    An enumeration is saved by its member's name, any other object by the values of its attributes. A load makes it
    anew without calling its constructor, and only if its class is declared there too. Declare it on every rank.

    Args:
        classes: enumerations, or classes whose objects have a ``__dict__``; a subclass is a class of its own.

    Raises:
        TypeError: something is no class, or its objects have no ``__dict__``.
    """
    for kind in classes:
        if not isinstance(kind, type):
            raise TypeError(f"declare_saved({kind!r}): expected a class.")
        if not (issubclass(kind, enum.Enum) or getattr(kind, "__dictoffset__", 0)):
            raise TypeError(f"declare_saved({kind.__qualname__}): its objects have no attributes of their own to save.")
        _DECLARED[_name(kind)] = kind


def saved_as(kind: type) -> str | None:
    """The name under which objects of exactly this class are saved; None when they are not."""
    name = _name(kind)
    return name if saved_class(name) is kind else None


def saved_class(name: str) -> type | None:
    """The declared or known class of this name; None when there is none in this process."""
    if name in _DECLARED or name not in _KNOWN:
        return _DECLARED.get(name)
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) else None


def fields_of_object(value: Any) -> dict[object, Any]:
    """What is saved of an object: its attributes, or of an enumeration the member's name."""
    return {"name": value.name} if isinstance(value, enum.Enum) else dict(vars(value))


def rebuilt(kind: type, fields: Mapping[str, Any]) -> Any:
    """The object with these fields.

    Raises:
        KeyError: the enumeration has no such member.
    """
    if issubclass(kind, enum.Enum):
        return kind[fields["name"]]
    made = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
