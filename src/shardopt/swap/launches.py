"""What one chunk's rows are stepped with: a kernel, the tables it reads, and launches that know what they touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardopt.swap.backend import Launch
from shardopt.swap.device_rows import (
    DEVICE_HYPER,
    DEVICE_ROW,
    Kind,
    as_int64,
    device_blocks,
    device_hypers,
    device_rows,
)
from shardopt.swap.held import MASTER, MAX, MOMENTS, REMAINDER
from shardopt.swap.kernel_rows import Table
from shardopt.swap.ring import Entries
from shardopt.swap.triton_kernel import launch_adamw

__all__ = ["DeviceKernel", "ScaledLaunch", "Stretch", "TritonKernel", "TritonLaunch"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of one chunk that are of one kind.

    Attributes:
        kind: of them.
        first: the first row.
        end: behind the last one.
        first_block: of ``BLOCK`` elements of the rows of the step, the first one that is of this stretch.
        end_block: behind its last one.
        params: parameters that they are of.
        grads: their gradients.
    """

    kind: Kind
    first: int
    end: int
    first_block: int
    end_block: int
    params: Sequence[Tensor]
    grads: Sequence[Tensor]


class DeviceKernel(Protocol):
    """A kernel for rows on a device."""

    def room(self, num_rows: int, num_hypers: int) -> list[int]:
        """The bytes of each table, at most, of so many rows and so many hypers."""
        ...

    def tables(
        self, rows: Table, offset: NDArray[np.int64], stretches: Sequence[Stretch], hypers: Table, seed: int
    ) -> list[NDArray[Any]]:
        """The tables of a step.

        Args:
            rows: [num_rows], ROW; of moments and masters the addresses do not count.
            offset: [num_rows], of each row's first element in its slot, in elements.
            stretches: all rows, in their order.
            hypers: [num_hypers], HYPER.
            seed: of random bits.
        """
        ...

    def launch(
        self, name: str, stretches: Sequence[Stretch], tables: Sequence[Tensor], scalars: Tensor, entries: Entries
    ) -> Launch:
        """The launch of one chunk.

        Args:
            name: for reports.
            stretches: of the chunk.
            tables: on the device.
            scalars: on the device, [2], float32: factor of the gradients, and whether to change nothing.
            entries: the chunk's memory there.
        """
        ...


class TritonKernel:
    """The Triton kernel of triton_kernel.py. It has not run on a GPU."""

    def room(self, num_rows: int, num_hypers: int) -> list[int]:
        """Bytes of rows, blocks and hypers."""
        return [num_rows * DEVICE_ROW.itemsize, num_rows * 8, num_hypers * len(DEVICE_HYPER) * 4]

    def tables(
        self, rows: Table, offset: NDArray[np.int64], stretches: Sequence[Stretch], hypers: Table, seed: int
    ) -> list[NDArray[Any]]:
        """Rows, blocks and hypers."""
        made = device_rows(rows, offset=offset, hypers=hypers, seed=seed)
        return [as_int64(made), device_blocks(made["numel"]), device_hypers(hypers)]

    def launch(
        self, name: str, stretches: Sequence[Stretch], tables: Sequence[Tensor], scalars: Tensor, entries: Entries
    ) -> TritonLaunch:
        """One launch for each stretch: of a chunk there is one, unless its gradients are of two dtypes."""
        return TritonLaunch(name, stretches, tables, scalars, entries)


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """Steps the rows of one chunk.

    Attributes:
        name: for reports.
        stretches: of the chunk.
        tables: rows, blocks and hypers of the whole step.
        scalars: factor of the gradients, and whether to change nothing.
        entries: the chunk's memory on the device.
    """

    name: str
    stretches: Sequence[Stretch]
    tables: Sequence[Tensor]
    scalars: Tensor
    entries: Mapping[str, Tensor]

    @property
    def reads(self) -> list[Tensor]:
        """Tables and gradients."""
        return [*self.tables, self.scalars, *(grad for one in self.stretches for grad in one.grads)]

    @property
    def writes(self) -> list[Tensor]:
        """Parameters and the chunk."""
        return [*self.entries.values(), *(param for one in self.stretches for param in one.params)]

    def run(self) -> None:
        """Enqueues them on the current stream."""
        rows, blocks, hypers = self.tables
        for one in self.stretches:
            launch_adamw(
                one.kind,
                rows=rows[one.first : one.end],
                blocks=blocks[one.first : one.end],
                hypers=hypers,
                scalars=self.scalars,
                exp_avg=self.entries[MOMENTS[0]],
                exp_avg_sq=self.entries[MOMENTS[1]],
                max_exp_avg_sq=self.entries[MAX] if one.kind.amsgrad else None,
                master=self.entries.get(MASTER, self.entries.get(REMAINDER)),
                num_blocks=one.end_block - one.first_block,
            )


@dataclass(frozen=True, slots=True)
class ScaledLaunch:
    """A launch before which a GradScaler's numbers go into the step's scalars: on the device, in its order.

    Attributes:
        launch: the step's first.
        amp: ``grad_scale`` and ``found_inf``, one element each.
        factor: [2], float64: of all gradients, and room for another.
        scalars: [2], float32, of the whole step.
    """

    launch: Launch
    amp: Mapping[str, Tensor]
    factor: Tensor
    scalars: Tensor

    @property
    def name(self) -> str:
        """The launch's."""
        return self.launch.name

    @property
    def reads(self) -> list[Tensor]:
        """What the launch reads, and the numbers."""
        return [*self.launch.reads, *self.amp.values()]

    @property
    def writes(self) -> list[Tensor]:
        """What the launch writes, and the scalars."""
        return [*self.launch.writes, self.factor, self.scalars]

    @torch.no_grad()
    def run(self) -> None:
        """Enqueues both. Nothing of it allocates, or waits."""
        if "grad_scale" in self.amp:
            # In double, and in the order of the host's arithmetic.
            scale = self.factor[1:]
            scale.copy_(self.amp["grad_scale"].reshape(1))
            self.factor[:1].mul_(scale.reciprocal_())
            self.scalars[:1].copy_(self.factor[:1])
        if "found_inf" in self.amp:
            self.scalars[1:].copy_(self.amp["found_inf"].reshape(1))
        self.launch.run()
