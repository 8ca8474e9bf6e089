"""The host kernel as that of a device which is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardopt.errors import ShardoptError
from shardopt.swap.device_rows import ALIGNED_BYTES, ALIGNED_ELEMENTS, BLOCK
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

    def room(self, num_rows: int, num_hypers: int) -> list[int]:
        """Bytes of rows and hypers."""
        return [num_rows * ROW.itemsize, num_hypers * HYPER.itemsize]

    def tables(
        self, rows: Table, offset: NDArray[np.int64], stretches: Sequence[Stretch], hypers: Table, seed: int
    ) -> list[NDArray[Any]]:
        """Rows, in whose fields of moments and master are offsets, and hypers.

        Raises:
            ShardoptError: a stretch is not what it says, which the host kernel does not need and a device's does.
        """
        self._seed = seed
        _refuse_mixtures(rows, offset, stretches)
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


def _refuse_mixtures(rows: Table, offset: NDArray[np.int64], stretches: Sequence[Stretch]) -> None:
    blocks = np.concatenate([[0], np.cumsum(-(-rows["numel"] // BLOCK))])
    end = 0
    for one in stretches:
        some, kind = rows[one.first : one.end], one.kind
        addresses = some["param"] | some["grad"]
        fits = (
            one.first == end < one.end
            and (one.first_block, one.end_block) == (blocks[one.first], blocks[one.end])
            and all(
                (some[name] == code).all()
                for name, code in (
                    ("param_dtype", kind.param_dtype),
                    ("grad_dtype", kind.grad_dtype),
                    ("moment_dtype", kind.moment_dtype),
                    ("master_kind", kind.master_kind),
                )
            )
        )
        is_aligned = not (addresses % ALIGNED_BYTES).any()
        is_aligned &= not (offset[one.first : one.end] % ALIGNED_ELEMENTS).any()
        if not fits or kind.aligned != is_aligned:
            raise ShardoptError(f"rows {one.first} to {one.end} are not of {kind}, aligned {is_aligned}")
        end = one.end
    if end != len(rows):
        raise ShardoptError(f"{len(rows)} rows are to be stepped, and stretches end at {end}")
