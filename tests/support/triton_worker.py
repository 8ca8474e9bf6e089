"""Processes in which the Triton kernel runs without a GPU: one interprets it, one compiles it.

Triton reads TRITON_INTERPRET when it decorates a function, so one process cannot do both, and whatever it changes there
(numpy's error state, the active driver) stays away from other tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardopt.swap.device_rows import (
    BLOCK,
    DEVICE_HYPER,
    ROW_FIELDS,
    DeviceTable,
    Kind,
    as_int64,
    device_blocks,
    device_hypers,
    device_rows,
    device_scalars,
    is_aligned,
)
from shardopt.swap.kernel_rows import DtypeCode, MasterKind, Table
from shardopt.swap.triton_kernel import launch_adamw
from tests.support.device_chunks import SLOT, Chunk, bits_of
from tests.support.exact_fma import fused

_STOP_S = 10.0
_WARPS = 32
_MOMENTS = {DtypeCode.FP32: torch.float32, DtypeCode.BF16: torch.bfloat16}
_MASTERS = {MasterKind.NONE: None, MasterKind.FP32: torch.float32, MasterKind.REMAINDER16: torch.int16}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch.

    Attributes:
        chunk: what it steps; whatever else it changes is an error.
        hypers: what the rows point to.
        seed: of random bits.
        grad_scale: factor of all gradients.
        skip: what the launch reads as such.
        blocks_before: how many blocks before its memory each row is said to begin, of which none is launched.
    """

    chunk: Chunk
    hypers: Table
    seed: int = 3
    grad_scale: float = 1.0
    skip: float = 0.0
    blocks_before: int = 0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a launch of one kind is compiled to.

    Attributes:
        ptx: for ptxas.
        cubin: machine code.
        num_warps: of a program.
        enable_fp_fusion: whether the compilers may make fused multiply-adds of their own.
        assumed: what is taken for granted about the arguments; other arguments would be another compilation.
    """

    ptx: str
    cubin: bytes
    num_warps: int
    enable_fp_fusion: bool
    assumed: dict[object, object]


class Worker:
    """A process that runs one function over what it is sent; made when it has imported what that needs."""

    def __init__(self, serve: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, *args), daemon=True)
        self._process.start()
        there.close()
        self._receive()

    def ask(self, request: object) -> Any:
        """The function's result; whatever it raised, with its stack, as an AssertionError."""
        self._here.send(request)
        return self._receive()

    def _receive(self) -> Any:
        try:
            done, result = self._here.recv()
        except EOFError:
            self._process.join(_STOP_S)
            raise AssertionError(f"the worker died with exit code {self._process.exitcode}") from None
        assert done, result
        return result

    def close(self) -> None:
        self._here.close()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def interpreter() -> Iterator[Callable[[Step], tuple[Chunk, Kind]]]:
    """Runs steps in Triton's interpreter: the chunk afterwards, and the kind it was launched as."""
    worker = Worker(_interpret)
    try:
        yield worker.ask
    finally:
        worker.close()


@contextlib.contextmanager
def compiler(cache: Path) -> Iterator[Callable[[tuple[Kind, int]], Compiled]]:
    """Compiles what a launch of a kind would, for a compute capability times ten; ``cache`` is an empty folder."""
    worker = Worker(_compile, cache)
    try:
        yield worker.ask
    finally:
        worker.close()


def _serve(connection: Connection, work: Callable[[Any], object]) -> None:
    connection.send((True, "ready"))
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            try:
                answer = (True, work(request))
            except Exception:  # whatever it is, the test that asked is to fail with it
                answer = (False, traceback.format_exc())
            connection.send(answer)


def _interpret(connection: Connection) -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter as interpreted

    def create_fma(_: object, x: Any, y: Any, z: Any) -> Any:
        assert x.data.dtype == y.data.dtype == z.data.dtype == np.float32
        return interpreted.TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    interpreted.InterpreterBuilder.create_fma = create_fma
    np.seterr(all="ignore")
    _serve(connection, _step)


def _step(step: Step) -> tuple[Chunk, Kind]:
    chunk = step.chunk
    # Torch aligns memory to 64 bytes.
    tensors = {name: torch.from_numpy(bits.view(_signed(bits))).clone() for name, bits in chunk.tensors.items()}
    rows, offset = chunk.tables({name: tensor.data_ptr() for name, tensor in tensors.items()})
    made = device_rows(rows, offset=offset, hypers=step.hypers, seed=step.seed)
    blocks = device_blocks(rows["numel"])
    _begin_before(made, blocks, step)
    kind = chunk.kind(aligned=is_aligned(made))
    scalars = device_scalars(step.grad_scale)
    scalars[1] = step.skip
    tables = {
        "rows": as_int64(made),
        "blocks": blocks,
        "hypers": device_hypers(step.hypers),
        "scalars": scalars,
    }
    sent = {name: torch.from_numpy(table).clone() for name, table in tables.items()}
    slot = {name: tensors[name].view(chunk.like.named()[name].dtype) for name in SLOT if name in tensors}
    launch_adamw(kind, **sent, **slot, num_blocks=int((-(-rows["numel"] // BLOCK)).sum()))
    changed = [name for name, table in tables.items() if not np.array_equal(sent[name].numpy(), table, equal_nan=True)]
    assert not changed, f"the launch wrote to its tables: {changed}"
    return replace(chunk, tensors={name: bits_of(tensor) for name, tensor in tensors.items()}), kind


def _begin_before(made: DeviceTable, blocks: NDArray[np.int32], step: Step) -> None:
    elements = step.blocks_before * BLOCK
    for name in ("param", "grad", "out"):
        if name in step.chunk.tensors:
            made[name] -= elements * step.chunk.tensors[name].itemsize
    made["offset"] -= elements
    made["index_start"] -= elements
    made["numel"] += elements
    blocks[:, 1] += step.blocks_before


def _signed(bits: NDArray[np.unsignedinteger]) -> type[np.signedinteger]:
    return np.int16 if bits.itemsize == 2 else np.int32


def _compile(connection: Connection, cache: Path) -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from shardopt.swap.triton_body import adamw_chunk

    compiled: list[Any] = []
    run = adamw_chunk.run

    def warm_up(*args: object, **kwargs: object) -> None:
        # A launch up to where it needs a GPU: it binds the arguments and compiles for them.
        compiled.append(run(*args, **{**kwargs, "warmup": True}))

    adamw_chunk.run = warm_up

    def work(request: tuple[Kind, int]) -> Compiled:
        kind, capability = request
        driver.set_active(
            SimpleNamespace(
                # Kernels are kept by device.
                get_current_device=lambda: capability,
                get_current_stream=lambda device: 0,
                get_current_target=lambda: GPUTarget("cuda", capability, _WARPS),
            )
        )
        compiled.clear()
        _launch(kind)
        (kernel,) = compiled
        options = kernel.metadata
        return Compiled(
            ptx=kernel.asm["ptx"],
            cubin=kernel.asm["cubin"],
            num_warps=options.num_warps,
            enable_fp_fusion=options.enable_fp_fusion,
            assumed={place: what for place, what in kernel.src.attrs.items() if what},
        )

    _serve(connection, work)


def _launch(kind: Kind) -> None:
    """A launch of a kind over tensors whose values nobody reads."""
    empty = partial(torch.zeros, 8)
    moment, master = _MOMENTS[kind.moment_dtype], _MASTERS[kind.master_kind]
    launch_adamw(
        kind,
        rows=torch.zeros(1, len(ROW_FIELDS), dtype=torch.int64),
        blocks=torch.zeros(1, 2, dtype=torch.int32),
        hypers=torch.zeros(1, len(DEVICE_HYPER)),
        scalars=torch.zeros(2),
        exp_avg=empty(dtype=moment),
        exp_avg_sq=empty(dtype=moment),
        max_exp_avg_sq=empty(dtype=moment) if kind.amsgrad else None,
        master=None if master is None else empty(dtype=master),
        num_blocks=1,
    )
