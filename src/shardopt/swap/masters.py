"""What stands behind bf16 parameters: fp32 masters or 16-bit remainders, and how they follow weights of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardopt.swap.held import MASTER, REMAINDER, Held
from shardopt.torch_compat import versions_of

__all__ = ["Masters"]

# Compared in pieces, so that what is needed besides does not grow with the parameter.
_CHUNK_ELEMENTS = 1 << 20


class Masters:
    """Brings masters up to weights that somebody else has written since the last step.

    Who writes a tensor moves its version counter, or that of the shard within; writes through ``.data`` move neither
    and are not seen. What has moved is compared:

    * an fp32 master stays where the parameter is its rounding, bit for bit, and is the parameter elsewhere;
    * a remainder says nothing of the weight it belongs to. If the optimizer's state was loaded since the last step,
      the weights are taken to be of the same checkpoint and it stays, unless the two together are no number;
      otherwise it becomes 0, for the whole parameter.
    """

    def __init__(self, held: Sequence[Held], *, loaded: bool = False) -> None:
        self._held = [one for one in held if one.master is not None]
        # Whether state was loaded since the last step.
        self.loaded = loaded
        self._versions = [-1] * len(self._held) if loaded else self._now()

    def _now(self) -> list[int]:
        outer, inner = versions_of([one.param for one in self._held]), versions_of([one.shard for one in self._held])
        return [a + b for a, b in zip(outer, inner, strict=True)]

    def note(self) -> None:
        """Takes the weights as they are for those that the masters belong to."""
        self._versions = self._now()
        self.loaded = False

    def note_loaded(self) -> None:
        """Notes that masters were loaded: weights may come from the same checkpoint, before this or after it."""
        self._versions = [-1] * len(self._held)
        self.loaded = True

    def outdated(self) -> bool:
        """Whether a parameter has been written to."""
        return self._now() != self._versions

    def follow(self) -> None:
        """Compares parameters that have been written to, and brings their masters up to them."""
        versions = self._now()
        for one, now, known in zip(self._held, versions, self._versions, strict=True):
            if now != known:
                follow(one, loaded=self.loaded)
        self._versions = versions


@torch.no_grad()
def follow(held: Held, *, loaded: bool) -> None:
    """Brings one parameter's master, or remainder, up to the parameter."""
    if MASTER in held.pieces:
        for master, param in _chunks(held.pieces[MASTER], held.shard):
            same = master.to(param.dtype).view(torch.int16) == param.view(torch.int16)
            master.copy_(torch.where(same, master, param.to(master.dtype)))
    elif REMAINDER in held.pieces and not loaded:
        held.pieces[REMAINDER].zero_()
    elif REMAINDER in held.pieces:
        for remainder, param in _chunks(held.pieces[REMAINDER], held.shard):
            value = (param.view(torch.int16).to(torch.int32) << 16) + remainder
            # A remainder of other weights can take a zero below it, where the bits of NaN begin.
            remainder.masked_fill_(value.view(torch.float32).isnan() & ~param.isnan(), 0)


def _chunks(piece: Tensor, shard: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in parts of the same elements, on the host, where the piece is."""
    if piece.is_contiguous() and shard.is_contiguous():
        pieces = zip(piece.view(-1).split(_CHUNK_ELEMENTS), shard.detach().view(-1).split(_CHUNK_ELEMENTS), strict=True)
        yield from ((part, values.to(piece.device)) for part, values in pieces)
    else:
        yield piece, shard.detach().to(piece.device)
