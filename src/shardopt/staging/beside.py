"""Planning what a load gives an optimizer that belongs to none of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import FormatError
from shardopt.layouts.declared import ATTRIBUTE
from shardopt.layouts.interchange import is_interchangeable
from shardopt.portable.beside import BESIDE, Constant, digest_of, read_beside
from shardopt.portable.export import DRAWS
from shardopt.portable.manifest import Manifest
from shardopt.presentation.choice import qualified_name
from shardopt.presentation.inventory import Inventory, Part
from shardopt.staging.filling import can_be_filled
from shardopt.staging.report import Report

__all__ = ["BesidePlan", "plan_beside"]


@dataclass(slots=True)
class BesidePlan:
    """New values of one optimizer.

    Attributes:
        part: the optimizer.
        named: its whole state under names; None to leave that as it is.
        draws: seed and number of steps of its random numbers; None to leave them.
    """

    part: Part
    named: Mapping[str, Any] | None
    draws: tuple[int, int] | None

    def commit(self) -> None:
        """Puts them in place; a live tensor that can take its value keeps its identity."""
        if self.draws is not None:
            self.part.presentation.set_draws(*self.draws)
        if self.named is None:
            return
        state: dict[Any, Any] = self.part.inner.state
        for key in [key for key in state if isinstance(key, str) and key not in self.named]:
            del state[key]
        for key, value in self.named.items():
            if isinstance(value, Constant):
                continue
            holder = vars(self.part.inner) if key.startswith(ATTRIBUTE) else state
            name = key.removeprefix(ATTRIBUTE)
            live = holder.get(name)
            if isinstance(value, Tensor) and isinstance(live, Tensor) and _takes(live, value):
                live.copy_(value)
            else:
                holder[name] = value


def _takes(live: Tensor, value: Tensor) -> bool:
    return live.shape == value.shape and live.dtype == value.dtype and can_be_filled(live)


def plan_beside(inventory: Inventory, manifest: Manifest, report: Report) -> list[BesidePlan]:
    """What was saved of each optimizer; of one that has another place or class in the checkpoint nothing is taken."""
    return list(_plans(inventory, manifest, report))


def _plans(inventory: Inventory, manifest: Manifest, report: Report) -> Iterator[BesidePlan]:
    for index, part in enumerate(inventory.parts):
        alike = index < len(manifest.optimizers) and is_interchangeable(
            manifest.optimizers[index].class_name, qualified_name(part.inner)
        )
        if not alike:
            if BESIDE in manifest.extra or DRAWS in manifest.extra:
                report.notes.append(
                    f"{type(part.inner).__name__}: optimizer {index} of the checkpoint is of another class; what was "
                    "saved under names, in attributes and of random numbers is not taken."
                )
            continue
        devices = [item.local.device for item in inventory.tracked if item.optimizer == index]
        try:
            named = read_beside(manifest.extra, index, devices[0] if devices else torch.device("cpu"))
        except FormatError as error:
            report.problems.append(f"{type(part.inner).__name__}: {error}")
            continue
        report.problems += _unlike(part, named or {})
        held = (name for name in part.saved_attributes if name in vars(part.inner))
        kept = [name for name in held if ATTRIBUTE + name not in (named or {})]
        if kept:
            label = type(part.inner).__name__
            report.notes.append(f"{label}: its attributes {kept} are not in the checkpoint, and stay.")
        yield BesidePlan(part, named, _draws(part, manifest, index))


def _unlike(part: Part, named: Mapping[str, Any]) -> Iterator[str]:
    """Attributes that are declared otherwise than they were saved."""
    label = type(part.inner).__name__
    constants = {ATTRIBUTE + name: name for name in part.constants}
    for key in sorted({*constants, *(key for key in named if key.startswith(ATTRIBUTE))}):
        told = named.get(key)
        if isinstance(told, Constant) and key in constants:
            if told.digest != digest_of(vars(part.inner)[constants[key]], label):
                yield (
                    f"{label}: {key} is declared constant, and was saved with another value; build the optimizer with "
                    "the arguments it was saved with."
                )
        elif isinstance(told, Constant) or key in constants:
            there = "constant" if isinstance(told, Constant) else "not constant" if key in named else "absent"
            yield f"{label}: {key} is {there} in the checkpoint; declare it in layouts= as it was when it was saved."


def _draws(part: Part, manifest: Manifest, index: int) -> tuple[int, int] | None:
    saved = manifest.extra.get(DRAWS)
    pair = saved[index] if isinstance(saved, list) and index < len(saved) else None
    if part.presentation.draws is None or not isinstance(pair, list) or len(pair) != 2:
        return None
    seed, num_steps = pair
    return (seed, num_steps) if isinstance(seed, int) and isinstance(num_steps, int) else None
