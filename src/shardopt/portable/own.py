"""State that is one rank's own: what it alone describes, under keys of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardopt.layouts.tracked import Tracked
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import rank_keys
from shardopt.portable.packing import pack

__all__ = ["BOX", "own_handles", "rank_local_handles"]

BOX = "(shard)"
"""Among a rank's own entries of a sharded parameter: offset and size of its shard."""


def own_handles(tracked: Tracked, index: int, entries: Mapping[str, Any]) -> dict[str, Handle]:
    """Handles for entries that rank ``index`` does not share with any other.

    Raises:
        PlacementError: a value has no stored form.
    """
    packed = pack(dict(entries), tracked.fqn)
    layout_key, bytes_key = rank_keys(index, tracked.fqn)
    return {
        layout_key: BytesHandle.of(json.dumps(packed.entries()).encode()),
        bytes_key: BytesHandle.make(packed.chunks, packed.total_bytes),
    }


def rank_local_handles(tracked: Tracked, index: int, entries: Mapping[str, Any]) -> dict[str, Handle]:
    """The same for entries of a sharded parameter, which mean something for one shard only."""
    return own_handles(tracked, index, {**entries, BOX: [list(tracked.box.offset), list(tracked.box.size)]})
