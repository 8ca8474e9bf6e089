"""Live state -> portable state: handles by key, and the manifest that describes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardopt.collector import paused_collector
from shardopt.errors import PlacementError
from shardopt.layouts.infer import Elementwise, Layout, Value, infer
from shardopt.layouts.tracked import Keeping, Tracked
from shardopt.portable.beside import BESIDE, describe_beside
from shardopt.portable.blockwise import TABLES, Quantised, describe_quantised, put_quantised
from shardopt.portable.encode import encode
from shardopt.portable.handles import BoxHandle, BytesHandle, Handle
from shardopt.portable.keys import MANIFEST_KEY, blob_key, state_key
from shardopt.portable.manifest import (
    AbsentEntry,
    ElementwiseEntry,
    Entry,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
    PerRankEntry,
    ValueEntry,
    WholeEntry,
)
from shardopt.portable.own import own_handles, rank_local_handles
from shardopt.portable.packing import pack
from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import dtype_from_name, dtype_name
from shardopt.presentation.choice import qualified_name
from shardopt.presentation.inventory import Inventory
from shardopt.version import __version__

__all__ = [
    "DRAWS",
    "Described",
    "Export",
    "Merged",
    "assemble",
    "describe",
    "digest_replicated",
    "export",
    "handle_for",
]


_UNMARKED = "0" * 16

DRAWS = "draws"
"""In the manifest's ``extra``: of each optimizer the seed and the number of steps that its random numbers come from."""


@dataclass(frozen=True, slots=True)
class Described:
    """What this rank can say of an optimizer's state alone.

    Attributes:
        parameters: by FQN, of the parameters whose state is not elsewhere.
        handles: theirs, by key.
        notes: state that is left out, one sentence each.
        beside: state of the optimizers that belongs to no parameter.
        quantised: this rank's part of quantised state, by FQN.
        tables: what codes of it mean, by name.
    """

    parameters: dict[str, ParameterRecord]
    handles: dict[str, Handle]
    notes: list[str]
    beside: list[Json]
    quantised: dict[str, Quantised] = field(default_factory=dict)
    tables: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Merged:
    """What no rank could describe alone.

    Attributes:
        elsewhere: parameters whose state another rank keeps.
        sharded: parameters with quantised state, which every rank has a part of.
        tables: what codes mean, by name.
    """

    elsewhere: dict[str, ParameterRecord] = field(default_factory=dict)
    sharded: dict[str, ParameterRecord] = field(default_factory=dict)
    tables: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Export:
    """The portable state of an optimizer.

    Attributes:
        handles: what ``state_dict()`` returns.
        manifest: what describes them.
        digest: of everything that must be the same on all ranks: the manifest, and the state of which every rank
            has a copy.
        notes: state that is left out, one sentence each.
    """

    handles: dict[str, Handle]
    manifest: Manifest
    digest: bytes
    notes: list[str]

    def mark(self, number: int) -> None:
        """Writes a 64-bit number into the manifest, by which readers tell this state from any other.

        Two saves of a rule without counters have equal manifests otherwise, and ranks that read one each would not
        notice.
        """
        data = self.handles[MANIFEST_KEY].tensors[0]
        at = data.numpy().tobytes().rindex(_UNMARKED.encode())
        data[at : at + len(_UNMARKED)] = torch.frombuffer(bytearray(f"{number:016x}".encode()), dtype=torch.uint8)


@paused_collector()
def describe(inventory: Inventory) -> Described:
    """Describes live state without changing or copying it (0-d values apart).

    Raises:
        PlacementError: an entry has no known place, or an optimizer keeps tensors beside its state; all are listed.
        PresentationError: the groups no longer hold the parameters they were wrapped with.
    """
    inventory.check_groups()
    inventory.refuse_side_storage()
    described = Described({}, {}, inventory.refuse_stray_state(), [])
    groups = inventory.groups()
    problems: list[str] = []
    try:
        described.beside.extend(describe_beside(inventory))
    except PlacementError as error:
        problems.append(str(error))
    for tracked in inventory.tracked:
        if tracked.keeping is Keeping.ELSEWHERE:
            continue
        try:
            record = _export_parameter(tracked, inventory, groups[tracked.group], described)
            described.parameters[tracked.fqn] = record
        except PlacementError as error:
            problems.append(str(error))
    if problems:
        raise PlacementError("\n".join(problems))
    return described


@paused_collector()
def assemble(inventory: Inventory, described: Described, merged: Merged) -> Export:
    """The portable state of what this rank has described, and what others have.

    Args:
        inventory: the same.
        described: by this rank.
        merged: what all ranks have described together.

    Raises:
        PlacementError: two parameters would be saved under one key.
    """
    handles = dict(described.handles)
    parameters = {**described.parameters, **merged.elsewhere}
    for tracked in inventory.tracked:
        if tracked.fqn in merged.sharded:
            told = merged.sharded[tracked.fqn]
            mine, part = parameters[tracked.fqn], described.quantised[tracked.fqn]
            # What others say of values too, where this rank's shard has no elements: rules keep none, or do not count.
            names = told.entries if part.says_nothing else part.values
            entries = {**mine.entries, **{name: told.entries[name] for name in names}}
            parameters[tracked.fqn] = replace(mine, entries=entries, blob=told.blob or mine.blob)
        if tracked.keeping is Keeping.ELSEWHERE:
            _put_elsewhere(tracked, inventory, parameters[tracked.fqn], handles)
        codec = inventory.codec_of(tracked)
        if codec is not None:
            record, own = parameters[tracked.fqn], described.quantised.get(tracked.fqn)
            handles.update(put_quantised(tracked, inventory, codec, record, own))
    manifest = Manifest(
        shardopt=__version__,
        torch=torch.__version__,
        optimizers=tuple(OptimizerRecord(qualified_name(p.inner), p.presentation.name) for p in inventory.parts),
        groups=tuple(_export_groups(inventory, inventory.groups())),
        parameters=parameters,
        world_size=inventory.world_size,
        extra=_extra(inventory, described.beside, {**described.tables, **merged.tables}),
    )
    digest = hashlib.blake2b(digest_size=16)
    raw = manifest.to_bytes()
    digest.update(raw)
    if inventory.world_size > 1:
        for tracked in inventory.tracked:
            if tracked.is_same_everywhere and not inventory.is_per_rank(tracked):
                digest_replicated(digest, inventory.plain_state(tracked))
    handles[MANIFEST_KEY] = BytesHandle.of(raw)
    return Export(handles, manifest, digest.digest(), described.notes)


def _extra(inventory: Inventory, beside: list[Json], tables: dict[str, Json]) -> dict[str, Json]:
    draws: list[Json] = [
        None if part.presentation.draws is None else list(part.presentation.draws) for part in inventory.parts
    ]
    told: dict[str, Json] = {BESIDE: beside} if any(beside) else {}
    if any(draws):
        told[DRAWS] = draws
    if tables:
        # In one order, since ranks have met them in different ones.
        told[TABLES] = dict(sorted(tables.items()))
    # The mark comes last, where it is looked for; the manifest sorts its keys.
    return {**told, "mark": _UNMARKED}


def export(inventory: Inventory) -> Export:
    """The portable state of an optimizer none of whose state is elsewhere; raises as ``describe`` does."""
    return assemble(inventory, describe(inventory), Merged())


def _put_elsewhere(tracked: Tracked, inventory: Inventory, record: ParameterRecord, handles: dict[str, Handle]) -> None:
    quantised = inventory.quantised_entries(tracked)
    for name, entry in record.entries.items():
        if name not in quantised and isinstance(entry, (ElementwiseEntry, AbsentEntry)):
            dtype = dtype_from_name(entry.dtype, tracked.fqn) if isinstance(entry, ElementwiseEntry) else None
            _put(handles, state_key(tracked.fqn, name), handle_for(tracked, None, elsewhere=dtype), tracked)
    if record.blob is not None or not inventory.is_known(tracked):
        _put(handles, blob_key(tracked.fqn), BytesHandle.elsewhere(record.blob or 0), tracked)


def _export_groups(inventory: Inventory, groups: list[dict[str, Any]]) -> list[GroupRecord]:
    members: list[list[str]] = [[] for _ in groups]
    owner = [index for index, part in enumerate(inventory.parts) for _ in part.inner.param_groups]
    scratch = [part.is_scratch for part in inventory.parts]
    for tracked in inventory.tracked:
        members[tracked.group].append(tracked.fqn)
    return [
        GroupRecord(
            optimizer=owner[index],
            members=tuple(members[index]),
            values={
                key: encode(value, f"param_groups[{index}].{key}")
                for key, value in group.items()
                if key not in ("params", "param_names") and not scratch[owner[index]](key)
            },
        )
        for index, group in enumerate(groups)
    ]


def handle_for(tracked: Tracked, live: Tensor | None, *, elsewhere: torch.dtype | None = None) -> BoxHandle:
    """A handle for one element-wise entry of the parameter, existing here, elsewhere (in this dtype), or not yet."""
    return BoxHandle.make(
        tracked.shape,
        tracked.state_box,
        live,
        like=tracked.state_like,
        place=tracked.as_param,
        elsewhere=elsewhere,
    )


def _export_parameter(
    tracked: Tracked, inventory: Inventory, group: dict[str, Any], described: Described
) -> ParameterRecord:
    handles = described.handles
    if inventory.is_per_rank(tracked):
        return _export_own(tracked, inventory, handles)
    entries: dict[str, Entry] = {}
    boxes: dict[str, Tensor | None] = dict.fromkeys(inventory.usual_entries(tracked, group))
    whole = _sorted_out(tracked, inventory, boxes, entries)
    known = inventory.is_known(tracked)
    for name, live in boxes.items():
        _put(handles, state_key(tracked.fqn, name), handle_for(tracked, live), tracked)
        entries.setdefault(name, AbsentEntry())
    blob = None
    if whole or not known:
        packed = pack(whole, tracked.fqn)
        _put(handles, blob_key(tracked.fqn), BytesHandle.make(packed.chunks, packed.total_bytes), tracked)
        if whole:
            blob = packed.total_bytes
            entries.update((name, WholeEntry(layout)) for name, layout in packed.entries().items())
    entries.update(_quantised(tracked, inventory, described))
    entries.update(_rank_local(tracked, inventory, described))
    return ParameterRecord(
        shape=tracked.shape,
        dtype=dtype_name(tracked.param.dtype),
        group=tracked.group,
        optimizer=tracked.optimizer,
        aliases=tracked.name.aliases,
        entries=entries,
        blob=blob,
    )


def _sorted_out(
    tracked: Tracked, inventory: Inventory, boxes: dict[str, Tensor | None], entries: dict[str, Entry]
) -> dict[str, Any]:
    """Puts entries that are boxes, or values, where they belong; what is left is whole."""
    whole: dict[str, Any] = {}
    shaped = {*boxes, *inventory.optional_entries(tracked)}
    known = inventory.is_known(tracked)
    common = frozenset() if tracked.has_whole_state else inventory.part_of(tracked).common
    own = inventory.rank_local(tracked)
    problems: list[str] = []
    for name, value in inventory.unquantised(tracked).items():
        if name in own:
            continue
        try:
            # Of what was only seen in a probe, other parameters may have another form.
            fits = isinstance(value, Tensor) and (known or value.shape == tracked.state_like.shape)
            layout = (
                Value(value)
                if name in common
                else _layout_of(tracked, name, value, elementwise=fits and name in shaped)
            )
            if isinstance(layout, Elementwise):
                boxes[name] = layout.local
                entries[name] = ElementwiseEntry(dtype_name(layout.local.dtype))
            elif isinstance(layout, Value):
                entries[name] = ValueEntry(encode(layout.value, f"{tracked.fqn}.{name}"))
            else:
                whole[name] = layout.value
        except PlacementError as error:
            problems.append(str(error))
    if problems:
        raise PlacementError("\n".join(problems))
    return whole


def _rank_local(tracked: Tracked, inventory: Inventory, described: Described) -> dict[str, Entry]:
    own = inventory.rank_local(tracked)
    if own:
        state = inventory.state_of(tracked) or {}
        kept = {name: state[name] for name in own if name in state}
        for key, handle in rank_local_handles(tracked, inventory.place, kept).items():
            _put(described.handles, key, handle, tracked)
    return dict.fromkeys(own, PerRankEntry())


def _quantised(tracked: Tracked, inventory: Inventory, described: Described) -> dict[str, Entry]:
    codec = inventory.codec_of(tracked)
    if codec is None:
        return {}
    own, entries = describe_quantised(tracked, inventory, codec)
    described.quantised[tracked.fqn] = own
    described.tables.update(own.tables)
    return entries


def _layout_of(tracked: Tracked, name: object, value: object, *, elementwise: bool) -> Layout:
    if not isinstance(name, str):
        raise PlacementError(f"{tracked.fqn}: state key {name!r} is a {type(name).__name__}; only strings are saved.")
    return infer(tracked, name, value, elementwise=elementwise)


def _export_own(tracked: Tracked, inventory: Inventory, handles: dict[str, Handle]) -> ParameterRecord:
    """Describes the state that this rank does not share with any other."""
    for key, handle in own_handles(tracked, inventory.place, inventory.state_of(tracked) or {}).items():
        _put(handles, key, handle, tracked)
    return ParameterRecord(
        shape=tracked.shape,
        dtype=dtype_name(tracked.param.dtype),
        group=tracked.group,
        optimizer=tracked.optimizer,
        aliases=tracked.name.aliases,
        entries={"": PerRankEntry()},
    )


def _put(handles: dict[str, Handle], key: str, handle: Handle, tracked: Tracked) -> None:
    if key in handles:
        raise PlacementError(
            f"{tracked.fqn}: its state would be saved under {key!r}, which another parameter has taken."
        )
    handles[key] = handle


def digest_replicated(digest: hashlib.blake2b, value: Any) -> None:
    """Adds the bytes of every tensor in a value to a digest."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    elif isinstance(value, dict):
        for item in value.values():
            digest_replicated(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            digest_replicated(digest, item)
