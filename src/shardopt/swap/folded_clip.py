"""Clipping in one read: the norm of gradients on the host by the kernel, and the factor kept for the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardopt.clipping import norm_and_factor, tensor_norms
from shardopt.swap.clip import Clip
from shardopt.swap.engine import Engine
from shardopt.swap.host_kernel import ROW, DtypeCode, sum_of_squares
from shardopt.torch_compat import gradients_of

__all__ = ["fold_clip"]

_CODES = {torch.float32: DtypeCode.FP32, torch.bfloat16: DtypeCode.BF16}


@torch.no_grad()
def fold_clip(
    engine: Engine,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    problem: BaseException | None = None,
) -> Tensor:
    """Collective. The norm of all gradients; the factor that clips them waits in the engine for its step.

    Args:
        engine: of the optimizer.
        max_norm: not negative.
        norm_type: order of the norm.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        problem: why this rank cannot clip; every rank raises.
    """
    params = [one.param for one in engine.held]
    # A clip that raises leaves none: what an earlier one has found may be of other gradients.
    engine.clip = None
    total, factor = norm_and_factor(
        params,
        gradients_of(params),
        max_norm,
        norm_type,
        norms=lambda tensors, order: _norms(tensors, order, engine.num_threads),
        error_if_nonfinite=error_if_nonfinite,
        problem=problem,
    )
    engine.clip = Clip.of(factor, engine.gradients)
    return total


def _norms(tensors: Sequence[Tensor], order: float, num_threads: int | None) -> list[float]:
    """Of order 2 in one read by the kernel, in double; of other orders, or other dtypes, by torch."""
    if order != 2 or any(tensor.dtype not in _CODES or not tensor.is_cpu for tensor in tensors):
        return tensor_norms(tensors, order, None)
    # Kept until the kernel has read them: of gradients with gaps, or expanded ones, these are copies.
    flat = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    rows = np.zeros(len(flat), ROW)
    rows["grad"] = [tensor.data_ptr() for tensor in flat]
    rows["numel"] = [tensor.numel() for tensor in flat]
    rows["grad_dtype"] = [_CODES[tensor.dtype] for tensor in flat]
    return [math.sqrt(square) for square in sum_of_squares(rows, num_threads=num_threads)]
