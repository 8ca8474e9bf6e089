"""State of parameters on a device: host memory in chunks, and the rows of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardopt.swap.chunks import CHUNK_ROW, Part, cut_chunks, plan_layout
from shardopt.swap.device_rows import BLOCK
from shardopt.swap.held import MASTER, MOMENTS, Held, Keeps
from shardopt.swap.kernel_rows import ROW, DtypeCode, MasterKind, Table
from shardopt.swap.ring import Entries
from shardopt.swap.slabs import Slabs

__all__ = ["DeviceState"]

# What the rows of a chunk have in common: the parameter's dtype, and its entries with theirs.
_KindKey: TypeAlias = tuple[torch.dtype, tuple[tuple[str, torch.dtype], ...]]


class DeviceState:
    """All chunks of an optimizer.

    Attributes:
        members: the parameters, in the order in which they were added.
        chunks: their memory on the host.
        rows: [num_rows], CHUNK_ROW, of all chunks in their order; ``param`` counts ``members``.
        chunk_of: [num_rows], which chunk each is in.
        num_blocks: of all rows, each in blocks of its own.
    """

    def __init__(self) -> None:
        self.members: list[Held] = []
        self.chunks: list[Entries] = []
        self.rows: NDArray[np.void] = np.zeros(0, CHUNK_ROW)
        self.chunk_of: NDArray[np.int64] = np.zeros(0, np.int64)

    def grown(
        self, new: Sequence[Held], amsgrad: Sequence[bool], keeps: Keeps, slabs: Slabs, *, chunk_bytes: int
    ) -> DeviceState:
        """The same and new parameters, whose memory is made in one slab of its own: zeros that nobody has touched.

        Args:
            new: without pieces; gets them.
            amsgrad: whether each keeps maxima.
            keeps: what is kept.
            slabs: makes the memory.
            chunk_bytes: of one chunk, at most.

        Raises:
            ValueError: ``chunk_bytes`` is too small.
            MemoryError: there is not that much.
        """
        keys: list[_KindKey] = [
            (one.shard.dtype, tuple(keeps.entries(one.shard.dtype, amsgrad=flag).items()))
            for one, flag in zip(new, amsgrad, strict=True)
        ]
        layout = plan_layout(keys, [one.shard.numel() for one in new])
        lengths = cast("dict[_KindKey, int]", layout.lengths)
        cut = cut_chunks(
            [Part(key, one.spans) for key, one in zip(keys, new, strict=True)],
            layout,
            element_bytes={key: sum(dtype.itemsize for _, dtype in key[1]) for key in lengths},
            chunk_bytes=chunk_bytes,
            block=BLOCK,
        )
        # Wide entries first, or gaps appear between tiny ones.
        wanted = sorted(
            ((key, name, dtype) for key in lengths for name, dtype in key[1]), key=lambda one: -one[2].itemsize
        )
        regions = slabs.regions([(lengths[key], dtype) for key, _, dtype in wanted])
        memory = {(key, name): region for (key, name, _), region in zip(wanted, regions, strict=True)}
        for one, key, start in zip(new, keys, layout.starts, strict=True):
            one.take({name: memory[key, name].part(start, one.shard.numel()) for name, _ in key[1]})
        made = DeviceState()
        made.members = [*self.members, *new]
        made.chunks = list(self.chunks)
        rows, places = [self.rows], [self.chunk_of]
        for chunk in cut:
            key = cast("_KindKey", chunk.kind)
            places.append(np.full(len(chunk.rows), len(made.chunks)))
            rows.append(chunk.rows.copy())
            rows[-1]["param"] += len(self.members)
            made.chunks.append(
                {name: memory[key, name].part(chunk.start, chunk.end - chunk.start) for name, _ in key[1]}
            )
        made.rows, made.chunk_of = np.concatenate(rows), np.concatenate(places)
        return made

    def cut(self, num_members: int) -> DeviceState:
        """The same without the parameters that were added after the first ``num_members``."""
        made = DeviceState()
        made.members = self.members[:num_members]
        keeps = self.rows["param"] < num_members
        made.rows, made.chunk_of = self.rows[keeps], self.chunk_of[keeps]
        # Parameters that were added together have chunks of their own.
        made.chunks = self.chunks[: int(made.chunk_of.max(initial=-1)) + 1]
        return made

    def table(self) -> Table:
        """Rows as the kernels take them, but for what a step says; of moments and masters there are no addresses."""
        rows, members = np.zeros(len(self.rows), ROW), self.members
        owner = self.rows["param"]
        shards = [one.shard for one in members]
        rows["param"] = _of(shards, Tensor.data_ptr)[owner] + self.rows["param_offset"] * _of(shards, _width)[owner]
        for name in ("numel", "index_start", "index_run", "index_stride"):
            rows[name] = self.rows[name]
        rows["stream"] = np.array([one.stream for one in members], np.uint64)[owner]
        rows["param_dtype"] = _of(shards, _code)[owner]
        rows["moment_dtype"] = _of([one.pieces[MOMENTS[0]] for one in members], _code)[owner]
        rows["master_kind"] = np.array([_master_kind(one) for one in members], np.int8)[owner]
        return rows


def _of(tensors: Sequence[Tensor], what: object) -> NDArray[np.int64]:
    assert callable(what)
    return np.array([what(tensor) for tensor in tensors], np.int64)


def _width(tensor: Tensor) -> int:
    return tensor.element_size()


def _code(tensor: Tensor) -> DtypeCode:
    return DtypeCode.FP32 if tensor.dtype == torch.float32 else DtypeCode.BF16


def _master_kind(held: Held) -> MasterKind:
    if held.master is None:
        return MasterKind.NONE
    return MasterKind.FP32 if MASTER in held.pieces else MasterKind.REMAINDER16
