"""A launch for a device that is not there: the host kernel over memory that plays the device's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shardopt.errors import ShardoptError
from shardopt.swap.host_kernel import HYPER, ROW, adamw_rows
from shardopt.swap.kernel_rows import MasterKind

__all__ = ["HostLaunch"]

_ENTRIES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_MASTERS = ("master", "master_lo")


@dataclass(frozen=True, kw_only=True)
class HostLaunch:
    """Steps the rows of one chunk, with the bits of the host kernel by definition.

    It takes its tables as it finds them in device memory when it runs, not when it was made: tables that came too late,
    or were overwritten too early, give other numbers or an error.

    Attributes:
        name: for reports.
        rows: of ``ROW``, as bytes. In them the fields of moments and master are elements from the slot's start.
        hypers: of ``HYPER``, as bytes.
        scalars: as ``DEVICE_SCALARS``: factor of the gradients, and whether to change nothing.
        entries: the slot's tensors, by entry. Where there is no ``max_exp_avg_sq``, there is no amsgrad.
        params: that it writes.
        grads: that it reads.
        seed: of random bits.
    """

    name: str
    rows: Tensor
    hypers: Tensor
    scalars: Tensor
    entries: Mapping[str, Tensor]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    seed: int = 0

    @property
    def reads(self) -> list[Tensor]:
        """Tables and gradients."""
        return [self.rows, self.hypers, self.scalars, *self.grads]

    @property
    def writes(self) -> list[Tensor]:
        """Parameters and the slot."""
        return [*self.params, *self.entries.values()]

    def run(self) -> None:
        """Steps them.

        Raises:
            ShardoptError: rows say what no row of these parameters and gradients says.
        """
        scale, skip = self.scalars.tolist()
        if skip:
            return
        rows = self.rows.numpy().view(ROW).copy()
        self._refuse_garbage(rows)
        for name in (*_ENTRIES, *_MASTERS):
            entry = self.entries.get(name)
            field = "master" if name in _MASTERS else name
            if entry is not None:
                rows[field] = entry.data_ptr() + rows[field] * entry.element_size()
        if not any(name in self.entries for name in _MASTERS):
            rows["master"], rows["master_kind"] = 0, MasterKind.NONE
        if "max_exp_avg_sq" not in self.entries:
            rows["max_exp_avg_sq"] = 0
        adamw_rows(rows, self.hypers.numpy().view(HYPER).copy(), seed=self.seed, grad_scale=scale, num_threads=1)

    def _refuse_garbage(self, rows: np.ndarray) -> None:
        """Memory that is none must not be touched: a real device would end the process."""
        for field, tensors in (("param", self.params), ("grad", self.grads)):
            ends = {start: start + _reach(one) for one in tensors if (start := one.data_ptr())}
            inside = [any(start <= at < end for start, end in ends.items()) for at in rows[field].tolist()]
            if not all(inside):
                raise ShardoptError(f"{self.name}: rows say {field} is where none is; the table is not what it was")
        most = min(entry.numel() for entry in self.entries.values())
        if (rows["numel"] < 0).any() or (rows["exp_avg"] < 0).any() or (rows["exp_avg"] + rows["numel"] > most).any():
            raise ShardoptError(f"{self.name}: rows go beyond the slot; the table is not what it was")


def _reach(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last one, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
