"""Checking everything about a load, with all problems in one report, before anything changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.collector import paused_collector
from shardopt.errors import FormatError
from shardopt.layouts.tracked import Tracked
from shardopt.portable.encode import decode
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import MANIFEST_KEY
from shardopt.portable.manifest import Manifest
from shardopt.portable.manifest_reader import read_manifest
from shardopt.portable.matching import Match, match_names
from shardopt.presentation.inventory import Inventory
from shardopt.presentation.presentation import qualified_name
from shardopt.staging.groups import GroupPlan, SavedGroup, plan_groups
from shardopt.staging.options import EXACT, LoadOptions
from shardopt.staging.parameters import TAKEN_OVER, ParameterPlan, Source, bytes_of, plan_fresh, plan_parameter
from shardopt.staging.report import Report, say_names

__all__ = ["Plan", "prepare"]

# Up to so many names, each is a problem of its own.
_MOST_NAMED = 20


@dataclass(slots=True)
class Plan:
    """A checked load.

    Attributes:
        report: what was found; problems mean that nothing may be committed.
        groups: new values of every live group.
        parameters: new state of every live parameter.
        digest: of the manifest: ranks that read different checkpoints disagree on it.
        lender: the manifest of an optimizer whose live memory is loaded; None when it was read from storage.
    """

    report: Report
    groups: list[GroupPlan]
    parameters: list[ParameterPlan]
    digest: bytes
    lender: BytesHandle | None = None

    def why_outdated(self) -> str | None:
        """Why what was planned is not there to be put in place any more, in words; None when it is."""
        if self.lender is not None and self.lender.why_outdated is not None:
            return self.lender.why_outdated
        for parameter in self.parameters:
            if any(scratch.taken_over for scratch in parameter.read):
                return TAKEN_OVER
        return None

    def commit(self) -> None:
        """Puts everything in place: state, then groups."""
        for parameter in self.parameters:
            parameter.commit()
        for group in self.groups:
            group.commit()


@paused_collector()
def prepare(inventory: Inventory, state_dict: Mapping[str, Any], options: LoadOptions = EXACT) -> Plan:
    """Plans a load from the portable state, reading live state and changing none of it.

    Raises:
        PlacementError: an optimizer keeps tensors beside its state, which would be those of before the load.
        PresentationError: the groups no longer hold the parameters they were wrapped with.
    """
    inventory.check_groups()
    inventory.refuse_side_storage()
    report = Report()
    opened = _open_manifest(state_dict, report)
    if opened is None:
        return Plan(report, [], [], b"")
    manifest, digest, from_storage = opened
    match = match_names(inventory.by_fqn, manifest)
    _compare_names(inventory, match, options, report)
    _compare_classes(inventory, manifest, match, options, report)
    source = Source(manifest, state_dict, from_storage, match.saved_as, options)
    parameters: list[ParameterPlan] = []
    for tracked in inventory.tracked:
        if not options.is_fresh(tracked.fqn) and tracked.fqn in match.saved_as:
            parameters.append(plan_parameter(tracked, inventory, source, report))
    groups = _plan_groups(inventory, manifest, match, options, report)
    for tracked in inventory.tracked:
        if options.is_fresh(tracked.fqn):
            plan = groups[tracked.group]
            parameters.append(plan_fresh(tracked, inventory, {**plan.group, **plan.assign}))
            report.fresh.append(tracked.fqn)
    _compare_entries(inventory, source, groups, parameters, report)
    return Plan(report, groups, parameters, digest, None if from_storage else state_dict[MANIFEST_KEY])


def _compare_entries(
    inventory: Inventory,
    source: Source,
    groups: Sequence[GroupPlan],
    parameters: Sequence[ParameterPlan],
    report: Report,
) -> None:
    """Refuses group values, kept or given, under which the rule needs state that was not saved under the saved ones."""
    kept = {id(plan.param): plan.keep for plan in parameters if plan.keep}
    new_of: dict[tuple[int, int], set[str]] = {}
    for tracked in inventory.tracked:
        if tracked.fqn not in source.saved_as and not source.options.is_fresh(tracked.fqn):
            _compare_live(tracked, inventory, groups[tracked.group], report)
        if id(tracked.param) not in kept or tracked.fqn not in source.saved_as:
            continue
        pair = (tracked.group, source.record(tracked).group)
        if pair not in new_of:
            plan = groups[tracked.group]
            after = {**plan.group, **plan.assign}
            saved = {key: decode(value) for key, value in source.manifest.groups[pair[1]].values.items()}
            needed = (inventory.known_entries(tracked, values) or () for values in (after, {**after, **saved}))
            new_of[pair] = set.difference(*map(set, needed))
        lost = sorted(new_of[pair].difference(kept[id(tracked.param)]))
        if lost:
            report.problems.append(
                f"{tracked.fqn}: with the hyperparameters= of this load the optimizer needs state {lost}, which the "
                "checkpoint does not have."
            )


def _compare_live(tracked: Tracked, inventory: Inventory, plan: GroupPlan, report: Report) -> None:
    """The same for a parameter that the checkpoint does not have and that keeps its live state."""
    live = inventory.state_of(tracked)
    after = {**plan.group, **plan.assign}
    had = {*(live or ()), *(inventory.known_entries(tracked, plan.group) or ())}
    lost = [name for name in inventory.known_entries(tracked, after) or () if live and name not in had]
    if lost:
        report.problems.append(
            f"{tracked.fqn}: it keeps its live state, which lacks {lost}, and with the group values of this load the "
            f"optimizer needs it; fresh=[{tracked.fqn!r}] starts it anew."
        )


def _plan_groups(
    inventory: Inventory, manifest: Manifest, match: Match, options: LoadOptions, report: Report
) -> list[GroupPlan]:
    # Groups are matched by the names that the checkpoint has for their members.
    members: list[list[str]] = [[] for _ in inventory.groups()]
    for tracked in inventory.tracked:
        if tracked.fqn not in match.saved_as:
            continue
        record = manifest.parameters[match.saved_as[tracked.fqn]]
        saved_class = manifest.optimizers[record.optimizer].class_name
        # One that starts anew may have been another class's, whose values mean nothing here.
        if options.is_fresh(tracked.fqn) and saved_class != qualified_name(inventory.part_of(tracked).inner):
            continue
        members[tracked.group].append(match.saved_as[tracked.fqn])
    saved = [
        SavedGroup(group.members, {key: decode(value) for key, value in group.values.items()})
        for group in manifest.groups
    ]
    return plan_groups(
        list(zip(inventory.groups(), members, strict=True)), saved, report, hyperparameters=options.hyperparameters
    )


def _open_manifest(state_dict: Mapping[str, Any], report: Report) -> tuple[Manifest, bytes, bool] | None:
    handle = state_dict.get(MANIFEST_KEY)
    if not isinstance(handle, BytesHandle):
        hint = ""
        if {"state", "param_groups"} <= set(state_dict):
            hint = " It looks like torch's own optimizer state dict, which names parameters by position."
        report.problems.append(
            f"the state dict has no {MANIFEST_KEY!r} of shardopt (its keys begin {sorted(map(str, state_dict))[:5]})."
            f"{hint} Load into what ShardedStateOptimizer.state_dict() returns."
        )
        return None
    # The manifest alone may have been skipped, by a load that takes what it finds.
    from_storage = any(isinstance(one, Handle) and one.was_read for one in state_dict.values())
    if not from_storage and handle.why_outdated is not None:
        report.problems.append(handle.why_outdated)
        return None
    data = bytes_of(handle, MANIFEST_KEY, from_storage, report)
    if data is None:
        return None
    raw = data.numpy().tobytes()
    try:
        manifest = read_manifest(raw)
    except FormatError as error:
        report.problems.append(str(error))
        return None
    return manifest, hashlib.blake2b(raw, digest_size=16).digest(), from_storage


def _compare_names(inventory: Inventory, match: Match, options: LoadOptions, report: Report) -> None:
    idle = options.idle_patterns(inventory.by_fqn)
    if idle:
        report.problems.append(f"fresh={idle} matches no parameter of this optimizer.")
    missing = [fqn for fqn in match.missing if not options.is_fresh(fqn)]
    if not match.saved_as:
        report.problems.append(
            f"nothing in the checkpoint belongs to this optimizer: it has {_count(match.unused)}, this optimizer "
            f"updates {_count(match.missing)}."
        )
    elif options.strict:
        _refuse(
            missing,
            "this optimizer updates {}, the checkpoint does not have {}",
            "fresh=[pattern] starts parameters anew",
            report,
        )
        _refuse(
            match.unused,
            "the checkpoint has {}, this optimizer does not update {}",
            "strict=False leaves out what only one side has",
            report,
        )
    report.missing += missing
    report.unused += match.unused
    for saved, live in match.merged.items():
        report.notes.append(f"{saved}: it is tied to {live} now, which has one state; that of {saved} is not loaded.")


def _refuse(fqns: Sequence[str], what: str, mend: str, report: Report) -> None:
    if len(fqns) > _MOST_NAMED:
        report.problems.append(f"{len(fqns)} parameters: {what.format('them', 'them')}: {say_names(fqns)}. {mend}.")
    else:
        report.problems += [f"{fqn}: {what.format('it', 'it')}; {mend}." for fqn in fqns]


def _count(fqns: Sequence[str]) -> str:
    if not fqns:
        return "no parameters"
    return f"{len(fqns)} parameter{'s' * (len(fqns) > 1)} ({say_names(fqns)})"


def _compare_classes(
    inventory: Inventory, manifest: Manifest, match: Match, options: LoadOptions, report: Report
) -> None:
    different: dict[tuple[str, str], list[str]] = {}
    for tracked in inventory.tracked:
        saved = manifest.parameters.get(match.saved_as.get(tracked.fqn, ""))
        if saved is None or options.is_fresh(tracked.fqn):
            continue
        pair = (manifest.optimizers[saved.optimizer].class_name, qualified_name(inventory.part_of(tracked).inner))
        # Torch's own checkpoints do not say which class wrote them.
        if pair[0] and pair[0] != pair[1]:
            different.setdefault(pair, []).append(tracked.fqn)
    for (saved_class, live_class), fqns in different.items():
        report.problems.append(
            f"{len(fqns)} parameters ({say_names(fqns)}) were saved by {saved_class}; this optimizer is {live_class}."
        )
