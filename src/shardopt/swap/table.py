"""The kernel's table of all parameters, made once; a step only writes what is new in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shardopt.swap.held import MASTER, MAX, MOMENTS, Held
from shardopt.swap.host_kernel import ROW, DtypeCode, MasterKind, Table

__all__ = ["StepTable"]


class StepTable:
    """Rows of all parameters' spans, in one order.

    Attributes:
        held: the parameters.
        rows: of their spans; a parameter without elements has none.
        owners: which parameter each row belongs to.
        names: of the rows, for errors.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        counts = [len(one.spans.starts) for one in held]
        self.owners: NDArray[np.int64] = np.repeat(np.arange(len(held)), counts)
        self.rows: Table = np.zeros(len(self.owners), ROW)
        self.names = [one.name for one, count in zip(held, counts, strict=True) for _ in range(count)]
        self._grad_offsets = np.zeros(len(self.owners), np.int64)
        end = 0
        for one, count in zip(held, counts, strict=True):
            self._fill(one, slice(end, end + count))
            end += count
        self._maxima = self.rows["max_exp_avg_sq"].copy()
        self._has_max = np.array([MAX in one.pieces for one in held], np.bool_)
        self._written = [_written(one) for one in held]
        self._all_written = [tensor for tensors in self._written for tensor in tensors]
        self._counters = _counters(held)

    def _fill(self, held: Held, where: slice) -> None:
        rows, spans, shard = self.rows[where], held.spans, held.shard
        item = shard.element_size()
        rows["param"] = shard.data_ptr() + spans.param_offsets * item
        for name in (*MOMENTS, MAX):
            piece = held.pieces.get(name)
            if piece is not None:
                rows[name] = piece.data_ptr() + spans.state_offsets * piece.element_size()
        if held.master is not None:
            rows["master"] = held.master.data_ptr() + spans.state_offsets * held.master.element_size()
            rows["master_kind"] = MasterKind.FP32 if MASTER in held.pieces else MasterKind.REMAINDER16
        rows["numel"] = spans.numel
        rows["index_start"], rows["index_run"], rows["index_stride"] = spans.starts, spans.run, spans.stride
        rows["stream"] = held.stream
        rows["param_dtype"] = _code(shard)
        rows["moment_dtype"] = _code(held.pieces[MOMENTS[0]])
        self._grad_offsets[where] = spans.state_offsets

    def steps(self) -> NDArray[np.int64]:
        """How many steps each parameter has made."""
        steps = np.zeros(len(self.held), np.int64)
        for memory, places, indices in self._counters:
            steps[indices] = memory[places]
        return steps

    def without_maximum(self, amsgrad: NDArray[np.bool_]) -> list[str]:
        """Names of parameters that are to use a maximum and have none."""
        return [self.held[int(index)].name for index in np.flatnonzero(amsgrad & ~self._has_max)]

    def set_gradients(
        self,
        address: NDArray[np.int64],  # [num_params]
        code: NDArray[np.int8],  # [num_params], DtypeCode
        hyper: NDArray[np.int64],  # [num_params]
        amsgrad: NDArray[np.bool_],  # [num_params]
    ) -> None:
        """Writes what differs from step to step; of parameters without a gradient it does not matter."""
        rows, owners = self.rows, self.owners
        codes = code[owners]
        rows["grad"] = address[owners] + self._grad_offsets * np.where(codes == DtypeCode.BF16, 2, 4)
        rows["grad_dtype"] = codes
        rows["hyper"] = hyper[owners]
        rows["max_exp_avg_sq"] = np.where(amsgrad[owners], self._maxima, 0)

    def chosen(self, has: NDArray[np.bool_]) -> tuple[Table, list[str]]:
        """The rows, with their names, of the parameters that have a gradient."""
        if has.all():
            return self.rows, self.names
        mask = has[self.owners]
        return self.rows[mask], list(compress(self.names, mask))

    def count(self, has: NDArray[np.bool_], number: int = 1) -> None:
        """Counts a step of the parameters that have a gradient; -1 takes it back."""
        for memory, places, indices in self._counters:
            memory[places[has[indices]]] += number

    def mark_written(self, has: NDArray[np.bool_]) -> None:
        """Moves the versions of the parameters that the step has written: autograd sees it so."""
        if has.all():
            increment_version(self._all_written)
        else:
            increment_version([one for index in np.flatnonzero(has) for one in self._written[int(index)]])


def _counters(held: Sequence[Held]) -> list[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]]:
    """The counters by the memory they lie in: that, places in it, and whose they are.

    As arrays of numpy: torch's access to one number takes longer than the step of a small tensor.
    """
    by_memory: dict[int, tuple[NDArray[np.float32], list[int], list[int]]] = {}
    for index, one in enumerate(held):
        _, places, indices = by_memory.setdefault(id(one.counters), (one.counters, [], []))
        places.append(one.place)
        indices.append(index)
    return [(memory, np.array(places), np.array(indices)) for memory, places, indices in by_memory.values()]


def _written(held: Held) -> list[Tensor]:
    """The parameter, and of a DTensor the tensor within, which counts by itself: either may be in a graph.

    State is in nobody's, and moving a counter costs cache misses: for small tensors, as much as their step.
    """
    return [held.param, held.shard] if isinstance(held.param, DTensor) else [held.param]


def _code(tensor: Tensor) -> DtypeCode:
    return DtypeCode.FP32 if tensor.dtype == torch.float32 else DtypeCode.BF16
