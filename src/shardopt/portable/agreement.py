"""Naming what ranks hold differently, once a vote has shown that something is."""

from __future__ import annotations

import hashlib

from shardopt.errors import RankFailureError
from shardopt.portable.beside import BESIDE
from shardopt.portable.export import Export, digest_replicated
from shardopt.portable.manifest import Manifest
from shardopt.presentation.inventory import Inventory
from shardopt.scope import Scope, differences

__all__ = ["name_differences"]


def name_differences(
    verdict: RankFailureError, scope: Scope, inventory: Inventory, exported: Export
) -> RankFailureError:
    """Collective, after a verdict that ranks disagree. The same error with what they disagree on, and which ranks.

    Args:
        verdict: what every rank has got.
        scope: the ranks that voted.
        inventory: this rank's parameters.
        exported: what this rank voted on.
    """
    text = differences(scope, _digests(inventory, exported.manifest))
    return RankFailureError(
        f"{verdict.operation}: ranks hold differently what has to be the same on all of them; nothing was saved:\n"
        f"{text}\nOnly one rank's copy of it would be saved. Keep plain parameters and their gradients equal on "
        "all ranks, shard them, or wrap with plain='per_rank'; give every rank's optimizer the same groups and values. "
        "Counters of a sharded parameter differ after a step in which some rank had no gradient of it.",
        operation=verdict.operation,
        disagree=verdict.disagree,
    )


def _digests(inventory: Inventory, manifest: Manifest) -> dict[str, str]:
    """A digest of everything that must be the same on all ranks, by what a message calls it."""
    found = {"the list of optimizers": _digest(repr(manifest.optimizers))}
    for index, group in enumerate(manifest.groups):
        found[f"parameter group {index}: its parameters"] = _digest(repr(group.members))
        found |= {f"parameter group {index}: {key!r}": _digest(repr(value)) for key, value in group.values.items()}
    beside = manifest.extra.get(BESIDE)
    for index, named in enumerate(beside if isinstance(beside, list) else []):
        values = named if isinstance(named, dict) else {}
        found |= {f"optimizer {index}: state {key!r}": _digest(repr(value)) for key, value in values.items()}
    for fqn, record in manifest.parameters.items():
        found[f"{fqn}: the parameter"] = _digest(repr((record.shape, record.dtype, record.group, record.aliases)))
        found |= {f"{fqn}: state {name!r}": _digest(repr(entry)) for name, entry in record.entries.items()}
    for tracked in inventory.tracked:
        if not tracked.is_same_everywhere or inventory.is_per_rank(tracked):
            continue
        for name, value in inventory.plain_state(tracked).items():
            digest = hashlib.blake2b(digest_size=16)
            digest_replicated(digest, value)
            found[f"{tracked.fqn}: state {name!r} of a parameter that is not sharded"] = digest.hexdigest()
    return found


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
