"""Which optimizer classes may load each other's state."""

from __future__ import annotations

import torch

__all__ = ["declare_interchangeable", "is_interchangeable", "qualified"]

# Disjoint sets of qualified names. Torch's AdamW and the one on the host are one rule, with the same entries.
_ALIKE: list[set[str]] = [{"shardopt.swap.swap_adamw.SwapAdamW", "torch.optim.adamw.AdamW"}]


def declare_interchangeable(*classes: type[torch.optim.Optimizer] | str) -> None:
    """Lets these classes load each other's state: the same entries, with the same meaning, under the same names.

    For a class that was renamed or moved, or another implementation of one rule. Nothing else about a load is relaxed.
    Declare it on every rank, before the load.

    Args:
        classes: at least two, as classes or as a checkpoint calls them: ``"torch.optim.adamw.AdamW"``, module and name.

    Raises:
        TypeError: something is neither an optimizer class nor a name with a module.
        ValueError: there are fewer than two.
    """
    names = set(map(qualified, classes))
    if len(names) < 2:
        raise ValueError(f"declare_interchangeable{classes!r}: expected two different classes or more.")
    for known in [known for known in _ALIKE if known & names]:
        _ALIKE.remove(known)
        names |= known
    _ALIKE.append(names)


def is_interchangeable(one: str, other: str) -> bool:
    """Whether two classes, by their qualified names, are the same or were declared to be alike."""
    return one == other or any(one in known and other in known for known in _ALIKE)


def qualified(optimizer_class: type[torch.optim.Optimizer] | str) -> str:
    """Module and name of a class."""
    if isinstance(optimizer_class, str) and "." in optimizer_class:
        return optimizer_class
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer):
        return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    raise TypeError(f"expected an optimizer class, or its module and name in a string; got {optimizer_class!r}.")
