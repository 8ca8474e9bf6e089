"""A group's value on its way into the live group: the live one's kind stays, objects are nobody else's."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt.staging.filling import can_be_filled
from shardopt.staging.report import Report

__all__ = ["Placing", "is_nan", "why_unlike"]


@dataclass(slots=True)
class Placing:
    """Places one value of one group.

    Attributes:
        label: what errors call it, e.g. ``"group 0: 'lr'"``.
        came: how they say where the value is from, ``"was saved as"``.
        fill: gets live tensors, which keep their identity, with what is copied into them.
        report: gets problems and notes.
    """

    label: str
    came: str
    fill: list[tuple[Tensor, Tensor]]
    report: Report

    def place(self, live: Any, value: Any) -> Any:
        """What stands in the group afterwards: a live tensor itself, numbers in the live kind, a copy of all else."""
        if isinstance(live, Tensor):
            return self._fill(live, value)
        if isinstance(value, Tensor) and _is_number(live) and value.numel() == 1:
            self.report.notes.append(f"{self.label} {self.came} a tensor and stays a {type(live).__name__}.")
            return value.item()
        if isinstance(live, (tuple, list)) and type(live) is type(value) and len(live) == len(value):
            items = [self.place(one, two) for one, two in zip(live, value, strict=True)]
            return type(live)(*items) if hasattr(live, "_fields") else type(live)(items)
        # Each group an object of its own: two that held one list would change together from now on.
        return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

    def _fill(self, live: Tensor, saved: Any) -> Tensor:
        value = saved if isinstance(saved, Tensor) else _as_tensor(saved, live)
        problem = None
        if value is None or value.shape != live.shape:
            problem = f"is a tensor of shape {tuple(live.shape)}, and {self.came} {saved!r}."
        elif not can_be_filled(live):
            problem = "is a tensor that cannot be written to: expanded, made in inference mode, or on the meta device."
        elif not _fits(value, live):
            problem = f"{self.came} {saved!r} and cannot be held by {live.dtype}."
        elif not isinstance(saved, Tensor):
            self.report.notes.append(f"{self.label} {self.came} a {type(saved).__name__} and stays a tensor.")
        if problem is not None:
            self.report.problems.append(f"{self.label} {problem}")
        elif value is not None:
            self.fill.append((live, value))
        return live


def why_unlike(given: Any, live: Any) -> str | None:
    """Why a given value cannot stand where the live one does, in words; None when it can."""
    if is_nan(given):
        return f"is {given!r}"
    if isinstance(given, Tensor) and given.dtype == torch.bool and not (isinstance(live, Tensor) or live is None):
        return f"is a tensor of bool, where {live!r} is"
    if live is None:
        return None
    if _is_number(live) or isinstance(live, Tensor):
        if isinstance(given, Tensor):
            shapes = (torch.Size(), torch.Size([1])) if _is_number(live) else (live.shape,)
            return None if given.shape in shapes else f"is a tensor of shape {tuple(given.shape)}, where {live!r} is"
        return None if _is_number(given) else f"is a {type(given).__name__}, where {live!r} is"
    if type(given) is not type(live):
        return f"is a {type(given).__name__}, where {live!r} is"
    if isinstance(live, (tuple, list)):
        if len(given) != len(live):
            return f"has {len(given)} items, where {live!r} has {len(live)}"
        return next((why for pair in zip(given, live, strict=True) if (why := why_unlike(*pair)) is not None), None)
    return None


def is_nan(value: Any) -> bool:
    """Whether the value is a number, or a tensor of numbers, that is not one."""
    if isinstance(value, Tensor):
        return bool(value.isnan().any())
    return isinstance(value, float) and math.isnan(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_tensor(saved: Any, live: Tensor) -> Tensor | None:
    # float64 first: the rounding to the live dtype is then torch's own, once.
    return torch.tensor(saved, dtype=torch.float64).expand_as(live) if _is_number(saved) else None


def _fits(value: Tensor, live: Tensor) -> bool:
    """Whether the live dtype holds the value: exactly if it is an integer, else up to rounding that stays a number."""
    held = value.to(live.dtype)
    if not (live.dtype.is_floating_point or live.dtype.is_complex):
        return torch.equal(held.to(value.dtype), value)
    vanished = (held == 0) & (value != 0)
    return not bool((vanished | (held.isfinite() != value.isfinite())).any())
