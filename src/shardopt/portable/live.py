"""Live state to look at and compute with, as tensors placed like the parameters."""

from __future__ import annotations

from torch import Tensor

from shardopt.layouts.codec import Blocks
from shardopt.layouts.infer import Elementwise, infer
from shardopt.layouts.learnt import LearntCodec
from shardopt.portable.keys import state_key
from shardopt.presentation.inventory import Inventory

__all__ = ["live_tensors"]


def live_tensors(inventory: Inventory) -> dict[str, Tensor]:
    """Element-wise state over live memory, by key: DTensors, or plain tensors for plain parameters.

    Of quantised entries the codes, if there is one for each element, and they mean the same on every rank.
    """
    result: dict[str, Tensor] = {}
    groups = inventory.groups()
    for tracked in inventory.tracked:
        shaped = {
            *inventory.usual_entries(tracked, groups[tracked.group]),
            *inventory.optional_entries(tracked),
        }
        own = inventory.rank_local(tracked)
        for entry, value in inventory.unquantised(tracked).items():
            if entry in own:
                continue
            layout = infer(tracked, entry, value, elementwise=entry in shaped and isinstance(value, Tensor))
            if isinstance(layout, Elementwise):
                result[state_key(tracked.fqn, entry)] = tracked.as_param(layout.local)
        if isinstance(inventory.codec_of(tracked), LearntCodec):
            # Codes of other ranks mean something else.
            continue
        for entry, value in inventory.quantised(tracked).items():
            local = value.codes if isinstance(value, Blocks) else value
            if local is not None and tracked.state_box is not None and tuple(local.shape) == tracked.state_box.size:
                result[state_key(tracked.fqn, entry)] = tracked.as_param(local)
    return result
