"""What a whole checkpoint needs of the optimizers in it beyond their public methods: one vote for all, not theirs."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardopt.errors import LoadError
from shardopt.naming import Name
from shardopt.optimizer import ShardedStateOptimizer
from shardopt.portable.reader import read_checkpoint
from shardopt.portable.storage import Storage
from shardopt.scope import Scope
from shardopt.staging.fingerprint import Fingerprint
from shardopt.staging.options import LoadOptions
from shardopt.staging.prepare import prepare
from shardopt.staging.prepared import PreparedLoad, agree

__all__ = ["names_of_wrapped", "poison", "prepare_unvoted", "run_post_hooks", "scope_of_wrapped"]


def scope_of_wrapped(optimizer: ShardedStateOptimizer) -> Scope:
    """The optimizer's ranks."""
    return optimizer._scope


def names_of_wrapped(optimizer: ShardedStateOptimizer) -> list[Name]:
    """What its parameters are called."""
    return [tracked.name for tracked in optimizer._inventory.tracked]


def prepare_unvoted(
    optimizer: ShardedStateOptimizer, storage: Storage, prefix: str, options: LoadOptions
) -> PreparedLoad:
    """Reads and checks an optimizer's part of a checkpoint; neither this nor its ``commit`` votes.

    Patterns of ``fresh`` that match none of its names are for others in the dict.

    Raises:
        LoadError: it does not fit; its ``problems`` are all of them.
    """
    inventory = optimizer._inventory
    idle = options.idle_patterns(names_of_wrapped(optimizer))
    own = dataclasses.replace(options, fresh=tuple(one for one in options.fresh if one not in idle))

    wanted = {fqn: one for fqn, one in inventory.by_fqn.items() if not own.is_fresh(one.name)}
    try:
        loaded: Any = read_checkpoint(storage, wanted, prefix=prefix, own_index=inventory.place)
    except LoadError as error:
        # Its list is of keys.
        raise LoadError(str(error), [str(error)]) from error
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, loaded)
        loaded = loaded if changed is None else changed
    plan = agree(optimizer._scope, prepare(inventory, loaded, own), None, options=own, voting=False)
    return PreparedLoad(
        plan,
        optimizer._scope,
        fingerprint=lambda: Fingerprint.of(inventory, optimizer._changes + optimizer._prepared),
        check_identity=inventory.check_groups,
        voting=False,
        committed=optimizer._loaded,
    )


def run_post_hooks(optimizer: ShardedStateOptimizer) -> None:
    """Runs the hooks that follow ``load_state_dict``."""
    optimizer._run_load_hooks()


def poison(optimizer: ShardedStateOptimizer, failure: BaseException) -> None:
    """Notes that a load has failed after it had begun to write."""
    optimizer._loaded(failure)
