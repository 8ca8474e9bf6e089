"""Matching parameter groups by their members' names, and planning their new values."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardopt.portable.encode import equal
from shardopt.staging.filling import sharing_memory
from shardopt.staging.report import Report
from shardopt.staging.values import Placing, why_unlike

__all__ = ["NOT_VALUES", "GroupPlan", "SavedGroup", "plan_groups"]

# Which kernel runs is the live optimizer's choice; the numbers do not depend on it.
_IMPLEMENTATION_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable"})
NOT_VALUES = frozenset({"params", "param_names"})
"""Keys of a group that say who is in it."""


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

    def take(self, key: str, value: Any, placing: Placing) -> None:
        """Plans the new value of a key."""
        live = self.group.get(key)
        placed = placing.place(live, value)
        if placed is not live or key not in self.group:
            self.assign[key] = placed

    def values_after(self) -> dict[str, Any]:
        """The group's values as they will be."""
        saved_of = {id(live): saved for live, saved in self.fill}

        def after(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                items = [after(item) for item in value]
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            return saved_of.get(id(value), value)

        # Members by identity: they are no values.
        values = {**self.group, **self.assign}
        return {key: value if key in NOT_VALUES else after(value) for key, value in values.items()}


def plan_groups(
    live: Sequence[tuple[dict[str, Any], Sequence[str]]],
    saved: Sequence[SavedGroup],
    report: Report,
    *,
    hyperparameters: str | Mapping[str, Any] = "checkpoint",
    scratch: Container[str] = (),
) -> list[GroupPlan]:
    """Plans the values of every live group from the saved groups its members were in.

    Args:
        live: each group's own dict with its members' FQNs, as the checkpoint names them.
        saved: the checkpoint's groups.
        report: gets a problem for each key on which members of one live group disagree.
        hyperparameters: ``"checkpoint"``, ``"keep"`` for the live values, or values that replace the saved ones.
        scratch: keys that are none of a group's values, and of which there is nothing to say.
    """
    if hyperparameters == "keep":
        report.notes.append("hyperparameters='keep': every group keeps its live values.")
        return [GroupPlan(group) for group, _ in live]
    given = hyperparameters if isinstance(hyperparameters, Mapping) else {}
    group_of = {fqn: group for group in saved for fqn in group.members}
    plans: list[GroupPlan] = []
    known: set[str] = set()
    for index, (group, members) in enumerate(live):
        label = f"group {index}"
        sources: dict[int, tuple[str, SavedGroup]] = {}
        for fqn in members:
            if fqn in group_of:
                sources.setdefault(id(group_of[fqn]), (fqn, group_of[fqn]))
        plan = GroupPlan(group)
        plans.append(plan)
        if sources:
            _plan_values(label, plan, list(sources.values()), given, report, scratch)
        else:
            report.notes.append(f"{label}: none of its parameters is in the checkpoint; it keeps its live values.")
        known |= _plan_given(label, plan, [one for _, one in sources.values()], given, report)
    unknown = sorted(given.keys() - known)
    if unknown:
        report.problems.append(f"hyperparameters={unknown}: no parameter group of this optimizer has such a key.")
    _refuse_shared(plans, report)
    return plans


def _plan_given(
    label: str, plan: GroupPlan, sources: Sequence[SavedGroup], given: Mapping[str, Any], report: Report
) -> set[str]:
    """Plans the given values of the keys that the group has, or was saved with; returns these keys."""
    keys = [key for key in given if key in plan.group or any(key in source.values for source in sources)]
    for key in keys:
        value = given[key]
        held = plan.group.get(key, next((source.values[key] for source in sources if key in source.values), None))
        if key in _IMPLEMENTATION_KEYS:
            why = "says which kernel runs, which is the live optimizer's own: build it with that"
        else:
            why = why_unlike(value, held)
        if why is not None:
            report.problems.append(f"{label}: hyperparameters={{{key!r}: {value!r}}} {why}.")
            continue
        plan.take(key, value, Placing(f"{label}: {key!r}", "is given as", plan.fill, report))
        report.notes.append(f"{label}: {key!r} is {value!r}, as hyperparameters= says.")
    return set(keys)


def _refuse_shared(plans: Sequence[GroupPlan], report: Report) -> None:
    """Notes tensors of groups that share memory and would have to take two values."""
    first: dict[tuple[Any, ...], tuple[int, Tensor, Tensor]] = {}
    for index, plan in enumerate(plans):
        for live, saved in plan.fill:
            view = (live.data_ptr(), live.dtype, live.shape, live.stride())
            owner, _, value = first.setdefault(view, (index, live, saved))
            if not torch.equal(value.to(live.dtype), saved.to(live.dtype)):
                report.problems.append(
                    f"group {index}: {_key_of(plan, live)!r} is the tensor that group {owner} has too, and they were "
                    f"saved with different values, {value!r} and {saved!r}. Give each group a tensor of its own."
                )
    # Of different views of the same memory no order of copying is right.
    views = sharing_memory([live for _, live, _ in first.values()])
    where = [f"group {n}: {_key_of(plans[n], live)!r}" for n, live, _ in first.values() if id(live) in views]
    if where:
        report.problems.append(f"{', '.join(where)}: these tensors share memory. Give each a tensor of its own.")


def _key_of(plan: GroupPlan, live: Tensor) -> str:
    for key, held in plan.group.items():
        if key not in NOT_VALUES and any(item is live for item in tree_leaves(held)):
            return key
    raise AssertionError("a tensor that is filled is in its group")


def _plan_values(
    label: str,
    plan: GroupPlan,
    sources: list[tuple[str, SavedGroup]],
    given: Mapping[str, Any],
    report: Report,
    scratch: Container[str],
) -> None:
    first_fqn, first = sources[0]
    skipped = _IMPLEMENTATION_KEYS | NOT_VALUES | given.keys()
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
        live, saved = plan.group.get(key), first.values[key]
        # Schedules change lr all the time; any other difference is one between two scripts.
        if key in plan.group and key not in ("lr", "initial_lr") and not _same_value(live, saved):
            report.notes.append(f"{label}: {key!r} was saved as {saved!r}, which replaces {live!r}.")
        plan.take(key, saved, Placing(f"{label}: {key!r}", "was saved as", plan.fill, report))
    kept = [key for key in plan.group if key not in keys and key not in skipped and key not in scratch]
    if kept:
        report.notes.append(f"{label}: {kept} is not in the checkpoint and keeps its live value.")


def _agree(left: Mapping[str, Any], right: Mapping[str, Any], key: str) -> bool:
    return key in left and key in right and equal(left[key], right[key])


def _same_value(live: Any, saved: Any) -> bool:
    # Of a tensor on one side the kind is said elsewhere.
    return isinstance(live, Tensor) or isinstance(saved, Tensor) or equal(live, saved)
