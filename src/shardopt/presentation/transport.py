"""Moving boxes of many tensors between ranks: few exchanges, each of bounded size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardopt.geometry import Box
from shardopt.scope.channel import Channel

__all__ = ["MAX_EXCHANGE_BYTES", "Move", "Transport"]

MAX_EXCHANGE_BYTES = 64 * 1024**2
"""What one exchange sends and receives on a rank, at most, unless a single tensor has more."""

# So that every piece in a buffer can be viewed in its own dtype.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one tensor on its way.

    Attributes:
        tensor: which one, in the caller's numbering.
        box: which part of it.
        source: the rank that has it, as a place in the scope.
        target: the rank that gets it.
        num_bytes: its size.
    """

    tensor: int
    box: Box
    source: int
    target: int
    num_bytes: int

    @property
    def room(self) -> int:
        """Bytes that it takes in a buffer."""
        return -(-self.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(slots=True)
class _Bucket:
    """The moves of one exchange that concern this rank, in the order of its two buffers."""

    sent: list[Move] = field(default_factory=list)
    received: list[Move] = field(default_factory=list)
    sent_sizes: list[int] = field(default_factory=list)
    received_sizes: list[int] = field(default_factory=list)


class Transport:
    """Carries out one list of moves, the same list on every rank, any number of times.

    Attributes:
        num_buffer_bytes: what the two buffers of the largest exchange take on this rank.
    """

    def __init__(self, moves: Iterable[Sequence[Move]], channel: Channel, max_bytes: int = MAX_EXCHANGE_BYTES) -> None:
        """Plans the exchanges.

        Args:
            moves: those of each tensor, in an order that is the same on every rank. Moves from a rank to itself are
                none.
            channel: between these ranks.
            max_bytes: what one exchange may move on a rank.
        """
        self._channel = channel
        self._buckets = [self._bucket(some) for some in _bounded(moves, channel.size, max_bytes)]
        self.num_buffer_bytes = max((sum(one.sent_sizes) + sum(one.received_sizes) for one in self._buckets), default=0)

    def _bucket(self, moves: Sequence[Move]) -> _Bucket:
        own, ranks = self._channel.index, range(self._channel.size)
        bucket = _Bucket(sent_sizes=[0] * len(ranks), received_sizes=[0] * len(ranks))
        for move in moves:
            if move.source == own:
                bucket.sent_sizes[move.target] += move.room
                bucket.sent.append(move)
            if move.target == own:
                bucket.received_sizes[move.source] += move.room
                bucket.received.append(move)
        bucket.sent.sort(key=lambda move: move.target)
        bucket.received.sort(key=lambda move: move.source)
        return bucket

    @torch.no_grad()
    def run(self, read: Callable[[Move], Tensor], write: Callable[[Move], Tensor], device: torch.device) -> None:
        """Collective. Moves everything.

        Args:
            read: the box of a move that this rank sends.
            write: the memory, of the same shape and dtype, for the box of a move that this rank receives.
            device: where the buffers are.
        """
        for bucket in self._buckets:
            sent = torch.empty(sum(bucket.sent_sizes), dtype=torch.uint8, device=device)
            for move, part in _parts(bucket.sent, sent):
                piece = read(move)
                part.view(piece.dtype).view(piece.shape).copy_(piece)
            received = torch.empty(sum(bucket.received_sizes), dtype=torch.uint8, device=device)
            self._channel.exchange(received, sent, bucket.received_sizes, bucket.sent_sizes)
            for move, part in _parts(bucket.received, received):
                piece = write(move)
                piece.copy_(part.view(piece.dtype).view(piece.shape))


def _parts(moves: Sequence[Move], buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
    starts = itertools.accumulate((move.room for move in moves), initial=0)
    for move, start in zip(moves, starts, strict=False):
        yield move, buffer[start : start + move.num_bytes]


def _bounded(moves: Iterable[Sequence[Move]], num_ranks: int, max_bytes: int) -> Iterator[list[Move]]:
    """The moves of consecutive tensors together, as many as no rank moves more bytes for than it may."""
    loads = [0] * num_ranks
    together: list[Move] = []
    for some in moves:
        added = [0] * num_ranks
        for move in some:
            added[move.source] += move.room
            added[move.target] += move.room
        if together and max(map(sum, zip(loads, added, strict=True))) > max_bytes:
            yield together
            together = list[Move]()
            loads = [0] * num_ranks
        together += some
        loads = [load + more for load, more in zip(loads, added, strict=True)]
    if together:
        yield together
