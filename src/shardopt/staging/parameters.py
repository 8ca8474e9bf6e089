"""Planning one parameter's new state from what was loaded for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import FormatError
from shardopt.geometry import Box
from shardopt.layouts.tracked import Keeping, Tracked
from shardopt.portable.encode import decode
from shardopt.portable.handles import BoxHandle, BytesHandle
from shardopt.portable.keys import blob_key, rank_keys, state_key
from shardopt.portable.manifest import AbsentEntry, ElementwiseEntry, PerRankEntry, ValueEntry, WholeEntry
from shardopt.portable.packing import unpack
from shardopt.portable.scratch import Scratch
from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import dtype_from_name, dtype_name
from shardopt.presentation.choice import qualified_name
from shardopt.presentation.inventory import Inventory
from shardopt.staging.finite import find_non_finite_in
from shardopt.staging.options import LoadOptions
from shardopt.staging.report import Report
from shardopt.staging.source import Source
from shardopt.torch_compat import local_shard

__all__ = ["TAKEN_OVER", "ParameterPlan", "bytes_of", "plan_fresh", "plan_parameter"]

TAKEN_OVER = "what was read of it has been taken over by an earlier load and may have changed; read it again."


@dataclass(slots=True)
class ParameterPlan:
    """The whole new state of one parameter.

    Attributes:
        state: the inner optimizer's own state mapping.
        param: the user's parameter, its key there.
        fill: live tensors that keep their identity, with what is copied into them.
        publish: new values, put in place by reference.
        read: all scratch that values come from.
        taken_over: the scratch of it whose memory is published.
        keep: all entries the parameter has afterwards.
    """

    state: dict[Any, dict[str, Any]]
    param: Tensor
    fill: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    publish: dict[str, Any] = field(default_factory=dict)
    read: list[Scratch] = field(default_factory=list)
    taken_over: list[Scratch] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)

    def commit(self) -> None:
        """Puts the state in place; a parameter that had none in the checkpoint has none afterwards."""
        if not self.keep:
            self.state.pop(self.param, None)
            return
        for live, loaded in self.fill:
            live.copy_(loaded)
        entries = self.state.setdefault(self.param, {})
        for entry in [entry for entry in entries if entry not in self.keep]:
            del entries[entry]
        entries.update(self.publish)
        for scratch in self.taken_over:
            scratch.taken_over = True


def plan_parameter(tracked: Tracked, inventory: Inventory, source: Source, report: Report) -> ParameterPlan:
    """Plans every entry the checkpoint has for the parameter; problems go to the report."""
    part = inventory.part_of(tracked)
    saved = source.record(tracked)
    plan = ParameterPlan(part.inner.state, tracked.param)
    if tuple(saved.shape) != tracked.shape:
        report.problems.append(
            f"{tracked.fqn}: saved with shape {tuple(saved.shape)}, this model has {tracked.shape}. "
            f"fresh=[{tracked.fqn!r}] starts it anew."
        )
        return plan
    if tracked.keeping is Keeping.ELSEWHERE:
        return plan
    if PerRankEntry in map(type, saved.entries.values()):
        _plan_own(plan, tracked, inventory, source, report)
    else:
        _plan_entries(plan, tracked, inventory, source, report)
    return plan


def _plan_entries(plan: ParameterPlan, tracked: Tracked, inventory: Inventory, source: Source, report: Report) -> None:
    saved = source.record(tracked)
    live = inventory.state_of(tracked) or {}
    group = inventory.groups()[tracked.group]
    _refuse_without_memory(tracked, inventory, source, report)
    whole: dict[str, Any] = {}
    if WholeEntry in map(type, saved.entries.values()):
        whole = _unpack_whole(tracked, source, report)
    for name, entry in saved.entries.items():
        if isinstance(entry, ElementwiseEntry):
            loaded = _loaded_box(tracked, name, entry, source, live.get(name), report)
            if loaded is not None:
                _judge_values(f"{tracked.fqn}: state {name!r}", loaded, source.options, report)
                _place_box(plan, tracked, inventory, source, name, loaded, live.get(name))
        elif isinstance(entry, ValueEntry):
            device = inventory.scalar_device(tracked, group, name)
            value = decode(entry.value)
            _judge_values(f"{tracked.fqn}: state {name!r}", value, source.options, report)
            _place_value(plan, source, name, value, live.get(name), device)
        elif isinstance(entry, WholeEntry):
            if name in whole:
                value = _judged(tracked, name, whole[name], live.get(name), source, report)
                _place_value(plan, source, name, value, live.get(name), tracked.local.device)
        else:
            continue
        plan.keep.append(name)
        report.restored.append(state_key(tracked.fqn, name))
    if plan.keep:
        _refuse_incomplete(tracked, inventory, source, report)


def _refuse_without_memory(tracked: Tracked, inventory: Inventory, source: Source, report: Report) -> None:
    """Of an optimizer whose memory was made with it: refuses entries that have none, and moments that would be lost."""
    if not inventory.has_own_memory(tracked):
        return
    live = inventory.state_of(tracked) or {}
    saved = [name for name, entry in source.record(tracked).entries.items() if not isinstance(entry, AbsentEntry)]
    derived = inventory.derived(tracked)
    lacking = [name for name in saved if name not in live]
    lost = [name for name in live if saved and name not in saved and name not in derived]
    if lacking or lost:
        report.problems.append(
            f"{tracked.fqn}: the checkpoint has state {sorted(saved)} of it, and this optimizer was made with memory "
            f"for {sorted(live)}; build it with the options it was saved with."
        )


def _refuse_incomplete(tracked: Tracked, inventory: Inventory, source: Source, report: Report) -> None:
    # Of its own class the manifest says what was there. Of a checkpoint that is not ours, and of a class that was
    # declared to be like it, the optimizer's class knows what must be.
    saved = source.record(tracked)
    own_class = qualified_name(inventory.part_of(tracked).inner)
    if source.manifest.optimizers[saved.optimizer].class_name == own_class:
        return
    known = inventory.known_entries(tracked, inventory.groups()[tracked.group]) or ()
    needed = [name for name in (*known, *inventory.known_scalars(tracked)) if name not in inventory.derived(tracked)]
    lost = [name for name in needed if name not in saved.entries]
    if lost:
        report.problems.append(
            f"{tracked.fqn}: the checkpoint has state {sorted(saved.entries)} of it, but not {lost}, which this "
            "optimizer needs under its present options; build it with the options it was saved with."
        )


def _plan_own(plan: ParameterPlan, tracked: Tracked, inventory: Inventory, source: Source, report: Report) -> None:
    """Plans the state that this rank alone has saved for the parameter."""
    label = f"{tracked.fqn}: its state on this rank"
    world_size = source.manifest.world_size
    if not inventory.is_per_rank(tracked):
        report.problems.append(
            f"{tracked.fqn}: each of {world_size} ranks has saved state of its own; wrap it unsharded, on as many "
            "ranks, with plain='per_rank'."
        )
        return
    if world_size != inventory.world_size:
        report.problems.append(
            f"{tracked.fqn}: each of {world_size} ranks has saved state of its own, and this optimizer has "
            f"{inventory.world_size}; resume on {world_size} ranks, or start it anew: fresh=[{tracked.fqn!r}]."
        )
        return
    layout_key, bytes_key = rank_keys(inventory.own_index or 0, tracked.fqn)
    layout = bytes_of(source.handles.get(layout_key), f"{label} (layout)", source.from_storage, report)
    data = bytes_of(source.handles.get(bytes_key), label, source.from_storage, report)
    if layout is None or data is None:
        return
    try:
        value = unpack(json.loads(layout.numpy().tobytes()), data, copy=True, path=tracked.fqn)
    except (FormatError, ValueError) as error:
        report.problems.append(f"{label}: {error}")
        return
    live = inventory.state_of(tracked) or {}
    group = inventory.groups()[tracked.group]
    for name, item in (value if isinstance(value, dict) else {}).items():
        scalar = isinstance(item, Tensor) and item.dim() == 0
        device = inventory.scalar_device(tracked, group, name) if scalar else tracked.local.device
        value = _judged(tracked, name, item, live.get(name), source, report)
        _place_value(plan, source, name, value, live.get(name), device)
        plan.keep.append(name)
        report.restored.append(state_key(tracked.fqn, name))


def plan_fresh(tracked: Tracked, inventory: Inventory, group: dict[str, Any]) -> ParameterPlan:
    """Plans the state that a new optimizer with these group values has for the parameter: none, for most classes."""
    plan = ParameterPlan(inventory.part_of(tracked).inner.state, tracked.param)
    if tracked.keeping is Keeping.ELSEWHERE:
        return plan
    for name, value in inventory.initial_state(tracked, group).items():
        elementwise = isinstance(value, Tensor) and value.dim() > 0
        plan.publish[name] = inventory.part_of(tracked).presentation.to_state(tracked, value) if elementwise else value
        plan.keep.append(name)
    return plan


def _loaded_box(
    tracked: Tracked, name: str, entry: ElementwiseEntry, source: Source, live: Any, report: Report
) -> Scratch | Tensor | None:
    """This rank's part of an element-wise entry, read or lent, or None with a problem reported."""
    label = f"{tracked.fqn}: state {name!r}"
    handle = source.handles.get(state_key(tracked.fqn, name))
    if handle is not None and not isinstance(handle, BoxHandle):
        report.problems.append(f"{label} is not stored as a tensor but as a pickled {type(handle).__name__}.")
        return None
    if handle is None:
        report.problems.append(
            f"{label} is in the checkpoint, but this optimizer did not ask for it under its present options; build it "
            "with the options it was saved with, or use prepare_load(path), which asks for what the checkpoint has."
        )
        return None
    loaded = (
        _read_box(label, tracked, entry, handle, report)
        if source.from_storage
        else _lent_box(label, tracked, handle, report)
    )
    return None if loaded is None else _in_dtype(label, tracked, loaded, live, source, report)


def _in_dtype(
    label: str, tracked: Tracked, loaded: Scratch | Tensor, live: Any, source: Source, report: Report
) -> Scratch | Tensor | None:
    """What was loaded, in the dtype this optimizer keeps, or None with a problem reported."""
    keeps = tracked.local.dtype
    if isinstance(live, Tensor):
        keeps = live.dtype
    elif source.record(tracked).dtype == dtype_name(keeps):
        # The same parameter dtype: the dtype of state that is made anew is the rule's own, as it was when it was saved.
        return loaded
    if loaded.dtype == keeps:
        return loaded
    if source.options.dtype == "live" and loaded.dtype.is_floating_point and keeps.is_floating_point:
        report.notes.append(f"{label} was saved as {dtype_name(loaded.dtype)} and is converted to {dtype_name(keeps)}.")
        # Beside what was read, which another load may want as it is.
        return (loaded.tensor() if isinstance(loaded, Scratch) else loaded).to(keeps)
    report.problems.append(
        f"{label} was saved as {dtype_name(loaded.dtype)}, this optimizer keeps {dtype_name(keeps)}; dtype='live' "
        "converts floating-point state."
    )
    return None


def _judged(tracked: Tracked, name: str, value: Any, live: Any, source: Source, report: Report) -> Any:
    """A value that is stored whole, in the dtype this optimizer keeps; problems go to the report."""
    label = f"{tracked.fqn}: state {name!r}"
    _judge_values(label, value, source.options, report)
    if not isinstance(value, Tensor):
        return value
    cast = source.record(tracked).dtype != dtype_name(tracked.local.dtype)
    if not cast or value.dim() == 0 or not value.is_floating_point():
        return value
    return _in_dtype(label, tracked, value, live, source, report)


def _judge_values(label: str, loaded: Any, options: LoadOptions, report: Report) -> None:
    found = find_non_finite_in(loaded.tensor() if isinstance(loaded, Scratch) else loaded)
    if found is None:
        return
    if options.finite == "report":
        report.notes.append(f"{label} holds {found} on this rank.")
    else:
        report.problems.append(f"{label} holds {found} on this rank; finite='report' loads it all the same.")


def _read_box(
    label: str, tracked: Tracked, entry: ElementwiseEntry, handle: BoxHandle, report: Report
) -> Scratch | None:
    (scratch,) = handle.scratch or [None]
    gap = None if scratch is None else scratch.missing()
    if not handle.was_read:
        problem = " was not read: the load skipped its key."
    elif handle.saved_size is not None and handle.saved_size != tracked.shape:
        problem = f" was saved with shape {handle.saved_size}, this model has {tracked.shape}."
    elif handle.box != tracked.state_box:
        problem = f" was read for {handle.box}, this rank holds {tracked.state_box}: read it again for this optimizer."
    elif scratch is None:
        problem = ": nothing delivered; the checkpoint lacks part of its global shape."
    elif scratch.wrong_dtype is not None or (scratch.delivered and entry.dtype != dtype_name(scratch.dtype)):
        found = dtype_name(scratch.wrong_dtype or scratch.dtype)
        problem = f" is stored as {found}, and the manifest says {entry.dtype}: the checkpoint is damaged."
    elif gap is not None:
        where = f"the box at {gap.offset} of size {gap.size}"
        problem = f": {where} was not delivered; the checkpoint lacks part of its global shape."
    elif scratch.taken_over:
        problem = f": {TAKEN_OVER}"
    else:
        if not scratch.delivered:
            # An empty shard hears of the dtype from the manifest alone.
            scratch.convert(dtype_from_name(entry.dtype, label))
        return scratch
    report.problems.append(label + problem)
    return None


def _lent_box(label: str, tracked: Tracked, handle: BoxHandle, report: Report) -> Tensor | None:
    if handle.absent or handle.box != tracked.state_box or handle.tensors[0].dtype != handle.dtype:
        problem = (
            f": the state dict was made for {_say_box(handle.box)}, this rank holds "
            f"{_say_box(tracked.state_box)}; save it with dcp.save to move it between shardings."
        )
    else:
        return handle.tensors[0]
    report.problems.append(label + problem)
    return None


def _say_box(box: Box | None) -> str:
    return "no part of it" if box is None else f"the box {box.offset}+{box.size}"


def _place_box(
    plan: ParameterPlan,
    tracked: Tracked,
    inventory: Inventory,
    source: Source,
    name: str,
    loaded: Scratch | Tensor,
    live: Any,
) -> None:
    box = loaded.tensor() if isinstance(loaded, Scratch) else loaded
    if isinstance(loaded, Scratch):
        plan.read.append(loaded)
    local = local_shard(live) if isinstance(live, DTensor) else live
    if source.takes(local, box):
        plan.fill.append((local, box))
    else:
        # Two optimizers must not share a moment: lent memory stays its owner's, scratch goes to the first to take it.
        # Nor may scratch of a load that ran in inference mode become state: no step could write to it.
        takes_over = isinstance(loaded, Scratch) and not box.is_inference()
        if isinstance(loaded, Scratch) and takes_over:
            plan.taken_over.append(loaded)
        own = box if takes_over else box.clone()
        plan.publish[name] = inventory.part_of(tracked).presentation.to_state(tracked, own)


def _place_value(plan: ParameterPlan, source: Source, name: str, value: Any, live: Any, device: torch.device) -> None:
    if isinstance(value, Tensor):
        if source.takes(live, value):
            plan.fill.append((live, value))
            return
        value = value.to(device)
    plan.publish[name] = value


def _unpack_whole(tracked: Tracked, source: Source, report: Report) -> dict[str, Any]:
    label = f"{tracked.fqn}: its whole values"
    if isinstance(tracked.param, DTensor) and not tracked.has_whole_state:
        report.problems.append(
            f"{label} were saved from a parameter that was whole; nothing says how to shard them over "
            f"{tracked.param.placements}. Wrap with compute='owner' (or 'replicated'), which keeps them whole."
        )
        return {}
    handle = source.handles.get(blob_key(tracked.fqn))
    if not isinstance(handle, BytesHandle):
        report.problems.append(
            f"{label} are in the checkpoint, but this optimizer did not ask for them; use prepare_load(path)."
        )
        return {}
    data = bytes_of(handle, label, source.from_storage, report)
    if data is None:
        return {}
    record = source.record(tracked)
    if data.numel() != record.blob:
        report.problems.append(f"{label}: {data.numel()} bytes, expected the {record.blob} that the manifest names.")
        return {}
    layouts: dict[str, Json] = {
        name: entry.packing for name, entry in record.entries.items() if isinstance(entry, WholeEntry)
    }
    try:
        # All entries at once: a tensor that two of them share comes back as one.
        value = unpack(layouts, data, copy=True, path=tracked.fqn)
    except FormatError as error:
        report.problems.append(f"{label}: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def bytes_of(handle: Any, label: str, from_storage: bool, report: Report) -> Tensor | None:
    """The bytes of a handle that were fully delivered, or None with a problem reported."""
    if not isinstance(handle, BytesHandle):
        report.problems.append(f"{label}: expected bytes, found a pickled {type(handle).__name__}.")
    elif from_storage and not handle.was_read:
        report.problems.append(f"{label}: not read; the load skipped its key.")
    elif (problem := handle.problem()) is not None:
        report.problems.append(f"{label}: {problem}")
    else:
        return handle.contents()
    return None
