"""Which live tensors a load can copy into."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["can_be_filled", "overlapping", "sharing_memory"]


def can_be_filled(live: Tensor) -> bool:
    """Whether ``copy_`` would neither raise, half way in a commit, nor do nothing.

    It raises for an expanded tensor, whose elements share memory, and for one made in inference mode; into overlapping
    windows (``unfold``) it writes one value over another; on the meta device it does nothing.
    """
    if live.is_inference() or live.is_meta or live.layout != torch.strided:
        return False
    if live.is_contiguous():
        return True
    # Each step along a dim must lead past all that the dims of smaller steps reach.
    reach = 0
    for stride, size in sorted(zip(live.stride(), live.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += max(size - 1, 0) * stride
    return True


def sharing_memory(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of tensors whose memory, from the first element to the last, overlaps another one's of the list.

    Filling one of them would change the other. An object that is listed twice overlaps itself. Interleaved views
    (two columns of a matrix) count too, though they share no element.
    """
    spans = _spans(tensors)
    found: set[int] = set()
    end, owner = -1, 0
    for start, num_bytes, name in spans:
        if start < end:
            found |= {owner, name}
        if start + num_bytes > end:
            end, owner = start + num_bytes, name
    return found


def overlapping(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> set[int]:
    """The ids of tensors whose memory overlaps that of any of the others."""
    starts: list[int] = []
    ends: list[int] = []
    for start, num_bytes, _ in _spans(others):
        if starts and start <= ends[-1]:
            ends[-1] = max(ends[-1], start + num_bytes)
        else:
            starts.append(start)
            ends.append(start + num_bytes)
    found: set[int] = set()
    for start, num_bytes, name in _spans(tensors):
        at = bisect_left(starts, start + num_bytes) - 1
        if at >= 0 and ends[at] > start:
            found.add(name)
    return found


def _spans(tensors: Iterable[Tensor]) -> list[tuple[int, int, int]]:
    """Address, extent and id of each tensor that has memory, by address."""
    return sorted(
        # Subclasses wrap tensors of their own, and may have no memory themselves.
        (
            (tensor.data_ptr(), _extent_bytes(tensor), id(tensor))
            for tensor in tensors
            if type(tensor) in (Tensor, nn.Parameter) and tensor.numel() and tensor.layout == torch.strided
        ),
        key=lambda span: span[0],
    )


def _extent_bytes(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
