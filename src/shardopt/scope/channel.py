"""Uneven exchanges of bytes between the ranks of a scope."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from shardopt.scope.scope import Scope

__all__ = ["Channel"]


class Channel:
    """A process group of its own over the scope's ranks.

    Not the default one, even where these ranks are the world: a checkpoint that is saved in a thread uses that one at
    its own times, and the two would take each other's messages.
    """

    def __init__(self, scope: Scope) -> None:
        """Collective over the scope, if there are others in it."""
        self.size = scope.size
        self.index = scope.index
        self._group: dist.ProcessGroup | None = None
        if scope.size > 1:
            # Only its members come here; others must not be asked to.
            made = dist.new_group(list(scope.ranks), use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)  # others get a number, and are not here
            self._group = made

    def exchange(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        """Collective. Sends each rank its part of ``sent`` and receives every rank's part for this one.

        Args:
            received: uint8, 1-D, as long as all ``received_sizes``; written to.
            sent: uint8, 1-D, as long as all ``sent_sizes``, on the same device.
            received_sizes: bytes from each rank, in the scope's order; what that rank sends to this one.
            sent_sizes: bytes for each rank.
        """
        if self._group is not None:
            dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), group=self._group)
