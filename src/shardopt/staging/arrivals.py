"""What a load has brought of quantised entries: cells of tensors, all of those that are wanted, or a reason why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt.geometry import Box
from shardopt.layouts.tracked import Tracked
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import blob_key
from shardopt.portable.scratch import Scratch
from shardopt.portable.segments import BlockwiseEntry, Segment
from shardopt.portable.tensor_bytes import dtype_from_name, dtype_name
from shardopt.staging.plan import ParameterPlan, bytes_of
from shardopt.staging.report import Report
from shardopt.staging.source import Source

__all__ = ["Arrivals", "Arrived", "Problem", "held", "part_of"]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Cells of one tensor that a load has brought, or that another optimizer lends.

    Attributes:
        cells: which.
        tensor: what they hold.
        scratch: whose memory it is; None of what is lent.
    """

    cells: Box
    tensor: Tensor
    scratch: Scratch | None


class Problem(Exception):
    """Why an entry cannot be loaded, for the report."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of one parameter."""

    plan: ParameterPlan
    tracked: Tracked
    source: Source
    report: Report

    @property
    def lends(self) -> bool:
        """Whether another optimizer's live memory is loaded, and not what a reader has brought."""
        return not self.source.from_storage

    def blob(self, label: str) -> Tensor:
        """The bytes of all its shards."""
        handle = self.source.handles.get(blob_key(self.tracked.fqn))
        problems = Report()
        data = bytes_of(handle, label, self.source.from_storage, problems) if isinstance(handle, BytesHandle) else None
        expected = self.source.record(self.tracked).blob
        if data is None or data.numel() != expected:
            found = "; ".join(problems.problems) or f"its blob is not {expected} bytes"
            raise Problem(f"{label}: {found}; use prepare_load(path), or load another checkpoint.")
        return data

    def cells(
        self,
        label: str,
        key: Callable[[str, str], str],
        name: str,
        shape: tuple[int, ...],
        cells: Box,
        dtype: torch.dtype,
    ) -> Arrived:
        """The cells of a tensor, all of them.

        Raises:
            Problem: they are not there.
        """
        handle = self.source.handles.get(key(self.tracked.fqn, name))
        if not isinstance(handle, Handle):
            raise Problem(f"{label} is in the checkpoint, and this load did not ask for it; use prepare_load(path).")
        if self.lends:
            return _lent(label, handle, cells, dtype)
        if not handle.was_read:
            raise Problem(f"{label} was not read: the load skipped its key.")
        if handle.saved_size is not None and handle.saved_size != shape:
            raise Problem(
                f"{label} was saved with shape {handle.saved_size}, expected {shape}: the checkpoint is damaged."
            )
        scratch = _filled(label, handle, cells, dtype)
        self.plan.read.append(scratch)
        return Arrived(scratch.box, scratch.tensor(), scratch)


def _filled(label: str, handle: Handle, cells: Box, dtype: torch.dtype) -> Scratch:
    (scratch,) = handle.scratch or [None]
    if scratch is None or not scratch.box.contains(cells):
        raise Problem(f"{label} was read for other elements than this rank's; use prepare_load(path).")
    gap = scratch.missing()
    if scratch.wrong_dtype is not None or (scratch.delivered and scratch.dtype != dtype):
        found = dtype_name(scratch.wrong_dtype or scratch.dtype)
        raise Problem(f"{label} is stored as {found}, and the manifest says {dtype_name(dtype)}: it is damaged.")
    if gap is not None:
        raise Problem(f"{label}: the cells at {gap.offset} of size {gap.size} were not delivered.")
    if scratch.taken_over:
        raise Problem(f"{label}: what was read has been taken over by an earlier load; read it again.")
    if not scratch.delivered:
        scratch.convert(dtype)
    return scratch


def _lent(label: str, handle: Handle, cells: Box, dtype: torch.dtype) -> Arrived:
    for offset, tensor in zip(handle.offsets, handle.tensors, strict=True):
        if (offset, tuple(tensor.shape)) == (cells.offset, cells.size) and tensor.dtype == dtype:
            return Arrived(cells, tensor, None)
    if not cells.volume:
        return Arrived(cells, torch.empty(cells.size, dtype=dtype), None)
    raise Problem(f"{label}: the state dict was made for another sharding; save it with dcp.save to move it.")


def held(label: str, one: Segment, entry: BlockwiseEntry, data: Tensor) -> Tensor:
    """The scales of a shard, or its values, 1-D."""
    dtype = dtype_from_name(one.values or entry.scales, label)
    volume = Box(one.offset, one.size).volume
    count = volume if one.values is not None or one.block is None else -(-volume // one.block)
    end = one.at + count * dtype.itemsize
    if end > data.numel():
        raise Problem(f"{label}: its blob of {data.numel()} bytes ends before {end}: the checkpoint is damaged.")
    # A copy, since it may begin anywhere.
    return data[one.at : end].clone().view(dtype)


def part_of(arrived: Arrived, cells: Box) -> Tensor:
    """Some of its cells."""
    if arrived.cells == cells:
        return arrived.tensor
    part = arrived.tensor
    for dim, (offset, size) in enumerate(zip(cells.offset, cells.size, strict=True)):
        part = part.narrow(dim, offset - arrived.cells.offset[dim], size)
    return part
