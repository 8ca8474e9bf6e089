"""Values of quantised tensors: which scale belongs to which element, wherever the element is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.geometry import Box
from shardopt.layouts.codec import Form
from shardopt.layouts.grid import Grid
from shardopt.torch_compat import local_shard

__all__ = ["CODES_PER_BYTE", "Piece", "Stored", "apart", "looked_up", "memory_of", "together", "unpacked", "values_of"]

# Elements that are worked on at a time, so that indices (8 bytes each) stay small beside what they look up.
_AT_ONCE = 1 << 20

CODES_PER_BYTE = 2
"""Where codes share a byte, so many do."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Part of a quantised tensor, as it was stored.

    Attributes:
        form: what codes and scales mean.
        frame: the box whose elements blocks were counted over: the whole parameter, or one rank's shard.
        grid: its blocks, if the frame is the whole parameter and cells were fetched; else None.
        fetched: the cells of the grid that ``scales`` holds.
        scales: by cell of the grid, or one for each block of the frame.
    """

    form: Form
    frame: Box
    scales: Tensor
    grid: Grid | None = None
    fetched: Box | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Where the values of some elements come from.

    Attributes:
        box: the elements.
        source: quantised, or the values themselves in the shape of the box.
    """

    box: Box
    source: Stored | Tensor


def values_of(box: Box, codes: Tensor | None, pieces: Sequence[Piece]) -> Tensor:
    """The values of a box's elements, fp32: exactly what the codes and scales say.

    Args:
        box: of the parameter.
        codes: one a byte, shape ``box.size``; None when there are none.
        pieces: cover the box.
    """
    device = codes.device if codes is not None else torch.device("cpu")
    result = torch.empty(box.size, dtype=torch.float32, device=device)
    for piece in pieces:
        part = box.intersect(piece.box)
        if part is None:
            continue
        if isinstance(piece.source, Tensor):
            _view(result, box, part).copy_(_view(piece.source, piece.box, part))
            continue
        for some in _slices(part):
            target = _view(result, box, some)
            scales = _scales(piece.source, some).to(device=device, dtype=torch.float32)
            if codes is None:
                target.copy_(scales)
                continue
            table, own = piece.source.form.table, _view(codes, box, some)
            numbers = own.to(torch.float32) if table is None else table.to(device)[own.to(torch.int32)]
            torch.mul(numbers, scales, out=target)
    return result


def _scales(source: Stored, part: Box) -> Tensor:
    if source.grid is None:
        return source.scales.reshape(-1)[_numbers(source.frame, part) // source.form.block]
    return looked_up(source.grid, source.fetched or Box.whole(source.grid.shape), source.scales, part)


def looked_up(grid: Grid, fetched: Box, cells: Tensor, part: Box) -> Tensor:
    """For each element of a part of the parameter, what its cell holds.

    Args:
        grid: of the parameter.
        fetched: the cells that are there.
        cells: what they hold, shape ``fetched.size``.
        part: shape of the result.
    """
    if not grid.by_rows:
        numbers = _numbers(Box.whole(grid.param_shape), part)
        return cells[numbers // grid.block - fetched.offset[0]]
    for dim, (offset, size) in enumerate(zip(part.offset[:-1], part.size[:-1], strict=True)):
        cells = cells.narrow(dim, offset - fetched.offset[dim], size)
    columns = torch.arange(part.offset[-1], part.end[-1]) // grid.block - fetched.offset[-1]
    return cells.index_select(-1, columns.to(cells.device))


def unpacked(grid: Grid, fetched: Box, packed: Tensor, box: Box) -> Tensor:
    """Codes that shared bytes, one a byte.

    Args:
        grid: with a cell for each byte.
        fetched: the bytes that are there.
        packed: uint8, shape ``fetched.size``.
        box: the elements that are asked for; shape of the result.
    """
    result = torch.empty(box.size, dtype=torch.uint8)
    for some in _slices(box):
        both = looked_up(grid, fetched, packed, some)
        second = _numbers(Box.whole(grid.param_shape), some) % grid.block == 1
        _view(result, box, some).copy_(torch.where(second, both & 15, both >> 4))
    return result


def apart(codes: Tensor, per_byte: int) -> Tensor:
    """Codes of consecutive elements, one a byte, 1-D; of a pair in a byte the first is in the high bits."""
    flat = codes.reshape(-1)
    return flat if per_byte == 1 else torch.stack((flat >> 4, flat & 15), dim=-1).view(-1)


def together(codes: Tensor, per_byte: int) -> Tensor:
    """The same the other way, 1-D; of pairs there must be no half one."""
    flat = codes.reshape(-1)
    return flat if per_byte == 1 else (flat[::2] << 4) | flat[1::2]


def memory_of(value: object) -> list[int]:
    """Where the memory of a tensor begins, or of the tensors it is made of; empty for what is no tensor."""
    if isinstance(value, DTensor):
        value = local_shard(value)
    if not isinstance(value, Tensor):
        return []
    if hasattr(value, "__tensor_flatten__"):
        return [address for name in value.__tensor_flatten__()[0] for address in memory_of(getattr(value, name))]
    return [value.data_ptr()]


def _slices(box: Box) -> Iterator[Box]:
    """The box in slices along its longest dim."""
    if not box.volume:
        return
    if not box.size or box.volume <= _AT_ONCE:
        yield box
        return
    dim = max(range(len(box.size)), key=box.size.__getitem__)
    step = max(1, _AT_ONCE * box.size[dim] // box.volume)
    for start in range(0, box.size[dim], step):
        offset, size = list(box.offset), list(box.size)
        offset[dim] += start
        size[dim] = min(step, box.size[dim] - start)
        yield Box(tuple(offset), tuple(size))


def _numbers(frame: Box, part: Box) -> Tensor:
    """For each element of a part its number within the frame, counted row by row."""
    numbers = torch.zeros(part.size, dtype=torch.int64)
    stride = 1
    for dim in reversed(range(len(part.size))):
        start = part.offset[dim] - frame.offset[dim]
        line = torch.arange(start, start + part.size[dim]) * stride
        numbers += line.view([-1 if one == dim else 1 for one in range(len(part.size))])
        stride *= frame.size[dim]
    return numbers


def _view(tensor: Tensor, frame: Box, part: Box) -> Tensor:
    """The part of a tensor that holds a frame."""
    for dim, (offset, size) in enumerate(zip(part.offset, part.size, strict=True)):
        tensor = tensor.narrow(dim, offset - frame.offset[dim], size)
    return tensor
