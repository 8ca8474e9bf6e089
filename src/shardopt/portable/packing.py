"""Whole values as one run of bytes: a tree of Python values with tensors as leaves, and the way back.

The layout is the tree as ``encode`` writes it, with ``{"!": "leaf", "id", "offset", "dtype", "shape"}`` where a tensor
was. Leaves start at multiples of 64 bytes, so that a view of the bytes is as well aligned as a tensor torch allocates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt.errors import PlacementError
from shardopt.portable.decode import decode
from shardopt.portable.encode import encode
from shardopt.portable.tagged import TAG, Json, damaged, fields_of
from shardopt.portable.tensor_bytes import FORM_FIELDS, FORM_OPTIONS, TensorForm, byte_view, from_bytes

__all__ = ["ALIGNMENT_BYTES", "MAX_SMALL_LEAF_BYTES", "Packed", "pack", "unpack"]

ALIGNMENT_BYTES = 64

MAX_SMALL_LEAF_BYTES = 16 * 1024
"""Leaves up to this size share one chunk, which copies them.

A chunk costs a write item in every checkpoint, far more than copying this many bytes; and most leaves are this small
(factored rows and columns, step counters).
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed value.

    Attributes:
        layout: JSON; what ``unpack`` needs besides the bytes.
        chunks: ``(offset_bytes, uint8 1-D tensor)``, ascending; together they cover every byte exactly once. A chunk
            lies on its leaf's device and shares its memory where the leaf is large and dense.
        total_bytes: length of the run of bytes; 0 when the value has no tensors.
    """

    layout: Json
    chunks: list[tuple[int, Tensor]]
    total_bytes: int

    def entries(self) -> dict[str, Json]:
        """The layout by entry, when the value was a dict of entries: each one is a layout over the same bytes.

        Raises:
            PlacementError: an entry's name cannot be a key of plain JSON.
        """
        if not isinstance(self.layout, dict) or TAG in self.layout:
            raise PlacementError(f"state entries must be named by text other than {TAG!r}; rename the odd one")
        return self.layout


def pack(value: object, path: str = "") -> Packed:
    """Lays a value out as bytes, copying only small, strided and lazily conjugated leaves.

    A tensor object that occurs twice is stored once and comes back as one. Tensors that merely share memory come back
    apart. Memory order is kept (column-major stays so), holes and repeated elements are not.

    Args:
        value: anything ``encode`` knows, with tensors of any size and device.
        path: how errors call the value, e.g. ``"layers.0.weight: preconditioners"``.

    Raises:
        PlacementError: a part of the value has no exact form.
    """
    leaves = _Leaves()
    layout = encode(value, path, tensor=leaves.add)
    chunks = leaves.place()
    last_offset, last = chunks[-1] if chunks else (0, torch.empty(0))
    return Packed(layout, chunks, last_offset + last.numel())


def unpack(layout: Json, data: Tensor, *, copy: bool, path: str = "") -> object:
    """Rebuilds a packed value.

    Args:
        layout: from ``pack``: of the whole value, or a dict of some of its entries. Entries are read together, since a
            tensor that two of them share is one tensor only then.
        data: uint8, 1-D, contiguous ``[total_bytes]``, any device.
        copy: whether every tensor gets memory of its own. If not, tensors are views of ``data``, which must start at
            a multiple of 64 bytes (memory from ``torch.empty`` does) and lives as long as any of them.
        path: how errors call the value.

    Raises:
        FormatError: a broken layout, leaves that overlap, or one that lies outside ``data``.
        ValueError: ``data`` is not such a tensor.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"packed data must be contiguous 1-D uint8, got {data.dtype} of shape {list(data.shape)}")
    if not copy and (data.data_ptr() % ALIGNMENT_BYTES or data.storage_offset() % ALIGNMENT_BYTES):
        raise ValueError(
            f"packed data must start at a multiple of {ALIGNMENT_BYTES} bytes to be viewed; pass copy=True"
        )
    reader = _LeafReader(data, copy)
    value = decode(layout, path, leaf=reader.read)
    reader.check_overlaps(path)
    return value


class _Leaves:
    """The distinct tensors of one value, in the order met."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        self._forms: list[TensorForm] = []
        self._layouts: list[dict[str, Json]] = []

    def add(self, tensor: Tensor, path: str) -> Json:
        index = self._ids.setdefault(id(tensor), len(self._tensors))
        if index == len(self._tensors):
            form = TensorForm.of(tensor, path)
            self._tensors.append(tensor)
            self._forms.append(form)
            # The offset is known only when all leaves are: place() fills it in.
            self._layouts.append({TAG: "leaf", "id": index, "offset": 0, **form.to_json()})
        return self._layouts[index]

    def place(self) -> list[tuple[int, Tensor]]:
        """Gives every leaf its offset and returns the chunks."""
        chunks: list[tuple[int, Tensor]] = []
        end = 0
        for group in self._groups():
            start = _aligned(end)
            if start > end:
                chunks.append((end, torch.zeros(start - end, dtype=torch.uint8)))
            chunk = self._join(group, start)
            chunks.append((start, chunk))
            end = start + chunk.numel()
        return chunks

    def _groups(self) -> list[list[int]]:
        """The leaves of each chunk: the small ones of a device together, every large one alone."""
        small: dict[torch.device, list[int]] = {}
        large: list[int] = []
        for index, (tensor, form) in enumerate(zip(self._tensors, self._forms, strict=True)):
            if form.num_bytes > MAX_SMALL_LEAF_BYTES:
                large.append(index)
            elif form.num_bytes:
                small.setdefault(tensor.device, []).append(index)
        # Those that end between two alignments last: each one before another chunk costs a pad chunk.
        large.sort(key=lambda index: self._forms[index].num_bytes % ALIGNMENT_BYTES != 0)
        return [*small.values(), *([index] for index in large)]

    def _join(self, group: list[int], start: int) -> Tensor:
        """The chunk of these leaves, which starts at byte ``start``."""
        views: list[tuple[int, Tensor]] = []  # offset in the chunk, bytes
        size = 0
        for index in group:
            offset = _aligned(size)
            view = byte_view(self._tensors[index], self._forms[index])
            self._layouts[index]["offset"] = start + offset
            views.append((offset, view))
            size = offset + view.numel()
        if len(views) == 1:
            return views[0][1]
        joined = torch.zeros(size, dtype=torch.uint8, device=views[0][1].device)
        for offset, view in views:
            joined[offset : offset + view.numel()].copy_(view)
        return joined


class _LeafReader:
    def __init__(self, data: Tensor, copy: bool) -> None:
        self._data = data
        self._copy = copy
        self._seen: dict[int, tuple[dict[str, Json], Tensor]] = {}
        self._spans: list[tuple[int, int, int]] = []  # start, end, id; of the leaves that have bytes

    def read(self, encoded: dict[str, Json], path: str) -> Tensor:
        fields = fields_of(encoded, path, ("id", "offset", *FORM_FIELDS), FORM_OPTIONS)
        index, offset = fields["id"], fields["offset"]
        if type(index) is not int or type(offset) is not int or offset < 0 or offset % ALIGNMENT_BYTES:
            raise damaged(path, f"got the leaf {index!r:.80} at offset {offset!r:.80}, expected a multiple of 64")
        if index in self._seen:
            first, tensor = self._seen[index]
            if first != fields:
                raise damaged(path, f"leaf {index} is described twice: {first} and {fields}")
            return tensor
        form = TensorForm.from_json(fields, path)
        end = offset + form.num_bytes
        if form.num_bytes:
            if end > self._data.numel():
                raise damaged(path, f"leaf {index} is bytes {offset} to {end} of data that has {self._data.numel()}")
            self._spans.append((offset, end, index))
        tensor = self._build(form, offset if form.num_bytes else 0)
        self._seen[index] = fields, tensor
        return tensor

    def check_overlaps(self, path: str) -> None:
        spans = sorted(self._spans)
        for (_, end, index), (start, _, other) in itertools.pairwise(spans):
            if start < end:
                raise damaged(path, f"leaf {index} ends at byte {end} and leaf {other} starts at byte {start}")

    def _build(self, form: TensorForm, offset: int) -> Tensor:
        part = self._data[offset : offset + form.num_bytes]
        return from_bytes(form, part.clone() if self._copy else part)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
