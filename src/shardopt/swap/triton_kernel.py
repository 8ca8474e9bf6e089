"""The AdamW step of one chunk on a GPU: the typed face of the Triton kernel in triton_body.py.

The kernel has been run in Triton's interpreter on CPU tensors, where it gives the bits of the host kernel, and compiled
for compute capabilities 8.0, 9.0 and 10.0. It has not run on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from shardopt.swap.device_rows import ALIGNED_BYTES, BLOCK, DEVICE_HYPER, ROW_FIELDS, Kind
from shardopt.swap.kernel_rows import DtypeCode, MasterKind

__all__ = ["launch_adamw", "require_triton"]

_WARP_THREADS = 32
_BODY = "shardopt.swap.triton_body"
_SLOT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
_DTYPES = {DtypeCode.FP32: torch.float32, DtypeCode.BF16: torch.bfloat16}
_MASTERS = {MasterKind.FP32: torch.float32, MasterKind.REMAINDER16: torch.int16}


def require_triton() -> None:
    """Import triton and the kernel, so that a lack of it is found before the first step.

    Raises:
        ImportError: triton cannot be imported.
    """
    _body()


def launch_adamw(
    kind: Kind,
    *,
    rows: Tensor,  # [num_rows, fields], int64: as_int64 of DEVICE_ROW
    blocks: Tensor,  # [num_rows, 2], int32: device_blocks
    hypers: Tensor,  # [num_hypers, 8], float32: device_hypers
    scalars: Tensor,  # [2], float32: device_scalars
    exp_avg: Tensor,  # [slot_elements], of moment_dtype
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,  # with amsgrad only
    master: Tensor | None = None,  # float32 or int16, as master_kind says
    num_blocks: int,
) -> None:
    """Step the rows of one chunk in one launch on the current stream; nothing is allocated and nothing waits.

    The moments and masters in the slot and the parameters that the rows point to get the bits that ``adamw_rows`` would
    give them; gradients are only read. If ``scalars[1]`` is not zero when the launch runs, nothing changes.

    All tensors are contiguous and on one device, whose current stream the launch is put on. What the rows say is taken
    on trust: a wrong address or offset is read and written. The first launch of a kind compiles it.

    Args:
        kind: of all rows; the launch is compiled for it.
        rows: spans of parameters, with addresses on the device.
        blocks: where programs find their row; both tables may be parts of larger ones, of the same rows.
        hypers: what ``hyper`` of the rows points to.
        scalars: the factor of all gradients, and whether to skip.
        exp_avg: of the slot, as the other three; ``offset`` of the rows counts from their first elements.
        exp_avg_sq: of the slot.
        max_exp_avg_sq: of the slot.
        master: of the slot.
        num_blocks: of all rows, each in blocks of ``BLOCK`` elements; with 0 there is no launch.

    Raises:
        ImportError: triton cannot be imported.
        ValueError: a tensor is not what the kind asks for; all of them are named.
    """
    given = {
        "rows": rows,
        "blocks": blocks,
        "hypers": hypers,
        "scalars": scalars,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "max_exp_avg_sq": max_exp_avg_sq,
        "master": master,
    }
    _refuse(kind, given, exp_avg, num_blocks)
    kernel = _body().adamw_chunk
    if num_blocks > 0:
        with torch.cuda.device_of(exp_avg):
            kernel[(num_blocks,)](**given, num_rows=len(rows), **_constants(kind), **_options(kind))


def _constants(kind: Kind) -> dict[str, bool | int]:
    """What the kernel is compiled with."""
    return {
        "PARAM_BF16": kind.param_dtype == DtypeCode.BF16,
        "GRAD_BF16": kind.grad_dtype == DtypeCode.BF16,
        "MOMENT_BF16": kind.moment_dtype == DtypeCode.BF16,
        "MASTER": int(kind.master_kind),
        "AMSGRAD": kind.amsgrad,
        "HAS_OUT": kind.has_out,
        "ALIGNED": kind.aligned,
        "BLOCK": BLOCK,
    }


def _options(kind: Kind) -> dict[str, bool | int]:
    """How the kernel is compiled.

    A thread has as many consecutive elements as fill 128 bits of the widest stream, so that all streams of a kind have
    one layout: four where something is fp32, and eight where everything is of 16 bits. It may have as many registers as
    leave room for 4,096 elements on a multiprocessor; left alone, ptxas makes room for more and spills in some kinds.
    """
    dtypes = (kind.param_dtype, kind.grad_dtype, kind.moment_dtype)
    narrow = DtypeCode.FP32 not in dtypes and kind.master_kind != MasterKind.FP32
    return {
        "num_warps": BLOCK // _WARP_THREADS // (8 if narrow else 4),
        "maxnreg": 128 if narrow else 64,
        "enable_fp_fusion": False,
    }


def _body() -> Any:
    """The module with the kernel, as whatever triton makes of it."""
    try:
        return importlib.import_module(_BODY)
    except ImportError as error:
        raise ImportError(
            f"SwapAdamW steps parameters on a GPU with a Triton kernel, and triton cannot be imported ({error}); "
            "install it: pip install 'shardopt[triton]'"
        ) from error


def _refuse(kind: Kind, given: dict[str, Tensor | None], slot: Tensor, num_blocks: int) -> None:
    """Raise what is wrong with the arguments of a launch, if anything."""
    moment, slot_shape = _DTYPES[kind.moment_dtype], (slot.numel(),)
    asked: dict[str, tuple[torch.dtype | None, tuple[int | None, ...]]] = {
        "rows": (torch.int64, (None, len(ROW_FIELDS))),
        "blocks": (torch.int32, (None, 2)),
        "hypers": (torch.float32, (None, len(DEVICE_HYPER))),
        "scalars": (torch.float32, (2,)),
        "exp_avg": (moment, slot_shape),
        "exp_avg_sq": (moment, slot_shape),
        "max_exp_avg_sq": (moment if kind.amsgrad else None, slot_shape),
        "master": (_MASTERS.get(kind.master_kind), slot_shape),
    }
    problems = [
        problem
        for name, (dtype, shape) in asked.items()
        if (problem := _problem(name, given[name], dtype, shape, slot.device)) is not None
    ]
    if kind.aligned:
        problems += [
            f"{name} is at address {tensor.data_ptr()}; for an aligned kind it must be a multiple of {ALIGNED_BYTES}"
            for name in _SLOT
            if (tensor := given[name]) is not None and tensor.data_ptr() % ALIGNED_BYTES
        ]
    rows, blocks = given["rows"], given["blocks"]
    if rows is not None and blocks is not None and len(rows) != len(blocks):
        problems.append(f"blocks has {len(blocks)} rows; it must have as many as rows, {len(rows)}")
    if num_blocks < 0 or (num_blocks and rows is not None and len(rows) == 0):
        problems.append(f"num_blocks is {num_blocks}; it must be that of the rows")
    if problems:
        raise ValueError(f"nothing was launched for {kind}:\n  " + "\n  ".join(problems))


def _problem(
    name: str, tensor: Tensor | None, dtype: torch.dtype | None, shape: tuple[int | None, ...], device: torch.device
) -> str | None:
    """What is wrong with a tensor, if anything; without a ``dtype`` there must be none, None in ``shape`` is any."""
    if dtype is None:
        return None if tensor is None else f"{name} is a tensor of {tensor.dtype}; for this kind it must be None"
    if tensor is None:
        return f"{name} is None; it must be a tensor of {dtype}"
    fits = tensor.dim() == len(shape) and all(
        want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    )
    if fits and tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device:
        return None
    told = " x ".join("any" if want is None else str(want) for want in shape)
    return (
        f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}; "
        f"it must be {dtype}, contiguous, of shape {told}, on {device}"
    )
