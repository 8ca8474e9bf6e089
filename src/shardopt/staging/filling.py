"""Which live tensors a load can copy into."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["can_be_filled", "sharing_memory"]


def can_be_filled(live: Tensor) -> bool:
    """Whether ``copy_`` would neither raise, half way in a commit, nor do nothing.

    It raises for an expanded tensor, whose elements share memory, and for one made in inference mode; on the meta
    device it does nothing.
    """
    if live.is_inference() or live.is_meta:
        return False
    strides = live.stride()
    return 0 not in strides or all(stride or size < 2 for stride, size in zip(strides, live.shape, strict=True))


def sharing_memory(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of tensors whose memory, from the first element to the last, overlaps another one's of the list.

    Filling one of them would change the other. An object that is listed twice overlaps itself. Interleaved views
    (two columns of a matrix) count too, though they share no element.
    """
    spans = sorted(
        # Subclasses wrap tensors of their own, and may have no memory themselves.
        (
            (tensor.data_ptr(), _extent_bytes(tensor), id(tensor))
            for tensor in tensors
            if type(tensor) in (Tensor, nn.Parameter) and tensor.numel()
        ),
        key=lambda span: span[0],
    )
    found: set[int] = set()
    end, owner = -1, 0
    for start, num_bytes, name in spans:
        if start < end:
            found |= {owner, name}
        if start + num_bytes > end:
            end, owner = start + num_bytes, name
    return found


def _extent_bytes(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
