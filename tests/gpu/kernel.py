"""The kernel against the host's: the same rows in device memory and in host memory, with numbers of all sorts."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardopt.swap.device_rows import ALIGNED_ELEMENTS, BLOCK, Kind, device_scalars
from shardopt.swap.held import MASTER, MAX, MOMENTS, REMAINDER
from shardopt.swap.host_kernel import adamw_rows
from shardopt.swap.kernel_rows import HYPER, ROW, DtypeCode, MasterKind, Table, adamw_hyper
from shardopt.swap.launches import Stretch
from tests.gpu.checks import Figure, check
from tests.gpu.target import CudaTarget, Target, same_bits

# One element, less than an access of 128 bits, a block and its neighbours, several blocks and a rest.
_LENGTHS = (1, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 5003, 40_000)
_SEED = 0x1234_5678_9ABC_DEF0
_SCALE = 1 / 512
_MOST_WORKERS = 12
_DTYPES = {DtypeCode.FP32: torch.float32, DtypeCode.BF16: torch.bfloat16}
_CODES = tuple(_DTYPES)
_ODD = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e-39, 1e-45, 3e38, -1e-30])


def kinds() -> list[Kind]:
    """All that a launch may be of."""
    found = []
    for param, grad, moment, amsgrad, aligned in itertools.product(
        _CODES, _CODES, _CODES, (False, True), (False, True)
    ):
        extras = [(MasterKind.NONE, False)]
        if param == DtypeCode.BF16:
            extras += [(MasterKind.FP32, False), (MasterKind.REMAINDER16, False)]
        else:
            extras += [(MasterKind.NONE, True)]
        found += [
            Kind(
                param_dtype=param,
                grad_dtype=grad,
                moment_dtype=moment,
                master_kind=master,
                amsgrad=amsgrad,
                has_out=has_out,
                aligned=aligned,
            )
            for master, has_out in extras
        ]
    return found


@dataclass(frozen=True)
class Rows:
    """Memory of each field of rows, from ``places`` on; all rows are of one kind."""

    memory: dict[str, Tensor]
    places: np.ndarray
    lengths: np.ndarray

    def on(self, device: torch.device) -> Rows:
        """A copy of it elsewhere."""
        moved = {name: one.to(device, copy=True) for name, one in self.memory.items()}
        return Rows(moved, self.places, self.lengths)

    def table(self, kind: Kind) -> Table:
        """Rows of this memory."""
        rows = np.zeros(len(self.lengths), ROW)
        for name, one in self.memory.items():
            rows[name] = one.data_ptr() + self.places * one.element_size()
        rows["numel"] = self.lengths
        # Runs of 96 elements, one out of two columns of blocks: as of a shard of a matrix.
        rows["index_start"], rows["index_run"], rows["index_stride"] = np.arange(len(rows)) * 1_000_003, 96, 192
        rows["stream"] = np.arange(len(rows)) + 5
        rows["hyper"] = np.arange(len(rows)) % 2
        rows["param_dtype"], rows["grad_dtype"] = kind.param_dtype, kind.grad_dtype
        rows["moment_dtype"], rows["master_kind"] = kind.moment_dtype, kind.master_kind
        return rows


def made(kind: Kind, lengths: tuple[int, ...], *, odd: bool) -> Rows:
    """Random memory, between the rows too; ``odd`` puts zeros, infinities, NaNs and denormals in."""
    numels = np.array(lengths)
    shift = 0 if kind.aligned else 3
    room = -(-(numels + ALIGNED_ELEMENTS) // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
    places, total = np.cumsum(room) - room + shift, int(room.sum()) + 2 * ALIGNED_ELEMENTS
    generator = torch.Generator().manual_seed(total + shift)

    def drawn(size: float, dtype: torch.dtype) -> Tensor:
        values = torch.randn(total, generator=generator) * size
        if odd:
            where = torch.randint(0, 10, (total,), generator=generator) == 0
            values = torch.where(where, _ODD[torch.randint(0, len(_ODD), (total,), generator=generator)], values)
        return values.to(dtype)

    moment = _DTYPES[kind.moment_dtype]
    memory = {
        "param": drawn(0.1, _DTYPES[kind.param_dtype]),
        "grad": drawn(4.0, _DTYPES[kind.grad_dtype]),
        "exp_avg": drawn(0.01, moment),
        "exp_avg_sq": drawn(1e-4, moment).abs(),
    }
    if kind.amsgrad:
        memory[MAX] = drawn(1e-4, moment).abs()
    if kind.has_out:
        memory["out"] = drawn(1.0, torch.bfloat16)
    if kind.master_kind == MasterKind.FP32:
        memory["master"] = memory["param"].float() * (1 + 2**-12)
    if kind.master_kind == MasterKind.REMAINDER16:
        memory["master"] = torch.randint(-(1 << 15), 1 << 15, (total,), generator=generator).to(torch.int16)
    return Rows(memory, places, numels)


def hypers() -> Table:
    """Two groups at different steps, one of which goes up."""
    one = adamw_hyper(lr=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7)
    two = adamw_hyper(lr=0.5, beta1=0.3, beta2=0.9, eps=1e-3, weight_decay=0.0, step=1 << 33, maximize=True)
    return np.array([one, two], HYPER)


def launch(target: Target, kind: Kind, rows: Rows, *, skip: bool = False) -> None:
    """Steps the rows where they are, on the device."""
    kernel = target.kernel()
    numbers = rows.lengths
    blocks = int((-(-numbers // BLOCK)).sum())
    stretch = Stretch(kind, 0, len(numbers), 0, blocks, [rows.memory["param"]], [rows.memory["grad"]])
    tables = kernel.tables(rows.table(kind), rows.places, [stretch], hypers(), _SEED)
    there = [_sent(table, target.device) for table in [*tables, device_scalars(_SCALE, skip=skip)]]
    named = {name: rows.memory[name] for name in (*MOMENTS, MAX) if name in rows.memory}
    if "master" in rows.memory:
        named[MASTER if kind.master_kind == MasterKind.FP32 else REMAINDER] = rows.memory["master"]
    kernel.launch("rows", [stretch], there[:-1], there[-1], named).run()
    target.finish()


def _sent(table: np.ndarray, device: torch.device) -> Tensor:
    flat = table.reshape(-1).view(np.uint8) if table.dtype.names is not None else table
    return torch.from_numpy(np.ascontiguousarray(flat)).to(device)


def compare(target: Target, kind: Kind, lengths: tuple[int, ...], *, odd: bool) -> None:
    """Steps the same rows here and there; all of the memory must be alike afterwards."""
    here = made(kind, lengths, odd=odd)
    there = here.on(target.device)
    launch(target, kind, there)
    adamw_rows(here.table(kind), hypers(), seed=_SEED, grad_scale=_SCALE)
    wrong = [name for name, one in here.memory.items() if not same_bits(one, there.memory[name])]
    assert not wrong, f"{kind}: {wrong} differ from the host kernel's"


def try_kind(kind: Kind, target: Target) -> None:
    """All that is tried with each kind."""
    compare(target, kind, _LENGTHS, odd=False)
    compare(target, kind, _LENGTHS, odd=True)
    rows = made(kind, _LENGTHS, odd=False)
    there = rows.on(target.device)
    launch(target, kind, there, skip=True)
    wrong = [name for name, one in rows.memory.items() if not same_bits(one, there.memory[name])]
    assert not wrong, f"{kind}: a launch that was to be skipped has changed {wrong}"


def _try_on_gpu(found: Sequence[Kind]) -> None:
    target = CudaTarget()
    for kind in found:
        try_kind(kind, target)


@check("kernel: the host kernel's bits, of all kinds, with odd numbers, and none when skipped")
def every_kind(target: Target) -> Figure:
    found = kinds()
    if target.is_dry:
        # Those of the host kernel have tests of their own.
        found = found[::23]
        for kind in found:
            try_kind(kind, target)
        return {"kinds": len(found), "processes": 1}
    # Each is compiled, for a second or two.
    workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_try_on_gpu, [found[start::workers] for start in range(workers)]):
            pass
    return {"kinds": len(found), "processes": workers}


@check("kernel: the host kernel's bits, a large chunk")
def large_chunk(target: Target) -> Figure:
    numel = (1 << 16 if target.is_dry else 1 << 23) + 13
    for moment in _CODES:
        kind = Kind(param_dtype=DtypeCode.FP32, grad_dtype=DtypeCode.FP32, moment_dtype=moment, aligned=True)
        compare(target, kind, (numel,), odd=False)
    return {"elements": 2 * numel}
