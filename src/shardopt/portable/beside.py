"""State that belongs to an optimizer and to no parameter: counters and averages that rules keep under names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.portable.decode import decode
from shardopt.portable.encode import encode
from shardopt.portable.tagged import Json
from shardopt.presentation.inventory import Inventory

__all__ = ["BESIDE", "describe_beside", "read_beside"]

BESIDE = "beside"
"""In the manifest's ``extra``: of each optimizer the state under names, the same on every rank."""


def describe_beside(inventory: Inventory) -> list[Json]:
    """The named state of each optimizer, as the manifest has it.

    Raises:
        PlacementError: a value has no exact form, or is too large for a manifest.
    """
    return [_of_optimizer(part.inner) for part in inventory.parts]


def _of_optimizer(inner: torch.optim.Optimizer) -> Json:
    label = type(inner).__name__
    return {
        key: _described(value, f"{label}.state[{key!r}]") for key, value in inner.state.items() if isinstance(key, str)
    }


def _described(value: Any, path: str) -> Json:
    # The encoded form of a tensor does not say where it was; rules keep such counters on the host.
    on = value.device.type if isinstance(value, Tensor) else None
    return {"value": encode(value, path), "on": on}


def read_beside(extra: Mapping[str, Json], index: int, device: torch.device) -> dict[str, Any] | None:
    """What was saved of one optimizer; None when the checkpoint does not say.

    Args:
        extra: the manifest's.
        index: of the optimizer.
        device: of its parameters, for tensors that were on a device like that.

    Raises:
        FormatError: a value is damaged, or of a class that is not declared here.
    """
    saved = extra.get(BESIDE)
    if not isinstance(saved, list) or index >= len(saved):
        return None
    named = saved[index]
    found: dict[str, Any] = {}
    for key, told in (named if isinstance(named, dict) else {}).items():
        if not isinstance(told, dict):
            continue
        value = decode(told.get("value"), f"state[{key!r}]")
        found[key] = value.to(device) if isinstance(value, Tensor) and told.get("on") == device.type else value
    return found
