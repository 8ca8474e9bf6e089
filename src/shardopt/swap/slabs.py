"""Host slabs: memory of exactly the size that the optimizer's state has, cut into flat pieces."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Region", "Slabs", "plan_pieces"]

_WIDEST_ALIGNMENT = 256
# A piece may waste less than this part of itself to be aligned: all of them together stay below 1 %.
_MOST_WASTE = 128
_HUGE_PAGE_BYTES = 2 << 20
# cudaHostRegisterPortable: pinned for every device of this process, whichever is the current one later on.
_PORTABLE = 1


def plan_pieces(sizes: Sequence[int], items: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces start in one slab, one behind the other, and how many bytes they take.

    A piece of 32 KiB or more starts at a multiple of 256 bytes, a smaller one at that of a power of two that is at most
    a 128th of it, and at that of its element size.

    Args:
        sizes: bytes of each piece.
        items: bytes of an element of each, powers of two; never growing, or gaps appear between tiny pieces.
    """
    starts: list[int] = []
    end = 0
    for size, item in zip(sizes, items, strict=True):
        # The largest power of two that is at most a 128th of the size.
        fitting = 1 << max((size // _MOST_WASTE).bit_length() - 1, 0)
        alignment = max(item, min(_WIDEST_ALIGNMENT, fitting))
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + size
    return starts, end


class _Mapping(mmap.mmap):
    """Anonymous memory that lives as long as a tensor over it; the last one's end unregisters and frees it."""

    address = 0
    registered = False
    device: torch.device | None = None
    process = 0

    def __del__(self) -> None:
        # CUDA must let go of the pages before they are unmapped. At the interpreter's end it does so itself.
        if not self.registered or sys.is_finalizing():
            return
        if self.process != os.getpid():
            # A forked child has neither CUDA nor these pages, and what it has at their addresses is not to be unmapped.
            _NOT_OURS.append(self)
            return
        with _on(self.device):
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.address)


_NOT_OURS: list[_Mapping] = []


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of one dtype in a slab.

    Attributes:
        mapping: the slab.
        start: the region's first byte there.
        dtype: of its elements.
    """

    mapping: _Mapping | None
    start: int
    dtype: torch.dtype

    def part(self, first: int, numel: int) -> Tensor:
        """Some of its elements, as a storage of their own that keeps the slab: [numel]."""
        if numel == 0 or self.mapping is None:
            return _empty(self.dtype)
        offset = self.start + first * self.dtype.itemsize
        return torch.frombuffer(self.mapping, dtype=self.dtype, count=numel, offset=offset)


class Slabs:
    """Makes the memory of one optimizer's state. Nothing keeps it but the tensors over it.

    Attributes:
        nbytes: of all slabs that were made, as they were asked for from the system.
        pin: whether slabs are registered with CUDA, so that copies to and from a device run by themselves.
        device: the CUDA device that they are for; None is the current one.
    """

    def __init__(self, *, pin: bool, device: torch.device | None = None) -> None:
        self.pin = pin
        self.device = device
        self.nbytes = 0

    def make(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Flat tensors of zeros, each with a storage of its own over its part of a new slab.

        The memory is not touched: pages come to be where a thread first writes to them.

        Args:
            wanted: number of elements and dtype of each piece. Wide dtypes first keep the slab exact.

        Raises:
            MemoryError: the system gives no address space of that size.
        """
        # A storage for each: saving or copying one tensor takes its own bytes along, not the slab's.
        return [region.part(0, numel) for region, (numel, _) in zip(self.regions(wanted), wanted, strict=True)]

    def regions(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[Region]:
        """The same memory as ``make`` gives, to be cut further."""
        items = [dtype.itemsize for _, dtype in wanted]
        sizes = [numel * item for (numel, _), item in zip(wanted, items, strict=True)]
        starts, nbytes = plan_pieces(sizes, items)
        mapping = self._map(nbytes) if nbytes else None
        self.nbytes += nbytes
        return [Region(mapping, start, dtype) for start, (_, dtype) in zip(starts, wanted, strict=True)]

    def _map(self, nbytes: int) -> _Mapping:
        try:
            # Private: shared memory would be subject to the size of /dev/shm, and gets no huge pages by default.
            mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the optimizer's state needs a slab of {nbytes} bytes on the host: {error}") from error
        mapping.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if nbytes >= _HUGE_PAGE_BYTES:
            _advise_huge_pages(mapping)
        if self.pin:
            self._register(mapping, nbytes)
        return mapping

    def _register(self, mapping: _Mapping, nbytes: int) -> None:
        """Locks the slab's pages for CUDA; where that fails, warns once and goes on without."""
        why = "torch finds no CUDA device"
        if torch.cuda.is_available():
            # Before the driver takes hold of the pages: a fork would copy all that is pinned, or leave copies to and
            # from the device with pages that are the child's from then on.
            if hasattr(mmap, "MADV_DONTFORK"):
                mapping.madvise(mmap.MADV_DONTFORK)
            # Or a device that nothing else is on would get a context of some hundred MB.
            with _on(self.device):
                runtime: Any = torch.cuda.cudart()
                code = runtime.cudaHostRegister(mapping.address, nbytes, _PORTABLE)
                if int(code) == 0:
                    mapping.registered, mapping.device, mapping.process = True, self.device, os.getpid()
                    return
                _forget_cuda_error()
            if hasattr(mmap, "MADV_DOFORK"):
                mapping.madvise(mmap.MADV_DOFORK)
            why = f"cudaHostRegister of {nbytes} bytes gave error {int(code)} (see `ulimit -l`)"
        self.pin = False
        warnings.warn(
            f"{why}, so the optimizer's state stays in pageable memory. pin_memory=False says that this is meant.",
            RuntimeWarning,
            stacklevel=2,
        )


def _on(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """With that device as the current one; None leaves it as it is."""
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)


def _forget_cuda_error() -> None:
    """Has the error of a call that was refused raised here, and dropped.

    CUDA keeps it, and torch asks for it after each launch: the next one, of whatever kernel, would raise it as its own.
    """
    try:
        torch.ones((), device="cuda")
    except RuntimeError:
        # Another launch, which raises if it was not that.
        torch.ones((), device="cuda")


def _empty(dtype: torch.dtype) -> Tensor:
    # On the host whatever the default device is.
    return torch.empty(0, dtype=dtype, device="cpu")


def _advise_huge_pages(mapping: _Mapping) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel built without them says so; it is advice, and pages of the usual size hold the same.
        return
