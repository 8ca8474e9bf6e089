"""The fused AdamW step on host memory: the typed face of the C++ kernel in ``csrc/``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from shardopt._host import adamw_step as _adamw_step
from shardopt._host import available_isas as _available_isas

from shardopt.swap import reference_rows
from shardopt.swap.kernel_rows import HYPER, ROW, DtypeCode, MasterKind, Table, adamw_hyper

__all__ = [
    "HYPER",
    "ROW",
    "DtypeCode",
    "MasterKind",
    "Table",
    "adamw_hyper",
    "adamw_rows",
    "adamw_step",
    "available_isas",
    "default_threads",
    "first_touch",
    "sum_of_squares",
]

_ISA_VARIABLE = "SHARDOPT_CPU_ISA"
_LOCAL_WORLD_VARIABLE = "LOCAL_WORLD_SIZE"


def available_isas() -> tuple[str, ...]:
    """Names of the kernel's ISA levels that this CPU can run; the last is the default.

    All levels give the same bits. ``"scalar"`` is the reference, ``"lanes16"`` is plain 16-lane C++ for any CPU.
    """
    return tuple(_available_isas())


def default_threads(local_world_size: int | None = None) -> int:
    """How many threads a step takes: the CPUs this process may run on, shared among the ranks of this machine.

    ``OMP_NUM_THREADS`` has no say: torchrun sets it to 1.

    Args:
        local_world_size: ranks on this machine; None takes ``LOCAL_WORLD_SIZE`` of the environment, or 1.
    """
    if local_world_size is None:
        said = os.environ.get(_LOCAL_WORLD_VARIABLE, "1")
        if not said.isdecimal() or int(said) < 1:
            raise ValueError(f"{_LOCAL_WORLD_VARIABLE}={said!r} is not a number of ranks; set it to 1 or more")
        local_world_size = int(said)
    if local_world_size < 1:
        raise ValueError(f"local_world_size is {local_world_size!r}; it must be at least 1")
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def adamw_rows(
    rows: Table,  # [num_rows], ROW
    hypers: Table,  # [num_hypers], HYPER
    *,
    seed: int,
    grad_scale: float = 1.0,
    num_threads: int | None = None,
    isa: str | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Step every row in place as ``torch.optim.AdamW`` does, in one pass over memory, with the GIL released.

    Gradients are multiplied by ``grad_sign * grad_scale`` as they are read, and never written.

    An element's result depends on its own inputs, on ``seed``, and on its row's hyper, stream and global index only: the
    same bits on every ISA level, with any number of threads, and however a span is cut into rows or calls. Only bf16
    moments draw random bits. A bf16 parameter without a master is rounded to nearest even.

    Args:
        rows: what to step. Nobody else may touch the memory until this returns, and tensors' version counters do not
            move: see ``torch.autograd.graph.increment_version``.
        hypers: what ``hyper`` of the rows points to.
        seed: 64 bits; the same at each step of a run, on each rank.
        grad_scale: factor of all gradients.
        num_threads: at most; None takes ``default_threads()``.
        isa: one of ``available_isas()``; None takes the environment's ``SHARDOPT_CPU_ISA``, or the last of them.
        names: of the rows, for errors; None counts them.

    Raises:
        TypeError: a table is not one of ``ROW`` or ``HYPER``.
        ValueError: a row is wrong (a null or misaligned address, memory shared with another one, an unknown code, an
            index of no hyper); all of them are named and nothing is written.
    """
    for row in rows:
        if row["numel"]:
            reference_rows.step_row(row, hypers[row["hyper"]], seed, grad_scale)


def sum_of_squares(
    rows: Table, *, num_threads: int | None = None, isa: str | None = None, names: Sequence[str] | None = None
) -> NDArray[np.float64]:
    """The sum of squares of each row's gradient, in double: [num_rows].

    Of a row only ``grad``, ``grad_dtype`` and ``numel`` count. The same bits on every ISA level and with any number of
    threads. Arguments and errors are those of ``adamw_rows``.
    """
    sums = np.zeros(len(rows), np.float64)
    for place, row in enumerate(rows):
        if row["numel"]:
            grad = reference_rows._widened(int(row["grad"]), int(row["numel"]), row["grad_dtype"])
            sums[place] = np.square(grad.astype(np.float64)).sum()
    return sums


def first_touch(rows: Table, *, num_threads: int | None = None, names: Sequence[str] | None = None) -> None:
    """Fill the moments of all rows with zeros, each page by the thread that will step it.

    Threads of ``adamw_rows`` get the same part of a table each time, so this places fresh memory on the right NUMA node.
    """
    for row in rows:
        size = 2 if row["moment_dtype"] else 4
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            if row["numel"] and row[name]:
                reference_rows.memory(int(row[name]), int(row["numel"]) * size, np.uint8)[:] = 0


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
