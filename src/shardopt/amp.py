"""``GradScaler`` whose ranks see an overflow together."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt.optimizer import ShardedStateOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a ``ShardedStateOptimizer``: one decision to skip, one scale, on all its ranks.

    torch's own refuses an optimizer that has plain and sharded parameters, waits for ever where a rank has no
    gradient, and keeps a scale of its own on each rank where only plain gradients overflow. Here each rank looks at
    what it holds, whatever that is, and one vote settles it. Constructed and used as torch's, which treats all other
    optimizers.

    ``unscale_`` and the first ``step`` after ``scale`` are collective for a ``ShardedStateOptimizer``.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # What both unscale_ and step call; there is no public place between gradients and verdict.
        if isinstance(optimizer, ShardedStateOptimizer):
            return optimizer.unscale(inv_scale, half=allow_fp16)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
