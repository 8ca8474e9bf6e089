"""Matching parameter groups by their members' names, and planning their new values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardopt.portable.encode import equal
from shardopt.staging.filling import can_be_filled
from shardopt.staging.report import Report

__all__ = ["GroupPlan", "SavedGroup", "plan_groups"]

# Which kernel runs is the live optimizer's choice; the numbers do not depend on it.
_IMPLEMENTATION_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable"})
_STRUCTURE_KEYS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group of the checkpoint: who was in it, and its values."""

    members: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(slots=True)
class GroupPlan:
    """New values for one live group; its dict and its tensor ``lr`` keep their identity."""

    group: dict[str, Any]
    fill: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    assign: dict[str, Any] = field(default_factory=dict)

    def commit(self) -> None:
        """Puts the values in place."""
        for live, saved in self.fill:
            live.copy_(saved)
        self.group.update(self.assign)


def plan_groups(
    live: Sequence[tuple[dict[str, Any], Sequence[str]]],
    saved: Sequence[SavedGroup],
    report: Report,
    *,
    hyperparameters: str | Mapping[str, Any] = "checkpoint",
) -> list[GroupPlan]:
    """Plans the values of every live group from the saved groups its members were in.

    Args:
        live: each group's own dict with its members' FQNs, as the checkpoint names them.
        saved: the checkpoint's groups.
        report: gets a problem for each key on which members of one live group disagree.
        hyperparameters: ``"checkpoint"``, ``"keep"`` for the live values, or values that replace the saved ones.
    """
    if hyperparameters == "keep":
        report.notes.append("hyperparameters='keep': every group keeps its live values.")
        return [GroupPlan(group) for group, _ in live]
    given = hyperparameters if isinstance(hyperparameters, Mapping) else {}
    group_of = {fqn: group for group in saved for fqn in group.members}
    plans: list[GroupPlan] = []
    for index, (group, members) in enumerate(live):
        label = f"group {index}"
        sources: dict[int, tuple[str, SavedGroup]] = {}
        for fqn in members:
            if fqn in group_of:
                sources.setdefault(id(group_of[fqn]), (fqn, group_of[fqn]))
        plan = GroupPlan(group)
        plans.append(plan)
        if sources:
            _plan_values(label, plan, list(sources.values()), given, report)
        else:
            report.notes.append(f"{label}: none of its parameters is in the checkpoint; it keeps its live values.")
        for key in given:
            if key in group and _is_like(label, key, given[key], group[key], report):
                _plan_value(label, plan, key, given[key], report)
                report.notes.append(f"{label}: {key!r} is {given[key]!r}, as hyperparameters= says.")
    unknown = sorted(key for key in given if not any(key in group for group, _ in live))
    if unknown:
        report.problems.append(f"hyperparameters={unknown}: no parameter group of this optimizer has such a key.")
    _refuse_shared(plans, report)
    return plans


def _is_like(label: str, key: str, given: Any, live: Any, report: Report) -> bool:
    """Whether a given value can stand where the live one does; a problem if not."""
    number = (int, float)
    kinds = bool if isinstance(live, bool) else (*number, Tensor) if isinstance(live, (*number, Tensor)) else type(live)
    if live is None or (isinstance(given, kinds) and (kinds is bool or not isinstance(given, bool))):
        return True
    report.problems.append(
        f"{label}: hyperparameters={{{key!r}: {given!r}}} is a {type(given).__name__}, where the group has {live!r}."
    )
    return False


def _refuse_shared(plans: Sequence[GroupPlan], report: Report) -> None:
    """Notes each tensor that several groups share and that would have to take two values."""
    first: dict[int, tuple[int, Tensor]] = {}
    for index, plan in enumerate(plans):
        for live, saved in plan.fill:
            owner, value = first.setdefault(id(live), (index, saved))
            if not torch.equal(value.to(live.dtype), saved.to(live.dtype)):
                key = next((key for key, held in plan.group.items() if held is live), "betas")
                report.problems.append(
                    f"group {index}: {key!r} is the tensor that group {owner} has too, and they were saved with "
                    f"different values, {value!r} and {saved!r}. Give each group a tensor of its own."
                )


def _plan_values(
    label: str, plan: GroupPlan, sources: list[tuple[str, SavedGroup]], given: Mapping[str, Any], report: Report
) -> None:
    first_fqn, first = sources[0]
    skipped = _IMPLEMENTATION_KEYS | _STRUCTURE_KEYS | given.keys()
    keys = [*dict.fromkeys(key for _, group in sources for key in group.values)]
    for key in (key for key in keys if key not in skipped):
        conflict = [
            (fqn, group.values.get(key)) for fqn, group in sources[1:] if not _agree(first.values, group.values, key)
        ]
        if conflict:
            other_fqn, other = conflict[0]
            report.problems.append(
                f"{label}: its parameters were saved with different {key!r}: {first_fqn} with "
                f"{first.values.get(key)!r}, {other_fqn} with {other!r}. Group them as they were saved, or give the "
                f"value: hyperparameters={{{key!r}: ...}}."
            )
            continue
        _plan_value(label, plan, key, first.values[key], report)
    kept = [key for key in plan.group if key not in keys and key not in skipped]
    if kept:
        report.notes.append(f"{label}: {kept} is not in the checkpoint and keeps its live value.")


def _agree(left: Mapping[str, Any], right: Mapping[str, Any], key: str) -> bool:
    return key in left and key in right and equal(left[key], right[key])


def _plan_value(label: str, plan: GroupPlan, key: str, saved: Any, report: Report) -> None:
    live = plan.group.get(key)
    if isinstance(live, Tensor):
        value = saved if isinstance(saved, Tensor) else _as_tensor(saved, live)
        if value is None or value.shape != live.shape:
            report.problems.append(f"{label}: {key!r} is a tensor of shape {tuple(live.shape)}, saved as {saved!r}.")
            return
        if not can_be_filled(live):
            report.problems.append(
                f"{label}: {key!r} is an expanded tensor, whose elements share memory; give it a tensor of its own."
            )
            return
        if not _fits(value, live):
            report.problems.append(f"{label}: {key!r} was saved as {saved!r} and cannot be held by {live.dtype}.")
            return
        plan.fill.append((live, value))
        if not isinstance(saved, Tensor):
            report.notes.append(f"{label}: {key!r} was saved as a {type(saved).__name__} and stays a tensor.")
    elif isinstance(saved, Tensor) and key in plan.group and isinstance(live, (int, float)) and saved.numel() == 1:
        plan.assign[key] = saved.item()
        report.notes.append(f"{label}: {key!r} was saved as a tensor and stays a {type(live).__name__}.")
    elif isinstance(live, (tuple, list)) and type(live) is type(saved) and len(live) == len(saved):
        _note_change(label, key, live, saved, report)
        plan.assign[key] = _plan_items(plan, live, saved)
    else:
        if key in plan.group:
            _note_change(label, key, live, saved, report)
        plan.assign[key] = saved


def _note_change(label: str, key: str, live: Any, saved: Any, report: Report) -> None:
    # Schedules change lr all the time; any other difference is one between two scripts.
    if key not in ("lr", "initial_lr") and not equal(live, saved):
        report.notes.append(f"{label}: {key!r} was saved as {saved!r}, which replaces {live!r}.")


def _plan_items(plan: GroupPlan, live: Sequence[Any], saved: Any) -> Any:
    """``saved``, a tuple or list like ``live``, with the live tensors in it (``betas``) kept, to be filled."""
    kept = [
        one if isinstance(one, Tensor) and isinstance(two, Tensor) and _alike(one, two) else two
        for one, two in zip(live, saved, strict=True)
    ]
    plan.fill += [(one, two) for one, two in zip(kept, saved, strict=True) if one is not two]
    # A namedtuple's class takes its items one by one.
    return saved if all(one is two for one, two in zip(kept, saved, strict=True)) else type(saved)(kept)


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and can_be_filled(left)


def _as_tensor(saved: Any, live: Tensor) -> Tensor | None:
    # float64 first: the rounding to the live dtype is then torch's own, once.
    return torch.tensor(saved, dtype=torch.float64).expand_as(live) if isinstance(saved, (int, float)) else None


def _fits(value: Tensor, live: Tensor) -> bool:
    if live.dtype.is_floating_point or live.dtype.is_complex:
        return True
    return torch.equal(value.to(live.dtype).to(value.dtype), value)
