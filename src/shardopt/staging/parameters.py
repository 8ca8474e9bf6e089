"""Planning one parameter's new state from what was loaded for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import FormatError
from shardopt.geometry import Box
from shardopt.layouts.tracked import Keeping, Tracked
from shardopt.portable.encode import decode
from shardopt.portable.handles import BoxHandle, BytesHandle
from shardopt.portable.keys import blob_key, state_key
from shardopt.portable.manifest import AbsentEntry, ElementwiseEntry, PerRankEntry, ValueEntry, WholeEntry
from shardopt.portable.packing import unpack
from shardopt.portable.scratch import Scratch
from shardopt.portable.segments import BlockwiseEntry
from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import dtype_from_name, dtype_name
from shardopt.presentation.choice import qualified_name
from shardopt.presentation.inventory import Inventory
from shardopt.staging.own import plan_own, plan_rank_local
from shardopt.staging.plan import (
    TAKEN_OVER,
    ParameterPlan,
    bytes_of,
    in_dtype,
    judge_values,
    judged,
    place_value,
)
from shardopt.staging.quantised import plan_quantised
from shardopt.staging.report import Report
from shardopt.staging.source import Source
from shardopt.torch_compat import local_shard

__all__ = ["plan_fresh", "plan_parameter"]


def plan_parameter(
    tracked: Tracked, inventory: Inventory, source: Source, report: Report, values: Mapping[str, Any]
) -> ParameterPlan:
    """Plans every entry the checkpoint has for the parameter; problems go to the report.

    Args:
        tracked: the parameter.
        inventory: of its optimizer.
        source: what is loaded.
        report: gets what is found.
        values: of its group, as they are after the load.
    """
    part = inventory.part_of(tracked)
    saved = source.record(tracked)
    plan = ParameterPlan(part.inner.state, tracked.param)
    if tuple(saved.shape) != tracked.shape:
        report.problems.append(
            f"{tracked.fqn}: saved with shape {tuple(saved.shape)}, this model has {tracked.shape}. "
            f"fresh=[{tracked.fqn!r}] starts it anew."
        )
        return plan
    if tracked.keeping is Keeping.ELSEWHERE or inventory.keeps_nothing(tracked):
        return plan
    if isinstance(saved.entries.get(""), PerRankEntry):
        plan_own(plan, tracked, inventory, source, report)
    else:
        _plan_entries(plan, tracked, inventory, source, report, values)
    return plan


def _plan_entries(
    plan: ParameterPlan,
    tracked: Tracked,
    inventory: Inventory,
    source: Source,
    report: Report,
    values: Mapping[str, Any],
) -> None:
    saved = source.record(tracked)
    live = inventory.state_of(tracked) or {}
    _refuse_without_memory(tracked, inventory, source, report)
    whole = _unpack_whole(tracked, source, report)
    codec = inventory.codec_of(tracked)
    if codec is not None:
        plan_quantised(plan, tracked, inventory, codec, source, report, values)
    if PerRankEntry in map(type, saved.entries.values()):
        plan_rank_local(plan, tracked, inventory, source, report)
    quantised = inventory.quantised_entries(tracked)
    for name, entry in saved.entries.items():
        if name in quantised or isinstance(entry, (AbsentEntry, PerRankEntry)):
            continue
        if isinstance(entry, ElementwiseEntry):
            _plan_elementwise(plan, tracked, inventory, source, name, report)
        elif isinstance(entry, ValueEntry):
            device = inventory.scalar_device(tracked, inventory.groups()[tracked.group], name)
            value = decode(entry.value)
            judge_values(f"{tracked.fqn}: state {name!r}", value, source.options, report)
            place_value(plan, source, name, value, live.get(name), device)
        elif isinstance(entry, BlockwiseEntry):
            report.problems.append(
                f"{tracked.fqn}: state {name!r} was quantised by {entry.codec!r}, and this optimizer keeps no such "
                "state of it; wrap an optimizer of the class that wrote it, with the same options. A class that is "
                "declared to be like it (shardopt.declare_interchangeable) has to keep entries of the same names."
            )
        elif name in whole:
            value = judged(tracked, name, whole[name], live.get(name), source, report)
            place_value(plan, source, name, value, live.get(name), tracked.local.device)
        plan.keep.append(name)
        report.restored.append(state_key(tracked.fqn, name))
    if plan.keep:
        _refuse_incomplete(tracked, inventory, source, report)


def _plan_elementwise(
    plan: ParameterPlan, tracked: Tracked, inventory: Inventory, source: Source, name: str, report: Report
) -> None:
    entry = source.record(tracked).entries[name]
    live = (inventory.state_of(tracked) or {}).get(name)
    assert isinstance(entry, ElementwiseEntry)
    loaded = _loaded_box(tracked, name, entry, source, live, report)
    if loaded is not None:
        judge_values(f"{tracked.fqn}: state {name!r}", loaded, source.options, report)
        _place_box(plan, tracked, inventory, source, name, loaded, live)


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
    group = inventory.groups()[tracked.group]
    known = inventory.known_entries(tracked, group) or inventory.quantised_entries(tracked)
    needed = [name for name in (*known, *inventory.known_scalars(tracked)) if name not in inventory.derived(tracked)]
    lost = [name for name in needed if name not in saved.entries]
    if lost:
        report.problems.append(
            f"{tracked.fqn}: the checkpoint has state {sorted(saved.entries)} of it, but not {lost}, which this "
            "optimizer needs under its present options; build it with the options it was saved with. A class that is "
            "declared to be like it (shardopt.declare_interchangeable) has to keep entries of the same names."
        )


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
    return None if loaded is None else in_dtype(label, tracked, loaded, live, source, report)


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


def _unpack_whole(tracked: Tracked, source: Source, report: Report) -> dict[str, Any]:
    if WholeEntry not in map(type, source.record(tracked).entries.values()):
        return {}
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
