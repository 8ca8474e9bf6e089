"""Which live tensors a load can copy into."""

from __future__ import annotations

from torch import Tensor

__all__ = ["can_be_filled"]


def can_be_filled(live: Tensor) -> bool:
    """Whether every element has memory of its own: ``copy_`` raises for an expanded tensor, half way in a commit."""
    strides = live.stride()
    return 0 not in strides or all(stride or size < 2 for stride, size in zip(strides, live.shape, strict=True))
