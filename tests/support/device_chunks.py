"""Chunks of the state as the GPU kernel takes them: parameters in memory, state in a slot, other values in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardopt.swap.device_rows import ALIGNED_ELEMENTS, Kind
from shardopt.swap.host_kernel import adamw_rows
from shardopt.swap.kernel_rows import ROW, DtypeCode, MasterKind, Table
from tests.support.host_rows import Buffers, rows_of

SLOT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
_BITS = {2: np.uint16, 4: np.uint32}
# What lies between rows: whoever writes there is seen.
_FILLER = 0x5A


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows of one kind.

    Attributes:
        tensors: by name, the bits of the memory of parameters, gradients and copies, and of the slot's tensors.
        places: by name, where each row begins in it, in elements.
        rows: what the rows are besides addresses.
        like: one of the rows' buffers, for dtypes.
    """

    tensors: dict[str, NDArray[np.unsignedinteger]]
    places: dict[str, NDArray[np.int64]]
    rows: Table
    like: Buffers

    def kind(self, *, aligned: bool) -> Kind:
        first = self.rows[0]
        return Kind(
            param_dtype=DtypeCode(int(first["param_dtype"])),
            grad_dtype=DtypeCode(int(first["grad_dtype"])),
            moment_dtype=DtypeCode(int(first["moment_dtype"])),
            master_kind=MasterKind(int(first["master_kind"])),
            amsgrad="max_exp_avg_sq" in self.tensors,
            has_out="out" in self.tensors,
            aligned=aligned,
        )

    def tables(self, at: dict[str, int]) -> tuple[Table, NDArray[np.int64]]:
        """The rows with addresses, for memory that begins at ``at``, and their offsets into the slot."""
        rows = self.rows.copy()
        for name, tensor in self.tensors.items():
            if name not in SLOT:
                rows[name] = at[name] + self.places[name] * tensor.itemsize
        return rows, self.places["exp_avg"]

    def with_rows(self, buffers: Sequence[Buffers]) -> Chunk:
        """The same chunk with other values in its rows."""
        tensors = {name: tensor.copy() for name, tensor in self.tensors.items()}
        for row, one in enumerate(buffers):
            for name, values in one.named().items():
                first = int(self.places[name][row])
                tensors[name][first : first + values.numel()] = bits_of(values)
        return replace(self, tensors=tensors)

    def read(self) -> list[Buffers]:
        """The rows."""
        return [
            replace(self.like, **{name: self._values(name, row) for name in self.tensors})
            for row in range(len(self.rows))
        ]

    def _values(self, name: str, row: int) -> Tensor:
        first = int(self.places[name][row])
        bits = self.tensors[name][first : first + int(self.rows["numel"][row])]
        signed = bits.copy().view(np.int16 if bits.itemsize == 2 else np.int32)
        return torch.from_numpy(signed).view(self.like.named()[name].dtype)


def bits_of(values: Tensor) -> NDArray[np.unsignedinteger]:
    """The bits of a tensor, as numbers without a sign."""
    size = values.element_size()
    return values.view(torch.int16 if size == 2 else torch.int32).numpy().view(_BITS[size])


def chunk_of(
    buffers: Sequence[Buffers],
    *,
    shift: dict[str, int] | None = None,
    hyper: Sequence[int] | None = None,
    stream: Sequence[int] | None = None,
    index: Sequence[tuple[int, int, int]] | None = None,
) -> Chunk:
    """A chunk whose rows begin where accesses of 128 bits may, or ``shift`` elements on.

    Args:
        buffers: of one kind.
        shift: by name of memory, ``slot`` for all of the slot's tensors.
        hyper: of each row.
        stream: of each row.
        index: start, run and stride of each row's global indices; without it, all are one run from 0.
    """
    moved = shift or {}
    rows = rows_of(buffers, hyper=hyper, stream=stream)
    if index is not None:
        rows["index_start"], rows["index_run"], rows["index_stride"] = np.array(index).T
    numel = rows["numel"]
    room = -(-numel // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS + 2 * ALIGNED_ELEMENTS
    ends = np.cumsum(room)
    names = list(buffers[0].named())
    places = {name: ends - room + ALIGNED_ELEMENTS + moved.get("slot" if name in SLOT else name, 0) for name in names}
    tensors = {}
    for name, tensor in buffers[0].named().items():
        filler = np.full((int(ends[-1]) + ALIGNED_ELEMENTS) * tensor.element_size(), _FILLER, np.uint8)
        tensors[name] = filler.view(_BITS[tensor.element_size()])
    bare = np.array(rows, ROW)
    for name in names:
        bare[name] = 0
    return Chunk(tensors=tensors, places=places, rows=bare, like=buffers[0]).with_rows(buffers)


def stepped_on_host(chunk: Chunk, hypers: Table, *, seed: int = 3, grad_scale: float = 1.0) -> Chunk:
    """The chunk after the host kernel has stepped its rows."""
    buffers = chunk.read()
    rows = rows_of(buffers)
    for name in ("hyper", "stream", "index_start", "index_run", "index_stride"):
        rows[name] = chunk.rows[name]
    adamw_rows(rows, hypers, seed=seed, grad_scale=grad_scale)
    return chunk.with_rows(buffers)


def assert_same_chunk(got: Chunk, expected: Chunk) -> None:
    """The same bits everywhere, between the rows too; of NaNs it is enough that both are."""
    for name, one in got.tensors.items():
        other, dtype = expected.tensors[name], got.like.named()[name].dtype
        differ = one != other
        if dtype.is_floating_point:
            differ &= ~(_is_nan(one) & _is_nan(other))
        places = differ.nonzero()[0]
        assert not len(places), (
            f"{name} differs in {len(places)} of {len(one)} elements, first in {places[0]}: "
            f"{one[places[0]]:#x}, not {other[places[0]]:#x}"
        )


def _is_nan(bits: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
    magnitude, infinity = (0x7FFF, 0x7F80) if bits.itemsize == 2 else (0x7FFFFFFF, 0x7F800000)
    return (bits & magnitude) > infinity
