"""The AdamW step on host memory: the typed face of the C++ kernel in ``csrc/``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardopt._host import adamw_rows as _adamw_rows
from shardopt._host import available_isas as _available_isas
from shardopt._host import sum_of_squares as _sum_of_squares
from shardopt._host import zero_moments as _zero_moments
from shardopt.swap.kernel_rows import HYPER, ROW, DtypeCode, MasterKind, Table, adamw_hyper

__all__ = [
    "HYPER",
    "ROW",
    "DtypeCode",
    "MasterKind",
    "Table",
    "adamw_hyper",
    "adamw_rows",
    "available_isas",
    "default_threads",
    "first_touch",
    "sum_of_squares",
]

_ISA_VARIABLE = "SHARDOPT_CPU_ISA"
_LOCAL_WORLD_VARIABLE = "LOCAL_WORLD_SIZE"
_SEEDS = 2**64
# An error that names a thousand rows is as hard to read as one that names none.
_MOST_PROBLEMS = 20


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

    Decoupled weight decay; bias correction in double. Gradients are multiplied by ``grad_sign * grad_scale`` as they
    are read, and never written. The moments of fp32 rows equal those of torch's for-loop AdamW bit for bit where torch
    uses AVX2 or AVX-512; the parameter is closer to exact arithmetic than torch's, for it takes weight decay and update
    as one small change.

    An element's result depends on its own inputs, on ``seed``, and on its row's hyper, stream and global index only:
    the same bits on every ISA level, with any number of threads, and however a span is cut into rows or calls (a NaN is
    NaN on all of them, its payload is not promised). Only bf16 moments draw random bits: both are rounded up or down by
    chance so that their mean is kept. ``max_exp_avg_sq`` is rounded to nearest even, and so is a bf16 parameter without
    a master, which therefore loses updates below half a unit in its last place.

    Args:
        rows: what to step. Nobody else may touch the memory until this returns, and tensors' version counters do not
            move: see ``torch.autograd.graph.increment_version``.
        hypers: what ``hyper`` of the rows points to.
        seed: of random bits, 0 to 2**64 - 1; the same at each step of a run, on each rank.
        grad_scale: factor of all gradients.
        num_threads: at most; None takes ``default_threads()``.
        isa: one of ``available_isas()``; None takes the environment's ``SHARDOPT_CPU_ISA``, or the last of them.
        names: of the rows, for errors; None counts them.

    Raises:
        TypeError: a table is not one of ``ROW`` or ``HYPER``.
        ValueError: a row is wrong (a null or misaligned address, memory shared with another one, an unknown code, an
            index of no hyper); all of them are named and nothing is written. Or a number is out of range, or the ISA
            level is unknown or this CPU cannot run it.
    """
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed is {seed!r}; it must be 0 to 2**64 - 1")
    _refuse(
        _adamw_rows(
            _bytes("rows", rows, ROW),
            _bytes("hypers", hypers, HYPER),
            seed,
            grad_scale,
            _chosen_threads(num_threads),
            _chosen_isa(isa),
        ),
        names,
    )


def sum_of_squares(
    rows: Table,  # [num_rows], ROW
    *,
    num_threads: int | None = None,
    isa: str | None = None,
    names: Sequence[str] | None = None,
) -> NDArray[np.float64]:
    """The sum of squares of each row's gradient, in double: [num_rows].

    Of a row only ``grad``, ``grad_dtype`` and ``numel`` count. The same bits on every ISA level and with any number of
    threads; not however a span is cut into rows. Arguments and errors are those of ``adamw_rows``.
    """
    sums = np.empty(len(rows), np.float64)
    threads = _chosen_threads(num_threads)
    _refuse(_sum_of_squares(_bytes("rows", rows, ROW), sums, threads, _chosen_isa(isa)), names)
    return sums


def first_touch(rows: Table, *, num_threads: int | None = None, names: Sequence[str] | None = None) -> None:
    """Fill the moments of all rows with zeros, each page by the thread that will step it.

    A table is shared among ``num_threads`` the same way each time, so this places fresh memory on the right NUMA node.
    Of a row only the moments, ``moment_dtype`` and ``numel`` count. Arguments and errors are those of ``adamw_rows``.
    """
    _refuse(_zero_moments(_bytes("rows", rows, ROW), _chosen_threads(num_threads)), names)


def _bytes(name: str, table: Table, dtype: np.dtype[np.void]) -> NDArray[np.uint8]:
    """The table, checked, in the form that the kernel's binding takes."""
    if not isinstance(table, np.ndarray) or table.dtype != dtype:
        kind = f"an array of {table.dtype}" if isinstance(table, np.ndarray) else f"a {type(table).__qualname__}"
        raise TypeError(f"{name} is {kind}; pass a numpy array of the dtype of this table")
    if table.ndim != 1 or not table.flags.c_contiguous:
        raise ValueError(f"{name} has shape {table.shape} and strides {table.strides}; pass a contiguous 1-D array")
    return table.view(np.uint8)


def _chosen_threads(num_threads: int | None) -> int:
    if num_threads is None:
        return default_threads()
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads!r}; it must be at least 1")
    return num_threads


def _chosen_isa(isa: str | None) -> str:
    if isa is not None:
        return isa
    # Read at each call: importing shardopt reads no environment.
    forced = os.environ.get(_ISA_VARIABLE, "")
    if forced and forced not in available_isas():
        known = ", ".join(available_isas())
        raise ValueError(f"{_ISA_VARIABLE}={forced!r} is not a level this CPU can run; set one of {known}, or unset it")
    return forced


def _refuse(problems: list[tuple[int, str]], names: Sequence[str] | None) -> None:
    """Raise what the kernel found wrong, if anything, with the rows' names."""
    if not problems:
        return

    def name(row: int) -> str:
        return f"row {row}" if names is None else names[row]

    told = [
        f"{name(row)}: " + re.sub(r"<(\d+)>", lambda other: name(int(other[1])), text)
        for row, text in problems[:_MOST_PROBLEMS]
    ]
    if len(problems) > _MOST_PROBLEMS:
        told.append(f"and {len(problems) - _MOST_PROBLEMS} more")
    raise ValueError("nothing was written; the table of rows is wrong:\n  " + "\n  ".join(told))
