"""Tables of the GPU kernel: what a launch over one chunk of the state reads besides the chunk itself.

A chunk is a contiguous range of elements of an optimizer's state memory whose rows are all of one kind. In device
memory it lies in a slot, which has a tensor for each entry (the moments, a master); the rows say which elements of the
slot belong to which elements of which parameter. They are built on the host with numpy and copied to the device as
they are: rows as int64, blocks as int32, hypers and scalars as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardopt.swap.kernel_rows import DtypeCode, MasterKind, Table

__all__ = [
    "ALIGNED_BYTES",
    "ALIGNED_ELEMENTS",
    "BLOCK",
    "DEVICE_HYPER",
    "DEVICE_ROW",
    "ROW_FIELDS",
    "DeviceTable",
    "Kind",
    "as_int64",
    "device_blocks",
    "device_hypers",
    "device_rows",
    "device_scalars",
    "is_aligned",
    "random_keys",
]

# Elements that one program of a launch steps.
BLOCK = 1024
# Of every address and of every offset into a slot, for accesses of 128 bits: eight bf16 or twice four fp32.
ALIGNED_BYTES = 16
ALIGNED_ELEMENTS = 8

# One row for each contiguous span of elements in a chunk, of 8-byte fields only. Addresses are the device's, 0 is none.
DEVICE_ROW = np.dtype(
    [
        ("param", np.int64),
        ("grad", np.int64),  # read only
        ("out", np.int64),  # 0: none; else gets a copy in bf16 of an fp32 parameter
        ("offset", np.int64),  # of the first element, in elements from where each tensor of the slot begins
        ("numel", np.int64),
        ("index_start", np.int64),  # these three as in kernel_rows.ROW
        ("index_run", np.int64),
        ("index_stride", np.int64),
        ("key", np.uint64),  # these two as random_keys returns them; 0 unless the moments are bf16
        ("upper", np.uint64),
        ("hyper", np.int64),  # row of the matrix of DEVICE_HYPER
    ]
)
# Columns of the matrix of int64 that the kernel reads rows as.
ROW_FIELDS = DEVICE_ROW.names or ()
# Columns of the matrix of float32 that rows point into: those of kernel_rows.HYPER, each rounded once.
DEVICE_HYPER = (
    "decay",
    "grad_weight",
    "beta2",
    "square_weight",
    "step_size",
    "bias_correction",
    "eps",
    "grad_sign",
)

# A one-dimensional array of DEVICE_ROW.
DeviceTable: TypeAlias = NDArray[np.void]

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is the same for all rows of a chunk; the GPU kernel is compiled once for each.

    Attributes:
        param_dtype: of the parameters.
        grad_dtype: of the gradients.
        moment_dtype: of the two moments and of their maximum.
        master_kind: what stands behind a bf16 parameter.
        amsgrad: whether there is a maximum of the second moment.
        has_out: whether every fp32 parameter has a copy in bf16 to write.
        aligned: whether ``is_aligned`` holds for the rows; only then are memory accesses 128 bits wide.

    Raises:
        ValueError: a master of a parameter that is not bf16, or a copy of one that is not fp32.
    """

    param_dtype: DtypeCode
    grad_dtype: DtypeCode
    moment_dtype: DtypeCode
    master_kind: MasterKind = MasterKind.NONE
    amsgrad: bool = False
    has_out: bool = False
    aligned: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.master_kind != MasterKind.NONE and self.param_dtype != DtypeCode.BF16:
            problems.append(f"master_kind is {self.master_kind.name}, but param_dtype is {self.param_dtype.name}")
        if self.has_out and self.param_dtype != DtypeCode.FP32:
            problems.append(f"has_out is set, but param_dtype is {self.param_dtype.name}")
        if problems:
            raise ValueError("; ".join(problems) + ": only bf16 parameters have a master, only fp32 ones a copy")


def device_rows(
    rows: Table,  # [num_rows], ROW
    *,
    offset: NDArray[np.int64],  # [num_rows], elements from the slot's start
    hypers: Table,  # [num_hypers], HYPER
    seed: int,
) -> DeviceTable:
    """The rows of one chunk, from those that the host kernel would take.

    Of ``rows`` the addresses of moments and masters do not count: in the slot they are at ``offset``.

    Args:
        rows: of one kind, with device addresses, none without elements.
        offset: where each row begins in the slot.
        hypers: what ``hyper`` of the rows points to; random bits depend on their ``step``.
        seed: of random bits, 0 to 2**64 - 1, as the host kernel's.
    """
    made = np.zeros(len(rows), DEVICE_ROW)
    for name in ("param", "grad", "out", "numel", "index_start", "index_run", "index_stride", "hyper"):
        made[name] = rows[name]
    made["offset"] = offset
    if len(rows) and rows["moment_dtype"][0] == DtypeCode.BF16:
        steps = hypers["step"][rows["hyper"]]
        made["key"], made["upper"] = random_keys(seed, rows["stream"], steps)
    return made


def random_keys(
    seed: int,
    streams: NDArray[np.uint64],  # [num_rows]
    steps: NDArray[np.int64],  # [num_rows]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """What random words are drawn with, worked out once for each row: two words in each number, the first one lowest.

    Philox-4x32-10, keyed by the seed, turns (stream, step) into a key and an upper half of the counter, as ``Key`` of
    csrc/words_body.h does.

    Returns:
        The keys and the upper halves, each [num_rows].
    """
    a, b = streams & _WORD, streams >> _HALF
    unsigned = steps.astype(np.uint64)
    c, d = unsigned & _WORD, unsigned >> _HALF
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        # Factors of 32 bits: the products fit 64.
        from_a, from_c = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (from_c >> _HALF) ^ b ^ np.uint64(key0), from_c & _WORD
        c, d = (from_a >> _HALF) ^ d ^ np.uint64(key1), from_a & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return b << _HALF | a, d << _HALF | c


def as_int64(rows: DeviceTable) -> NDArray[np.int64]:
    """The same memory as the matrix that the kernel reads: [num_rows, number of fields]."""
    return rows.view(np.int64).reshape(len(rows), len(ROW_FIELDS))


def device_hypers(hypers: Table) -> NDArray[np.float32]:
    """``HYPER`` as the kernel reads it: [num_hypers, 8], each number rounded to float once, as on the host."""
    made = np.empty((len(hypers), len(DEVICE_HYPER)), np.float32)
    # Beyond float's range is infinity, as in C++.
    with np.errstate(over="ignore"):
        for column, name in enumerate(DEVICE_HYPER):
            made[:, column] = hypers[name]
    return made


def device_blocks(numel: NDArray[np.int64]) -> NDArray[np.int32]:  # [num_rows] -> [num_rows, 2]
    """Where a launch's programs find their row: (programs of the rows before it, its own first block), in order.

    A program looks its row up, so that the table grows with the rows and not with their elements.
    """
    counts = -(-numel // BLOCK)
    before = np.cumsum(counts) - counts
    return np.stack([before, np.zeros_like(before)], axis=1).astype(np.int32)


def device_scalars(grad_scale: float, *, skip: bool = False) -> NDArray[np.float32]:
    """What all rows share: [2], the factor of all gradients and whether the launch is to change nothing.

    The factor is rounded once; as a sign of 1 or -1 is then exact, the product is what the host kernel works out.
    """
    with np.errstate(over="ignore"):
        return np.array([grad_scale, skip], np.float32)


def is_aligned(rows: DeviceTable) -> bool:
    """Whether every row begins where an access of 128 bits may, in its parameter's memory and in the slot's."""
    addresses = rows["param"] | rows["grad"] | rows["out"]
    return not (addresses % ALIGNED_BYTES).any() and not (rows["offset"] % ALIGNED_ELEMENTS).any()
