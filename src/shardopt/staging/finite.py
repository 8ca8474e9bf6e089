"""Whether numbers are finite: a tensor's elements in one pass, without memory of its size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from shardopt.layouts.objects import fields_of_object, saved_as

__all__ = ["find_non_finite", "find_non_finite_in"]

_CHUNK_ELEMENTS = 1 << 22
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def find_non_finite_in(value: object) -> str | None:
    """What is not finite in the tensors of a value and the containers in it.

    Python's own numbers are left alone: to rules, an infinity or NaN among them means that there is none yet.
    """
    if isinstance(value, Tensor):
        return find_non_finite(value)
    if isinstance(value, Mapping):
        return find_non_finite_in(list(value.values()))
    if isinstance(value, (list, tuple, deque)):
        return next((found for item in value if (found := find_non_finite_in(item)) is not None), None)
    if saved_as(type(value)) is not None:
        return find_non_finite_in(fields_of_object(value))
    return None


def find_non_finite(tensor: Tensor) -> str | None:
    """What is not finite in the tensor, in words (``"NaN"``, ``"inf"``), or None."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    if tensor.dim() == 0 and not tensor.is_complex():
        value = tensor.item()
        return None if math.isfinite(value) else "NaN" if math.isnan(value) else "inf"
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach()
    # Nearly always the sum is finite, and then so is everything in it. It may overflow, so it proves nothing else.
    if real.element_size() > 1 and math.isfinite(real.sum(dtype=_SUMMED_IN.get(real.dtype)).item()):
        return None
    # A dense tensor with other strides (channels last) is seen in the order of its memory, not copied.
    flat = real.as_strided((real.numel(),), (1,)) if _is_dense(real) else real.reshape(-1)
    # The smallest and the largest element tell: a NaN anywhere makes both NaN.
    ends = torch.stack([end for chunk in flat.split(_CHUNK_ELEMENTS) for end in _ends(chunk)])
    if bool(torch.isfinite(ends).all()):
        return None
    return "NaN" if bool(torch.isnan(ends).any()) else "inf"


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
