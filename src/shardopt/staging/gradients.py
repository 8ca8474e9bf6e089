"""Gradients under GradScaler: unscaled and looked through, plain tensors and shards alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardopt.torch_compat import unscale_in_place

__all__ = ["find_overflow"]


@torch.no_grad()
def find_overflow(gradients: Sequence[Tensor], inverse: Tensor) -> dict[torch.device, Tensor]:
    """Multiplies this rank's gradients by the inverse scale; tells where one is not finite. No communication.

    Args:
        gradients: plain tensors of any device and dtype, changed in place; sparse ones by their values.
        inverse: of the scale, one element, float32.

    Returns:
        By device, a 0-d float32 tensor: 1.0 where a gradient holds an infinity or NaN, else 0.0.
    """
    dense = [one._values() if one.is_sparse else one for one in gradients]
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in dense:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found: dict[torch.device, Tensor] = {}
    for (device, _), some in alike.items():
        verdict = found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        unscale_in_place(some, inverse.to(device), verdict)
    return found
