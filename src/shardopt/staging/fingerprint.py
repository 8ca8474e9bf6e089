"""Telling whether an optimizer has moved since a load was prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardopt.presentation.inventory import Inventory
from shardopt.torch_compat import storage_token

__all__ = ["Fingerprint"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Who the optimizer's objects are, without reading a byte of their contents.

    Weights written in place do not count: loading the model between prepare and commit is fine.
    """

    steps: int
    groups: tuple[tuple[Any, ...], ...]
    params: tuple[tuple[Any, ...], ...]
    state: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, inventory: Inventory, steps: int) -> Fingerprint:
        """Takes the fingerprint; ``steps`` counts everything the wrapper itself has changed."""
        groups = tuple((group, *group["params"], *_tensors(group)) for group in inventory.groups())
        params: list[tuple[Any, ...]] = []
        state: list[tuple[Any, ...]] = []
        for tracked in inventory.tracked:
            local = tracked.local
            params.append((tracked.param, storage_token(tracked.param), local, local.data_ptr()))
            for entry, value in (inventory.state_of(tracked) or {}).items():
                state.append((entry, value, _version(value)))
        return cls(steps, groups, tuple(params), tuple(state))

    def difference(self, other: Fingerprint) -> str | None:
        """What moved, in words, or None."""
        if self.steps != other.steps:
            return "the optimizer stepped, loaded, prepared another load, or got a new parameter group"
        for what, mine, theirs in (
            ("a parameter group was added, removed or refilled, or given another tensor", self.groups, other.groups),
            ("a parameter was given other data", self.params, other.params),
            ("optimizer state was changed", self.state, other.state),
        ):
            if len(mine) != len(theirs) or not all(map(_same, mine, theirs)):
                return what
        return None


def _tensors(group: dict[str, Any]) -> list[Any]:
    # A load copies into them, and one that was put in since would keep its value.
    return [part for key, value in group.items() if isinstance(value, Tensor) for part in (key, value)]


def _version(value: Any) -> int | None:
    # Tensors made in inference mode have none, and raise.
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(
        a is b or (isinstance(a, (int, str)) and type(a) is type(b) and a == b)
        for a, b in zip(left, right, strict=True)
    )
