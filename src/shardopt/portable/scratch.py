"""What a load writes into: memory beside the live state, and a record of which elements arrived."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardopt.geometry import Box, missing

__all__ = ["Scratch"]


class Scratch:
    """One box of a tensor that is being loaded.

    DCP narrows it and copies into it as if it were a tensor; each copy is checked and recorded.

    Attributes:
        dtype: of its elements: as wanted, or, where any dtype will do, as the first piece that arrived.
        wrong_dtype: another dtype that arrived, None as long as all was well.
        delivered: the boxes that have arrived, in global coordinates.
        taken_over: whether an optimizer has made the memory its own, so that no other may.

    Memory is taken at once, for all boxes before the first is read; on the CPU none of it is resident until it is
    written. Taken box by box while DCP reads, it would lie between DCP's temporary tensors, and glibc does not put an
    aligned block into the gap that an equal one has left: the heap grew to twice what was loaded.
    """

    # There is one for every entry, and every object more is one more for each pass of the garbage collector.
    __slots__ = ("_allocate", "_any_dtype", "_tensor", "box", "delivered", "dtype", "taken_over", "wrong_dtype")

    def __init__(
        self, box: Box, dtype: torch.dtype, allocate: Callable[[torch.dtype], Tensor], *, any_dtype: bool = False
    ) -> None:
        """Makes an empty record.

        Args:
            box: the elements this scratch stands for, in global coordinates.
            dtype: what they are expected to be saved as.
            allocate: makes a tensor of ``box.size`` and of the given dtype, uninitialised.
            any_dtype: whether another dtype is taken too, if all pieces have it.
        """
        self.box = box
        self.dtype = dtype
        self.wrong_dtype: torch.dtype | None = None
        self.delivered: list[Box] = []
        self.taken_over = False
        self._allocate = allocate
        self._any_dtype = any_dtype
        self._tensor = allocate(dtype)

    def missing(self) -> Box | None:
        """The first box of elements that never arrived, or None."""
        # As a checkpoint of the same sharding is read.
        return None if self.delivered == [self.box] else missing(self.box, self.delivered)

    def tensor(self) -> Tensor:
        """The loaded elements, shape ``box.size``; call it only when nothing is missing."""
        return self._tensor

    def convert(self, dtype: torch.dtype) -> None:
        """Turns the loaded elements into another dtype."""
        self._tensor = self._tensor.to(dtype)
        self.dtype = dtype

    def target(self) -> _Target:
        """What DCP is given to copy into."""
        return _Target(self, (0,) * len(self.box.size), self.box.size)

    def receive(self, offset: tuple[int, ...], size: tuple[int, ...], source: Tensor) -> None:
        """Copies ``source`` to ``offset`` within the box, unless its dtype is not the expected one."""
        if source.dtype != self.dtype and self._any_dtype and not self.delivered:
            self.dtype = source.dtype
            self._tensor = self._allocate(source.dtype)
        whole = size == self.box.size
        if source.dtype != self.dtype:
            self.wrong_dtype = source.dtype
        elif whole:
            self._tensor.copy_(source)
        else:
            part = self.tensor()
            for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
                part = part.narrow(dim, start, length)
            part.copy_(source)
        if whole:
            self.delivered.append(self.box)
            return
        start = tuple(base + extra for base, extra in zip(self.box.offset, offset, strict=True))
        self.delivered.append(Box(start, size))


class _Target:
    """The few tensor methods that DCP readers call on a load target."""

    __slots__ = ("_offset", "_scratch", "_size")

    def __init__(self, scratch: Scratch, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
        self._scratch = scratch
        self._offset = offset
        self._size = size

    def size(self, dim: int | None = None) -> torch.Size | int:
        return torch.Size(self._size) if dim is None else self._size[dim]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._size)

    @property
    def dtype(self) -> torch.dtype:
        return self._scratch.dtype

    def narrow(self, dim: int, start: int, length: int) -> _Target:
        if start == 0 and length == self._size[dim]:
            return self
        offset = (*self._offset[:dim], self._offset[dim] + start, *self._offset[dim + 1 :])
        size = (*self._size[:dim], length, *self._size[dim + 1 :])
        return _Target(self._scratch, offset, size)

    def detach(self) -> _Target:
        return self

    def copy_(self, source: Tensor, non_blocking: bool = False) -> _Target:
        self._scratch.receive(self._offset, self._size, source)
        return self
