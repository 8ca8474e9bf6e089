"""The numbers of a step, from the groups: one row of the kernel's table for each group and count of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardopt.swap.kernel_rows import HYPER, Table, adamw_hyper

__all__ = ["Groups", "grouped_hypers", "hypers", "refuse_numbers"]

Groups = Sequence[Mapping[str, Any]]


def hypers(groups: Groups, pairs: Sequence[tuple[int, int]]) -> Table:
    """The kernel's table of numbers: for each pair of a group and a step one row.

    Raises:
        ValueError: numbers of a group are out of range; all of them are named.
    """
    table = np.zeros(len(pairs), HYPER)
    problems: list[str] = []
    for row, (index, step) in enumerate(pairs):
        group = groups[index]
        beta1, beta2 = map(float, group["betas"])
        lr, eps, decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        try:
            table[row] = adamw_hyper(
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=decay,
                step=step,
                maximize=bool(group["maximize"]),
            )
        except ValueError as error:
            problems.append(f"group {index}: {error}")
        if not group.get("decoupled_weight_decay", True):
            problems.append(f"group {index}: decoupled_weight_decay is off, which is Adam; this is AdamW")
    if problems:
        raise ValueError("\n".join(problems))
    return table


def refuse_numbers(groups: Groups) -> None:
    """Raises what ``hypers`` would at any step.

    Raises:
        ValueError: numbers of a group are out of range; all of them are named.
    """
    hypers(groups, [(index, 1) for index in range(len(groups))])


def grouped_hypers(
    group_of: NDArray[np.int64], steps: NDArray[np.int64], has: NDArray[np.bool_], groups: Groups
) -> tuple[NDArray[np.int64], Table]:
    """For each parameter the row of its numbers, and these rows; without a gradient it does not matter which."""
    # One number for each pair: few are different, and most often they are one per group.
    pairs, which = np.unique((group_of * (1 << 40) + steps)[has], return_inverse=True)
    rows = np.zeros(len(has), np.int64)
    rows[has] = which.reshape(-1)
    return rows, hypers(groups, [divmod(int(pair), 1 << 40) for pair in pairs])
