"""Checking everything about a load, with all problems in one report, before anything changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardopt.errors import FormatError
from shardopt.portable.encode import decode
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import MANIFEST_KEY
from shardopt.portable.manifest import Manifest
from shardopt.portable.manifest_reader import read_manifest
from shardopt.presentation.inventory import Inventory
from shardopt.presentation.presentation import qualified_name
from shardopt.staging.groups import GroupPlan, SavedGroup, plan_groups
from shardopt.staging.parameters import TAKEN_OVER, ParameterPlan, Source, bytes_of, plan_parameter
from shardopt.staging.report import Report

__all__ = ["Plan", "prepare"]


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


def prepare(inventory: Inventory, state_dict: Mapping[str, Any]) -> Plan:
    """Plans a load from the portable state, reading live state and changing none of it.

    Raises:
        PresentationError: the groups no longer hold the parameters they were wrapped with.
    """
    inventory.check_groups()
    report = Report()
    opened = _open_manifest(state_dict, report)
    if opened is None:
        return Plan(report, [], [], b"")
    manifest, digest, from_storage = opened
    _compare_names(inventory, manifest, report)
    _compare_classes(inventory, manifest, report)
    source = Source(manifest, state_dict, from_storage)
    parameters = [
        plan_parameter(tracked, inventory, source, report)
        for tracked in inventory.tracked
        if tracked.fqn in manifest.parameters
    ]
    members: list[list[str]] = [[] for _ in inventory.groups()]
    for tracked in inventory.tracked:
        members[tracked.group].append(tracked.fqn)
    saved_groups = [
        SavedGroup(group.members, {key: decode(value) for key, value in group.values.items()})
        for group in manifest.groups
    ]
    groups = plan_groups(list(zip(inventory.groups(), members, strict=True)), saved_groups, report)
    return Plan(report, groups, parameters, digest, None if from_storage else state_dict[MANIFEST_KEY])


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


def _compare_names(inventory: Inventory, manifest: Manifest, report: Report) -> None:
    live, saved = inventory.by_fqn.keys(), manifest.parameters.keys()
    for fqn in sorted(live - saved):
        report.problems.append(f"{fqn}: this optimizer updates it, the checkpoint does not have it.")
    for fqn in sorted(saved - live):
        report.problems.append(f"{fqn}: the checkpoint has it, this optimizer does not update it.")


def _compare_classes(inventory: Inventory, manifest: Manifest, report: Report) -> None:
    different: dict[tuple[str, str], list[str]] = {}
    for tracked in inventory.tracked:
        saved = manifest.parameters.get(tracked.fqn)
        if saved is None:
            continue
        pair = (manifest.optimizers[saved.optimizer].class_name, qualified_name(inventory.part_of(tracked).inner))
        if pair[0] != pair[1]:
            different.setdefault(pair, []).append(tracked.fqn)
    for (saved_class, live_class), fqns in different.items():
        report.problems.append(
            f"{len(fqns)} parameters ({', '.join(fqns[:3])}{', ...' * (len(fqns) > 3)}) were saved by {saved_class}; "
            f"this optimizer is {live_class}."
        )
