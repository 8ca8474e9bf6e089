"""State that belongs to an optimizer and to no parameter: counters and averages that rules keep under names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import PlacementError
from shardopt.layouts.declared import ATTRIBUTE
from shardopt.portable.decode import decode
from shardopt.portable.encode import encode
from shardopt.portable.tagged import Json, damaged
from shardopt.portable.tensor_bytes import TensorForm, byte_view, dtype_name
from shardopt.presentation.inventory import Inventory, Part

__all__ = ["BESIDE", "Constant", "describe_beside", "digest_of", "read_beside"]

BESIDE = "beside"
"""In the manifest's ``extra``: of each optimizer the state under names, the same on every rank."""


@dataclass(frozen=True, slots=True)
class Constant:
    """An attribute that was declared constant, by its digest."""

    digest: str


def describe_beside(inventory: Inventory) -> list[Json]:
    """The named state of each optimizer, as the manifest has it.

    Raises:
        PlacementError: a value has no exact form, or is too large for a manifest.
    """
    return [_of_part(part) for part in inventory.parts]


def _of_part(part: Part) -> Json:
    label = type(part.inner).__name__
    named = {key: value for key, value in part.inner.state.items() if isinstance(key, str)}
    told: dict[str, Json] = {key: _described(value, f"{label}.state[{key!r}]") for key, value in named.items()}
    for name in part.saved_attributes:
        # An attribute that a rule makes in its first step is not there before.
        if name in vars(part.inner):
            told[ATTRIBUTE + name] = _described(vars(part.inner)[name], f"{label}.{name}")
    for name in part.constants:
        digest = digest_of(vars(part.inner)[name], f"{label}.{name}")
        if part.constant_digests.get(name, digest) != digest:
            raise PlacementError(
                f"{label}.{name} is declared constant, and has changed since the optimizer was wrapped; declare it "
                f"'saved': layouts={{{ATTRIBUTE + name!r}: 'saved'}}."
            )
        told[ATTRIBUTE + name] = {"constant": digest}
    return told


def digest_of(value: Any, path: str) -> str:
    """A number that tells a constant from any other; its tensors may have any size."""
    digest = hashlib.blake2b(digest_size=16)

    def leaf(tensor: Tensor, _: str) -> Json:
        form = TensorForm.of(tensor, path)
        digest.update(byte_view(tensor.detach().cpu(), form).numpy().tobytes())
        return [dtype_name(tensor.dtype), list(tensor.shape)]

    digest.update(json.dumps(encode(value, path, tensor=leaf)).encode())
    return digest.hexdigest()


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
    if BESIDE not in extra:
        return None
    saved = extra[BESIDE]
    named = saved[index] if isinstance(saved, list) and index < len(saved) else None
    if not isinstance(named, dict):
        raise damaged(BESIDE, f"got {saved!r:.80}, expected an object for optimizer {index}")
    found: dict[str, Any] = {}
    for key, told in named.items():
        if not isinstance(told, dict) or not ("constant" in told or "value" in told):
            raise damaged(f"{BESIDE}[{index}].{key}", f"got {told!r:.80}, expected a value or a constant")
        if "constant" in told:
            found[key] = Constant(str(told["constant"]))
            continue
        value = decode(told["value"], f"state[{key!r}]")
        found[key] = value.to(device) if isinstance(value, Tensor) and told.get("on") == device.type else value
    return found
