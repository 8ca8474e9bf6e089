"""What the presentations of quantised state cost and give, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from shardopt.geometry import Box
from shardopt.layouts.codec import Codec, Form, Subject
from shardopt.layouts.grid import Grid
from shardopt.layouts.learnt import LearntCodec
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.inventory import Inventory, Part

__all__ = ["said_of_quantised"]

_MOST_NAMED = 5


def said_of_quantised(inventory: Inventory, part: Part) -> list[str]:
    """Sentences for ``explain``: what ``owner`` moves, and where ``local`` is not the unsharded run."""
    codec = part.codec
    if codec is None:
        return []
    index = next(number for number, one in enumerate(inventory.parts) if one is part)
    own = [item for item in inventory.tracked if item.optimizer == index and isinstance(item.param, DTensor)]
    if isinstance(codec, LearntCodec):
        return [_said_of_learnt(part, own)]
    if not (codec.is_elementwise(part.inner) and codec.quantises(part.inner)):
        return []
    apart = [item.fqn for item in own if item.local.numel() and not _is_alike(inventory, codec, item)]
    named = ", ".join(apart[:_MOST_NAMED]) + f" and {len(apart) - _MOST_NAMED} more" * (len(apart) > _MOST_NAMED)
    moved = say_bytes(2 * sum(item.local.nbytes for item in own))
    if part.choice.compute == "local":
        if not apart:
            return ["every shard of this rank is whole blocks, and quantised as it would be unsharded"]
        return [
            "quantised otherwise than unsharded on this rank, since shards are no whole blocks or too small: "
            f"{len(apart)} of {len(own)} parameters ({named}); compute='owner' gives them what an unsharded run gives"
        ]
    differ = f"{len(apart)} of {len(own)} parameters ({named})" if apart else "none of this rank's parameters"
    return [
        f"owner moves {moved} of this rank's gradients and parameters in a step; compute='local' would move "
        f"nothing, and quantise otherwise than unsharded: {differ}"
    ]


def _said_of_learnt(part: Part, own: Sequence[Tracked]) -> str:
    if part.choice.compute == "local":
        return (
            "what codes mean is learnt from each rank's shards alone, so that no unsharded run, and none on other "
            "ranks, gives these numbers; on other ranks state resumes from exact values, quantised once more where "
            "their codes meant something else"
        )
    whole = 2 * sum(Box.whole(item.shape).volume * item.local.element_size() for item in own)
    local = (
        ""
        if part.codec is None or not part.codec.is_elementwise(part.inner)
        else (
            "; compute='local' would move nothing, and learn from each rank's shards alone what codes mean, as no "
            "unsharded run does"
        )
    )
    return (
        f"replicated brings {say_bytes(whole)} of gradients and parameters to every rank in a step, and the state of "
        f"all of them{local}"
    )


def _is_alike(inventory: Inventory, codec: Codec, item: Tracked) -> bool:
    """Whether this rank's shard is quantised as it would be in the whole parameter."""
    inner, group = inventory.part_of(item).inner, inventory.groups()[item.group]
    # Of one element's memory: they are asked for their form.
    whole = Subject(inner, group, item.local.new_empty(()).expand(item.shape))
    shard = Subject(inner, group, item.local.new_empty(()).expand(item.box.size))
    for name in codec.entries(whole):
        there, here = codec.form(whole, name), codec.form(shard, name)
        if not isinstance(there, Form) or not isinstance(here, Form):
            if there != here:
                return False
        elif not there.is_like(here) or not Grid(item.shape, there.block).holds(item.box):
            return False
    return True


def say_bytes(count: int) -> str:
    """A number of bytes in the unit in which it has one to four digits before the point."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
