"""Checking a state dict of torch's form against an optimizer's memory, with all problems in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardopt.errors import LoadError
from shardopt.staging.finite import find_non_finite
from shardopt.staging.groups import NOT_VALUES, GroupPlan
from shardopt.staging.report import Report
from shardopt.staging.values import Placing
from shardopt.swap.engine import Engine
from shardopt.swap.fitting import Fill, copy_all, fit, missing_masters, staged
from shardopt.swap.held import MASTER, MAX, REMAINDER, Held
from shardopt.swap.numbers import Groups, hypers

__all__ = ["StateLoad", "plan_load"]

# Which kernel runs is the live optimizer's choice.
_LEFT_OUT = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(slots=True)
class StateLoad:
    """A checked load.

    Attributes:
        fills: memory of state, with what is copied there.
        anew: parameters of which nothing was saved.
        groups: new values of the groups.
    """

    fills: list[Fill] = field(default_factory=list)
    anew: list[Held] = field(default_factory=list)
    groups: list[GroupPlan] = field(default_factory=list)

    def commit(self) -> None:
        """Puts all of it in place."""
        copy_all(self.fills)
        for one in self.anew:
            one.reset()
        for plan in self.groups:
            plan.commit()


def plan_load(engine: Engine, groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> StateLoad:
    """Plans a load; changes nothing.

    Raises:
        LoadError: it does not fit; every problem is listed.
    """
    report = Report()
    plan = StateLoad()
    saved_groups, saved_state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(saved_groups, list) or not isinstance(saved_state, Mapping):
        report.problems.append(
            f"it has no 'param_groups' and 'state' of torch's form, but {sorted(map(str, state_dict))[:5]}"
        )
        raise LoadError(report.summary(), report.problems)
    ids = _matched(groups, saved_groups, report)
    if not report.problems:
        _plan_state(plan, engine, ids, saved_state, report)
        _plan_groups(plan, engine, groups, saved_groups, report)
    if report.problems:
        raise LoadError(report.summary(), report.problems)
    plan.fills = staged(plan.fills)
    return plan


def _matched(groups: Groups, saved: Sequence[Mapping[str, Any]], report: Report) -> list[Any]:
    """What the state dict calls each parameter, by position as torch has it."""
    sizes = [[len(group["params"]) for group in listed] for listed in (groups, saved)]
    if sizes[0] != sizes[1]:
        report.problems.append(
            f"it has groups of {sizes[1]} parameters, this optimizer of {sizes[0]}; parameters are matched by position."
        )
        return []
    return [name for group in saved for name in group["params"]]


def _plan_state(plan: StateLoad, engine: Engine, ids: Sequence[Any], saved: Mapping[Any, Any], report: Report) -> None:
    for one, name in zip(engine.held, ids, strict=True):
        entries = saved.get(name) or {}
        if not entries:
            plan.anew.append(one)
            continue
        lacking = [entry for entry in one.own if entry not in entries and entry not in (MASTER, REMAINDER)]
        report.problems += [f"{one.name}: state {entry!r} is not there." for entry in lacking]
        for entry, value in entries.items():
            found = fit(one, entry, value)
            if isinstance(found, str):
                report.problems.append(f"{one.name}: {found}.")
                continue
            odd = find_non_finite(found[1])
            if odd is not None:
                report.problems.append(f"{one.name}: state {entry!r} holds {odd} on this rank.")
            plan.fills.append(found)
        plan.fills += missing_masters(one, entries)
    nobody = [name for name in saved if name not in set(ids)]
    if nobody:
        report.problems.append(f"it has state of {nobody[:5]}, which are no parameters of its groups.")


def _plan_groups(
    plan: StateLoad,
    engine: Engine,
    groups: Sequence[dict[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    report: Report,
) -> None:
    for index, (group, values) in enumerate(zip(groups, saved, strict=True)):
        new = GroupPlan(group)
        for key, value in values.items():
            if key not in _LEFT_OUT and key not in NOT_VALUES:
                new.take(key, value, Placing(f"group {index}: {key!r}", "was saved as", new.fill, report))
        if "param_names" in values:
            new.assign["param_names"] = list(values["param_names"])
        plan.groups.append(new)
    after = [one.values_after() for one in plan.groups]
    try:
        hypers(after, [(index, 1) for index in range(len(after))])
    except (ValueError, TypeError) as error:
        report.problems.append(str(error))
    starts = iter(engine.held)
    for index, values in enumerate(after):
        members = [next(starts) for _ in values["params"]]
        lacking = [one.name for one in members if values["amsgrad"] and MAX not in one.pieces]
        if lacking:
            report.problems.append(
                f"group {index}: amsgrad was saved as True, and this optimizer was made without memory for maxima; "
                "make it with amsgrad=True."
            )
