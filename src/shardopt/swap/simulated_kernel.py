"""The host kernel as that of a device which is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardopt.swap.held import MAX
from shardopt.swap.kernel_rows import HYPER, ROW, Table
from shardopt.swap.launches import Stretch
from shardopt.swap.ring import Entries
from shardopt.swap.simulated_launch import HostLaunch

__all__ = ["HostKernel"]

_OFFSETS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


@dataclass(frozen=True)
class _Launches:
    """Several launches as one."""

    name: str
    launches: Sequence[HostLaunch]

    @property
    def reads(self) -> list[Tensor]:
        """What all of them read."""
        return [tensor for one in self.launches for tensor in one.reads]

    @property
    def writes(self) -> list[Tensor]:
        """What all of them write."""
        return [tensor for one in self.launches for tensor in one.writes]

    def run(self) -> None:
        """Runs one after the other."""
        for one in self.launches:
            one.run()


class HostKernel:
    """A ``DeviceKernel``: see ``HostLaunch``."""

    def __init__(self) -> None:
        self._seed = 0

    def room(self, num_rows: int, numel: int, num_hypers: int) -> list[int]:
        """Bytes of rows and hypers."""
        return [num_rows * ROW.itemsize, num_hypers * HYPER.itemsize]

    def tables(
        self, rows: Table, offset: NDArray[np.int64], stretches: Sequence[Stretch], hypers: Table, seed: int
    ) -> list[NDArray[Any]]:
        """Rows, in whose fields of moments and master are offsets, and hypers."""
        self._seed = seed
        made = rows.copy()
        for name in _OFFSETS:
            made[name] = offset
        return [made, hypers]

    def launch(
        self, name: str, stretches: Sequence[Stretch], tables: Sequence[Tensor], scalars: Tensor, entries: Entries
    ) -> _Launches:
        """One launch for each stretch."""
        rows, hypers = tables
        return _Launches(
            name,
            [
                HostLaunch(
                    name=name,
                    rows=rows[one.first * ROW.itemsize : one.end * ROW.itemsize],
                    hypers=hypers,
                    scalars=scalars,
                    entries={key: value for key, value in entries.items() if key != MAX or one.kind.amsgrad},
                    params=one.params,
                    grads=one.grads,
                    seed=self._seed,
                )
                for one in stretches
            ],
        )
