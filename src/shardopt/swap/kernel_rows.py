"""Tables of the host kernel: a row for each flat span of elements, and the numbers a step multiplies with."""

from __future__ import annotations

import enum
import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["HYPER", "ROW", "DtypeCode", "MasterKind", "Table", "adamw_hyper"]


class DtypeCode(enum.IntEnum):
    """Element types that the kernel reads and writes."""

    FP32 = 0
    BF16 = 1


class MasterKind(enum.IntEnum):
    """What stands behind a bf16 parameter, if anything.

    ``FP32``: the value itself; the parameter is its rounding to nearest even, and is only written.
    ``REMAINDER16``: what is missing of the value, an int16: ``value bits = (parameter bits << 16) + remainder``. The
    parameter is the value rounded to nearest, ties away from zero, so that every remainder fits and restores the value
    exactly (rounding ties to even would not).
    """

    NONE = 0
    FP32 = 1
    REMAINDER16 = 2


# One row for each contiguous span of elements; csrc/rows.h has the same struct. Addresses point to the first element.
ROW = np.dtype(
    [
        ("param", np.int64),
        ("grad", np.int64),  # read only
        ("exp_avg", np.int64),
        ("exp_avg_sq", np.int64),
        ("max_exp_avg_sq", np.int64),  # 0: no amsgrad
        ("master", np.int64),  # 0: none; else of the kind that master_kind says
        ("out", np.int64),  # 0: none; else gets a copy in bf16 of an fp32 parameter
        ("numel", np.int64),  # of a span; 0: the row is skipped, whatever else it says
        # Element i of the span is element index_start + i // index_run * index_stride + i % index_run of the unsharded
        # tensor, row-major. Random bits depend on it, and nothing else does.
        ("index_start", np.int64),
        ("index_run", np.int64),
        ("index_stride", np.int64),
        ("stream", np.uint64),  # tells parameters apart for random bits; must not depend on the topology
        ("hyper", np.int64),  # row of the table of HYPER
        ("param_dtype", np.int8),  # DtypeCode
        ("grad_dtype", np.int8),  # DtypeCode
        ("moment_dtype", np.int8),  # DtypeCode, of all moments
        ("master_kind", np.int8),  # MasterKind
    ],
    align=True,
)

# Numbers that many spans share. They are worked out in double; the kernel rounds each to float once.
HYPER = np.dtype(
    [
        ("decay", np.float64),  # lr * weight_decay
        ("grad_weight", np.float64),  # 1 - beta1
        ("beta2", np.float64),
        ("square_weight", np.float64),  # 1 - beta2
        ("step_size", np.float64),  # lr / (1 - beta1**step)
        ("bias_correction", np.float64),  # sqrt(1 - beta2**step)
        ("eps", np.float64),
        ("grad_sign", np.float64),  # 1, or -1 to maximize
        ("step", np.int64),  # counted from 1
    ],
    align=True,
)

# A one-dimensional, contiguous array of ROW or of HYPER.
Table: TypeAlias = NDArray[np.void]


def adamw_hyper(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, maximize: bool = False
) -> tuple[float, ...]:
    """One row of ``HYPER``, from what torch's AdamW is made with and the number of this step, counted from 1.

    Raises:
        ValueError: numbers are out of range; all of them are named.
    """
    problems = [
        f"{name} is {value!r}; it must be finite and at least 0"
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay))
        if not 0.0 <= value < math.inf
    ]
    problems += [
        f"{name} is {value!r}; it must be in [0, 1)"
        for name, value in (("beta1", beta1), ("beta2", beta2))
        if not 0.0 <= value < 1.0
    ]
    if step < 1:
        problems.append(f"step is {step!r}; steps are counted from 1")
    if problems:
        raise ValueError("; ".join(problems))
    return (
        lr * weight_decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / (1.0 - beta1**step),
        math.sqrt(1.0 - beta2**step),
        eps,
        -1.0 if maximize else 1.0,
        step,
    )
