"""The fused AdamW step on host memory: the typed face of the C++ kernel in ``csrc/``."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardopt._host import adamw_step as _adamw_step
from shardopt._host import available_isas as _available_isas

__all__ = ["adamw_step", "available_isas"]

_ISA_VARIABLE = "SHARDOPT_CPU_ISA"


def available_isas() -> tuple[str, ...]:
    """Names of the kernel's ISA levels that this CPU can run; the last is the default.

    All levels give the same bits. ``"scalar"`` is the reference, ``"lanes16"`` is plain 16-lane C++ for any CPU.
    """
    return tuple(_available_isas())


def adamw_step(
    param: Tensor,  # [numel], fp32
    grad: Tensor,  # [numel], fp32
    exp_avg: Tensor,  # [numel], fp32
    exp_avg_sq: Tensor,  # [numel], fp32
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    isa: str | None = None,
) -> None:
    """Step ``param``, ``exp_avg`` and ``exp_avg_sq`` in place as ``torch.optim.AdamW`` does, in one pass.

    Decoupled weight decay; bias correction in double, rounded once. An element's result depends on its own inputs
    only: the same bits on every ISA level, at every length and offset, however a buffer is cut into calls (a NaN is
    NaN on all of them, its payload is not promised). The moments equal those of torch's for-loop AdamW bit for bit
    where torch uses AVX2 or AVX-512; ``param`` differs from it by rounding, because torch's vector ``sqrt`` is not
    always correctly rounded.

    One thread, with the GIL released: a caller who wants more threads cuts the buffers.

    Args:
        param: 1-D, contiguous, float32, on the CPU; so are the next three, and as long.
        grad: the gradient; read only.
        exp_avg: first moment.
        exp_avg_sq: second moment.
        lr: learning rate.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the denominator; where float32 rounds it to 0, a zero second moment gives NaN.
        weight_decay: ``param`` is scaled by ``1 - lr * weight_decay`` before the update.
        step: number of this step, counted from 1.
        isa: one of ``available_isas()``; None takes the environment's ``SHARDOPT_CPU_ISA``, or the last of them.

    Raises:
        TypeError: a tensor is not a plain float32 tensor.
        ValueError: a tensor is not dense, 1-D and contiguous on the CPU, has another length, or shares memory with
            another; a number is out of range; the ISA level is unknown or this CPU cannot run it.
    """
    named = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    _require_numbers(lr, beta1, beta2, eps, weight_decay, step)
    _adamw_step(
        *(_flat(name, tensor) for name, tensor in named.items()),
        param_scale=1.0 - lr * weight_decay,
        grad_weight=1.0 - beta1,
        beta2=beta2,
        square_weight=1.0 - beta2,
        step_size=lr / (1.0 - beta1**step),
        bias_correction=math.sqrt(1.0 - beta2**step),
        eps=eps,
        isa=_chosen_isa(isa),
    )
    # Autograd and whoever watches versions must see the writes they could not record.
    increment_version((param, exp_avg, exp_avg_sq))


def _flat(name: str, tensor: Tensor) -> Tensor:
    """The tensor, checked, in the form the kernel's binding takes."""
    # Exact types: a subclass (DTensor, FakeTensor) may hold no memory, or not the memory it seems to.
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = type(tensor).__qualname__
        raise TypeError(f"{name} is a {kind}; pass a plain torch.Tensor (of a DTensor, its to_local())")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {tensor.dtype}; the kernel takes torch.float32")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; the kernel takes torch.strided")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the kernel takes CPU tensors")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        layout = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise ValueError(f"{name} has {layout}; the kernel takes contiguous 1-D tensors: pass .view(-1)")
    return tensor.detach()  # a leaf that requires grad does not export its memory


def _require_numbers(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be finite and at least 0")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} is {value!r}; it must be in [0, 1)")
    if step < 1:
        raise ValueError(f"step is {step!r}; steps are counted from 1")


def _chosen_isa(isa: str | None) -> str:
    if isa is not None:
        return isa
    # Read at each call: importing shardopt reads no environment.
    forced = os.environ.get(_ISA_VARIABLE, "")
    if forced and forced not in available_isas():
        known = ", ".join(available_isas())
        raise ValueError(f"{_ISA_VARIABLE}={forced!r} is not a level this CPU can run; set one of {known}, or unset it")
    return forced
