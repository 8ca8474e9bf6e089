"""The state of several optimizers as one mapping."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor

from shardopt.presentation.inventory import Inventory

__all__ = ["JoinedState"]


class JoinedState(MutableMapping[Tensor, Any]):
    """The state of several optimizers as one mapping; each entry stays in its own optimizer."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    def _home(self, param: Tensor) -> MutableMapping[Tensor, Any]:
        item = self._inventory.by_id.get(id(param))
        if item is None:
            raise KeyError("the tensor is not a parameter of any of the wrapped optimizers")
        return self._inventory.part_of(item).inner.state

    def __getitem__(self, key: Tensor) -> Any:
        return self._home(key)[key]

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: Tensor) -> None:
        del self._home(key)[key]

    # Mapping's own ask __getitem__, which makes an entry: the wrapped optimizers' states are defaultdicts.
    def __contains__(self, key: object) -> bool:
        return any(key in part.inner.state for part in self._inventory.parts)

    def get(self, key: Tensor, default: Any = None) -> Any:
        """The parameter's state if it has any; makes none."""
        return next((part.inner.state[key] for part in self._inventory.parts if key in part.inner.state), default)

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._inventory.parts:
            yield from part.inner.state

    def __len__(self) -> int:
        return sum(len(part.inner.state) for part in self._inventory.parts)
