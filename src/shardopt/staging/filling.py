"""Which live tensors a load can copy into."""

from __future__ import annotations

from torch import Tensor

__all__ = ["can_be_filled"]


def can_be_filled(live: Tensor) -> bool:
    """Whether ``copy_`` would not raise, half way in a commit.

    It does for an expanded tensor, whose elements share memory, and for one made in inference mode.
    """
    if live.is_inference():
        return False
    strides = live.stride()
    return 0 not in strides or all(stride or size < 2 for stride, size in zip(strides, live.shape, strict=True))
