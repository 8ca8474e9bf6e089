"""Whether a tensor's elements are finite, in one pass and without memory of its size."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["find_non_finite"]

_CHUNK_ELEMENTS = 1 << 22


def find_non_finite(tensor: Tensor) -> str | None:
    """What is not finite in the tensor, in words (``"NaN"``, ``"inf"``), or None.

    The smallest and the largest element tell: a NaN anywhere makes both NaN.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # A dense tensor with other strides (channels last) is seen in the order of its memory, not copied.
    flat = real.detach().as_strided((real.numel(),), (1,)) if _is_dense(real) else real.detach().reshape(-1)
    ends = [_ends(chunk) for chunk in flat.split(_CHUNK_ELEMENTS)]
    found = torch.stack([end for pair in ends for end in pair])
    if bool(torch.isfinite(found).all()):
        return None
    return "NaN" if bool(torch.isnan(found).any()) else "inf"


def _ends(chunk: Tensor) -> tuple[Tensor, Tensor]:
    # Kernels for 8-bit floats are few; float32 holds them all.
    low, high = torch.aminmax(chunk.float() if chunk.element_size() == 1 else chunk)
    return low, high


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
