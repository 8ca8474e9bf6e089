"""One description of state that is spread over the ranks: each tells what it has, and all hear it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardopt.errors import PlacementError, ShardoptError
from shardopt.geometry import Box
from shardopt.layouts.tracked import Keeping
from shardopt.portable.blockwise import combined
from shardopt.portable.export import Described, Merged
from shardopt.portable.manifest import Entry, ParameterRecord, ValueEntry, parameters_json
from shardopt.portable.manifest_reader import read_parameters
from shardopt.portable.tagged import Json
from shardopt.presentation.inventory import Inventory
from shardopt.scope import Scope

__all__ = ["merge"]


def merge(scope: Scope, inventory: Inventory, described: Described | None, problem: BaseException | None) -> Merged:
    """Collective. What this rank cannot say of the state alone.

    Everything goes through the first rank, which puts it together once for all.

    Args:
        scope: the ranks.
        inventory: this rank's.
        described: by this rank; None with a problem.
        problem: why this rank cannot describe its state.

    Raises:
        RankFailureError: a rank has a problem, or did not come.
        PlacementError: ranks keep shards of one parameter in ways that contradict each other; on every rank.
    """
    told = scope.gather("state_dict", json.dumps(_said(inventory, described)).encode(), problem=problem)
    heard = scope.scatter("state_dict", [_together(told)] * scope.size if told else [])
    parts = json.loads(heard)
    if parts["problem"]:
        raise PlacementError(parts["problem"])
    records = read_parameters(parts["owned"])
    elsewhere = (item.fqn for item in inventory.tracked if item.keeping is Keeping.ELSEWHERE)
    return Merged({fqn: records[fqn] for fqn in elsewhere}, read_parameters(parts["sharded"]), parts["tables"])


def _said(inventory: Inventory, described: Described | None) -> dict[str, object]:
    """What this rank tells: of the parameters that it owns all, of quantised shards how it keeps them."""
    owned: dict[str, ParameterRecord] = {}
    sharded: dict[str, ParameterRecord] = {}
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    if described is None:
        return {"owned": {}, "sharded": {}, "boxes": {}, "tables": {}}
    for item in inventory.tracked:
        record = described.parameters.get(item.fqn)
        own = described.quantised.get(item.fqn)
        if record is None:
            continue
        if item.keeping is Keeping.HERE:
            owned[item.fqn] = record
        elif own is not None and not item.has_whole_state and not (own.says_nothing and 0 not in item.shape):
            entries = {
                name: entry
                for name, entry in record.entries.items()
                if name in own.values or isinstance(entry, ValueEntry)
            }
            # Not judged before all have told theirs.
            sharded[item.fqn] = replace(record, entries=entries, blob=None)
            boxes[item.fqn] = own.box.offset, own.box.size
    return {
        "owned": parameters_json(owned),
        "sharded": parameters_json(sharded),
        "boxes": boxes,
        "tables": described.tables,
    }


def _together(told: Sequence[bytes]) -> bytes:
    try:
        return json.dumps(_merged(told)).encode()
    except ShardoptError as error:
        # Told, since the others wait for an answer.
        return json.dumps({"problem": str(error)}).encode()


def _merged(told: Sequence[bytes]) -> dict[str, object]:
    owned: dict[str, object] = {}
    tables: dict[str, Json] = {}
    shards: dict[str, list[tuple[Box, ParameterRecord]]] = {}
    for one in map(json.loads, told):
        owned.update(one["owned"])
        tables.update(one["tables"])
        for fqn, record in read_parameters(one["sharded"]).items():
            offset, size = one["boxes"][fqn]
            shards.setdefault(fqn, []).append((Box(tuple(offset), tuple(size)), record))
    sharded, problems = _combined(shards)
    return {
        "owned": owned,
        "sharded": parameters_json(sharded),
        "tables": tables,
        "problem": "\n".join(problems),
    }


def _combined(
    shards: Mapping[str, Sequence[tuple[Box, ParameterRecord]]],
) -> tuple[dict[str, ParameterRecord], list[str]]:
    sharded: dict[str, ParameterRecord] = {}
    problems: list[str] = []
    for fqn, parts in shards.items():
        record = parts[0][1]
        said = [(box, _without_values(one)) for box, one in parts]
        try:
            entries, blob = combined(fqn, record.shape, said)
            # Of values each rank has its own say: manifests that differ are an error.
            sharded[fqn] = replace(record, entries={**record.entries, **entries}, blob=blob)
        except PlacementError as error:
            problems.append(str(error))
    return sharded, problems


def _without_values(record: ParameterRecord) -> dict[str, Entry]:
    return {name: entry for name, entry in record.entries.items() if not isinstance(entry, ValueEntry)}
