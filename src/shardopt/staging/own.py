"""Planning the load of state that each rank has saved for itself."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from shardopt.errors import FormatError
from shardopt.layouts.tracked import Tracked
from shardopt.portable.keys import rank_keys, state_key
from shardopt.portable.own import BOX
from shardopt.portable.packing import unpack
from shardopt.presentation.inventory import Inventory
from shardopt.staging.plan import ParameterPlan, bytes_of, judged, place_value
from shardopt.staging.report import Report
from shardopt.staging.source import Source

__all__ = ["plan_own", "plan_rank_local"]


def plan_own(plan: ParameterPlan, tracked: Tracked, inventory: Inventory, source: Source, report: Report) -> None:
    """Plans the state that this rank alone has saved for a parameter that is not sharded."""
    world_size = source.manifest.world_size
    if not inventory.is_per_rank(tracked):
        report.problems.append(
            f"{tracked.fqn}: each of {world_size} ranks has saved state of its own; wrap it unsharded, on as many "
            "ranks, with plain='per_rank'."
        )
    elif world_size != inventory.world_size:
        report.problems.append(
            f"{tracked.fqn}: each of {world_size} ranks has saved state of its own, and this optimizer has "
            f"{inventory.world_size}; resume on {world_size} ranks, or start it anew: fresh=[{tracked.fqn!r}]."
        )
    else:
        _plan(plan, tracked, inventory, source, report, _read(tracked, inventory, source, report) or {})


def plan_rank_local(
    plan: ParameterPlan, tracked: Tracked, inventory: Inventory, source: Source, report: Report
) -> None:
    """Plans entries that mean something to this rank alone, if it holds the shard that it held."""
    world_size = source.manifest.world_size
    fresh = f"fresh=[{tracked.fqn!r}] starts the parameter anew."
    if not inventory.rank_local(tracked):
        report.problems.append(
            f"{tracked.fqn}: part of its state is declared 'rank_local', written by ranks 0 to {world_size - 1} for "
            f"their shards alone, and this optimizer does not say so of any: wrap it with the same layouts=, on shards "
            f"of the same sizes; or {fresh}"
        )
        return
    if world_size != inventory.world_size:
        report.problems.append(
            f"{tracked.fqn}: part of its state is declared 'rank_local', written by ranks 0 to {world_size - 1} for "
            f"their shards alone, and nobody can tell what it means for the shards of {inventory.world_size} ranks: "
            f"resume on {world_size}; or {fresh}"
        )
        return
    entries = _read(tracked, inventory, source, report)
    if entries is None:
        return
    box = entries.pop(BOX, None)
    if box != [list(tracked.box.offset), list(tracked.box.size)]:
        report.problems.append(
            f"{tracked.fqn}: part of its state is declared 'rank_local', written by rank {inventory.place} for the "
            f"shard {box}, and this rank holds {tracked.box.offset}+{tracked.box.size}: shard it as it was; or {fresh}"
        )
        return
    _plan(plan, tracked, inventory, source, report, entries)


def _read(tracked: Tracked, inventory: Inventory, source: Source, report: Report) -> dict[Any, Any] | None:
    label = f"{tracked.fqn}: its state on this rank"
    layout_key, bytes_key = rank_keys(inventory.place, tracked.fqn)
    layout = bytes_of(source.handles.get(layout_key), f"{label} (layout)", source.from_storage, report)
    data = bytes_of(source.handles.get(bytes_key), label, source.from_storage, report)
    if layout is None or data is None:
        return None
    try:
        value = unpack(json.loads(layout.numpy().tobytes()), data, copy=True, path=tracked.fqn)
    except (FormatError, ValueError) as error:
        report.problems.append(f"{label}: {error}")
        return None
    return value if isinstance(value, dict) else {}


def _plan(
    plan: ParameterPlan,
    tracked: Tracked,
    inventory: Inventory,
    source: Source,
    report: Report,
    entries: dict[Any, Any],
) -> None:
    live = inventory.state_of(tracked) or {}
    group = inventory.groups()[tracked.group]
    for name, item in entries.items():
        scalar = isinstance(item, Tensor) and item.dim() == 0
        device = inventory.scalar_device(tracked, group, name) if scalar else tracked.local.device
        value = judged(tracked, name, item, live.get(name), source, report)
        place_value(plan, source, name, value, live.get(name), device)
        plan.keep.append(name)
        report.restored.append(state_key(tracked.fqn, name))
