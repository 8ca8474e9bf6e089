"""Checking everything about a load, with all problems in one report, before anything changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardopt.collector import paused_collector
from shardopt.errors import FormatError, PlacementError
from shardopt.layouts.catalog import classes_like, defaults_of, spec_of, why_refused
from shardopt.layouts.interchange import is_interchangeable, qualified
from shardopt.layouts.tracked import Tracked
from shardopt.portable.encode import decode, encode
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import MANIFEST_KEY, state_key
from shardopt.portable.manifest import Manifest, ParameterRecord
from shardopt.portable.manifest_reader import read_manifest
from shardopt.portable.matching import Match, match_names
from shardopt.presentation.choice import qualified_name
from shardopt.presentation.inventory import Inventory
from shardopt.staging.beside import BesidePlan, plan_beside
from shardopt.staging.filling import overlapping, sharing_memory
from shardopt.staging.groups import NOT_VALUES, GroupPlan, SavedGroup, plan_groups
from shardopt.staging.learnt import LearntPlan, plan_learnt
from shardopt.staging.options import EXACT, LoadOptions
from shardopt.staging.parameters import plan_fresh, plan_parameter
from shardopt.staging.plan import TAKEN_OVER, ParameterPlan, bytes_of
from shardopt.staging.report import Report, say_names
from shardopt.staging.source import Source
from shardopt.torch_compat import local_shard

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
        beside: what optimizers get that belongs to no parameter.
        learnt: what codes of optimizers mean afterwards that learn that.
        lender: the manifest of an optimizer whose live memory is loaded; None when it was read from storage.
    """

    report: Report
    groups: list[GroupPlan]
    parameters: list[ParameterPlan]
    digest: bytes
    lender: BytesHandle | None = None
    beside: list[BesidePlan] = field(default_factory=list)
    learnt: list[LearntPlan] = field(default_factory=list)

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
        for optimizer in (*self.beside, *self.learnt):
            optimizer.commit()


# What is made in inference mode no step could write to.
@torch.inference_mode(False)
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
    source = Source(manifest, state_dict, from_storage, match.saved_as, options, _shared_memory(inventory, report))
    learnt = plan_learnt(inventory, source, report)
    source = replace(source, tables={index: plan.table for index, plan in learnt.items()})
    groups = _plan_groups(inventory, manifest, match, options, report)
    after = [plan.values_after() for plan in groups]
    parameters: list[ParameterPlan] = []
    for tracked in inventory.tracked:
        if not options.is_fresh(tracked.name) and tracked.fqn in match.saved_as:
            parameters.append(plan_parameter(tracked, inventory, source, report, after[tracked.group]))
    for tracked in inventory.tracked:
        if options.is_fresh(tracked.name):
            plan = groups[tracked.group]
            parameters.append(plan_fresh(tracked, inventory, plan.values_after()))
            report.fresh.append(tracked.fqn)
    _compare_entries(inventory, source, groups, parameters, report)
    if isinstance(options.hyperparameters, Mapping):
        _try_given(inventory, groups, options.hyperparameters, report)
    digest += _digest_of(groups)
    lender = None if from_storage else state_dict[MANIFEST_KEY]
    beside = plan_beside(inventory, manifest, report)
    return Plan(report, groups, parameters, digest, lender, beside, list(learnt.values()))


def _shared_memory(inventory: Inventory, report: Report) -> frozenset[int]:
    """Ids of live state tensors that share memory with another one: they are replaced, since a copy would change both.

    State that shares memory with a parameter is a problem: loading it would change the model.
    """
    # Those of the whole model: not all of them are the optimizer's.
    params = {id(param): param for model in inventory.models for param in model.parameters()}
    params |= {id(tracked.param): tracked.param for tracked in inventory.tracked}
    shards = [local_shard(param) if isinstance(param, DTensor) else param for param in params.values()]
    held: dict[int, tuple[str, Tensor]] = {}
    state: list[Tensor] = []
    for tracked in inventory.tracked:
        for name, value in (inventory.state_of(tracked) or {}).items():
            if isinstance(value, Tensor):
                state.append(local_shard(value) if isinstance(value, DTensor) else value)
                held[id(state[-1])] = state_key(tracked.fqn, name), state[-1]
    in_groups = {
        id(value): (f"group {index}: {key!r}", value)
        for index, group in enumerate(inventory.groups())
        for key, held_there in group.items()
        if key not in NOT_VALUES
        for value in tree_leaves(held_there)
        if isinstance(value, Tensor)
    }
    for found in overlapping([value for _, value in (*held.values(), *in_groups.values())], shards):
        key, _ = held.get(found) or in_groups[found]
        report.problems.append(f"{key} shares memory with a parameter, and a load must not change those; keep a copy.")
    # An object in several groups is not state that is shared.
    return frozenset(sharing_memory([*state, *(value for _, value in in_groups.values())]))


def _try_given(inventory: Inventory, groups: Sequence[GroupPlan], given: Mapping[str, Any], report: Report) -> None:
    """Asks the optimizers' own constructors what they think of the values that groups will have."""
    inners = [part.inner for part in inventory.parts for _ in part.inner.param_groups]
    for index, (inner, plan) in enumerate(zip(inners, groups, strict=True)):
        objection = why_refused(inner, plan.values_after())
        if objection is not None:
            report.problems.append(f"group {index}: hyperparameters={dict(given)!r}: {objection}")


def _digest_of(groups: Sequence[GroupPlan]) -> bytes:
    """Of the values that groups will have, kept ones too: ranks that differ in them would step apart."""
    told: list[object] = []
    for plan in groups:
        for key, value in plan.values_after().items():
            if key not in NOT_VALUES:
                # What has no stored form is refused by the next save, and by no load.
                with contextlib.suppress(PlacementError):
                    told.append((key, encode(value, key)))
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).digest()


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
        if tracked.fqn not in source.saved_as and not source.options.is_fresh(tracked.name):
            _compare_live(tracked, inventory, groups[tracked.group], report)
        if id(tracked.param) not in kept or tracked.fqn not in source.saved_as:
            continue
        pair = (tracked.group, source.record(tracked).group)
        if pair not in new_of:
            plan = groups[tracked.group]
            after = plan.values_after()
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
    after = plan.values_after()
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
        if options.is_fresh(tracked.name) and not is_interchangeable(
            saved_class, qualified_name(inventory.part_of(tracked).inner)
        ):
            continue
        members[tracked.group].append(match.saved_as[tracked.fqn])
    saved = [
        SavedGroup(group.members, {key: decode(value) for key, value in group.values.items()})
        for group in manifest.groups
    ]
    scratch = {
        key for part in inventory.parts for group in part.inner.param_groups for key in filter(part.is_scratch, group)
    }
    live = list(zip(inventory.groups(), members, strict=True))
    return plan_groups(live, saved, report, hyperparameters=options.hyperparameters, scratch=scratch)


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
    idle = options.idle_patterns(one.name for one in inventory.tracked)
    if idle:
        report.problems.append(f"fresh={idle} matches no parameter of this optimizer.")
    missing = [fqn for fqn in match.missing if not options.is_fresh(inventory.by_fqn[fqn].name)]
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
        if saved is None or options.is_fresh(tracked.name):
            continue
        pair = (manifest.optimizers[saved.optimizer].class_name, qualified_name(inventory.part_of(tracked).inner))
        if not pair[0]:
            pair = (_likely_class(inventory, manifest, tracked, saved), pair[1])
        if pair[0] and not is_interchangeable(*pair):
            different.setdefault(pair, []).append(tracked.fqn)
    for (saved_class, live_class), fqns in different.items():
        report.problems.append(
            f"{len(fqns)} parameters ({say_names(fqns)}) were saved by {saved_class}; this optimizer is {live_class}. "
            "fresh=[pattern] starts it anew; if both mean the same by it, shardopt.declare_interchangeable says so."
        )


def _likely_class(inventory: Inventory, manifest: Manifest, tracked: Tracked, saved: ParameterRecord) -> str:
    """Who wrote torch's own format, which does not say so, if that can only be another class; empty if it need not."""
    inner = inventory.part_of(tracked).inner
    if spec_of(inner) is None:
        return ""
    like = classes_like(manifest.groups[saved.group].values, saved.entries.keys())
    alike = [known for known in like if is_interchangeable(qualified(known), qualified_name(inner))]
    own = {key for known in (type(inner), *alike) for key in defaults_of(known)}
    others = [known for known in like if not defaults_of(known).keys() <= own]
    if alike and not others:
        # Adam and AdamW are one class but for this.
        flag = "decoupled_weight_decay"
        saved_flag = manifest.groups[saved.group].values.get(flag)
        if saved_flag is None or saved_flag == inventory.groups()[tracked.group].get(flag):
            return ""
        return qualified(torch.optim.AdamW if saved_flag else torch.optim.Adam)
    return " or ".join(map(qualified, others or like))
