"""The tables of a step on their way to the device: through a few pairs of buffers, made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardopt.swap.backend import Backend, Stream
from shardopt.swap.order import Order, Point

__all__ = ["StepTables", "table_room"]

# Of each table's start: for accesses of 128 bits, and more than any dtype asks for.
_ALIGNMENT = 256


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def table_room(sizes: Sequence[int]) -> int:
    """Bytes that tables of these sizes take together.

    Args:
        sizes: of each table, in bytes.
    """
    return sum(map(_padded, sizes))


class StepTables:
    """Pairs of a host buffer and a device buffer, which steps use in turn.

    A pair is free once the launches of the step that used it last are done: by then its copy is done too, and nobody
    reads it on the device. So the host is at most as many steps ahead of the device as there are pairs.

    Args:
        backend: gives the buffers.
        order: of its streams.
        nbytes: room for the tables of one step.
        num_pairs: of buffers.
    """

    def __init__(self, backend: Backend, order: Order, *, nbytes: int, num_pairs: int) -> None:
        self._backend = backend
        self._order = order
        self._room = _padded(nbytes)
        self._num_pairs = num_pairs
        self._host = backend.allocate_host(num_pairs * self._room)
        self._device = backend.allocate(num_pairs * self._room)
        self._copied = order.new_mark()
        self._read = [order.new_mark() for _ in range(num_pairs)]
        self._next = 0

    @property
    def device_bytes(self) -> int:
        """Of the device buffers."""
        return self._num_pairs * self._room

    @property
    def copied(self) -> Point:
        """When the tables of the last step are on the device."""
        return Point(self._copied, self._copied.tick)

    def upload(self, tables: Sequence[NDArray[Any]], made: Point) -> tuple[list[Tensor], Point]:
        """Copies the tables of a step to the device, in one copy.

        Args:
            tables: contiguous arrays; those of structs come as bytes.
            made: when the device buffers were allocated.

        Returns:
            The tables on the device, which stay until ``release``, and the point when they are there.

        Raises:
            ValueError: they need more room than there is; nothing was copied.
        """
        flat = [_bytes_of(table) for table in tables]
        if table_room([len(one) for one in flat]) > self._room:
            raise ValueError(
                f"tables of a step take {[len(one) for one in flat]} bytes, and there is room for {self._room}; the "
                "plan has grown, so make a new ring for it"
            )
        read = self._read[self._next]
        self._order.host(Point(read, read.tick))
        start = self._next * self._room
        host, device = (memory[start : start + self._room] for memory in (self._host, self._device))
        ends = np.cumsum([_padded(len(one)) for one in flat])
        self._backend.host_writes(host)
        bytes_there = host.numpy()
        views: list[Tensor] = []
        for table, one, end in zip(tables, flat, ends.tolist(), strict=True):
            begin = end - _padded(len(one))
            bytes_there[begin : begin + len(one)] = one
            views.append(_like(table, device[begin : begin + len(one)]))
        used = int(ends[-1]) if len(ends) else 0
        if used:
            self._order.wait(Stream.UPLOAD, made)
            self._backend.copy(device[:used], host[:used], Stream.UPLOAD)
        return views, self._order.mark(self._copied, Stream.UPLOAD)

    def release(self, copied: Point) -> None:
        """Ends the use of the buffers that ``upload`` took last, after all that the compute stream was given.

        Args:
            copied: as ``upload`` returned it. Where a launch has failed, nobody may have waited for it.
        """
        self._order.wait(Stream.COMPUTE, copied)
        self._order.mark(self._read[self._next], Stream.COMPUTE)
        self._next = (self._next + 1) % self._num_pairs


def _bytes_of(table: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(table).reshape(-1).view(np.uint8)


def _like(table: NDArray[Any], memory: Tensor) -> Tensor:
    """The memory as a tensor of the table's dtype and shape."""
    if table.dtype.names is not None:
        return memory
    dtype = torch.from_numpy(np.empty(0, table.dtype)).dtype
    return memory.view(dtype).view(table.shape)
