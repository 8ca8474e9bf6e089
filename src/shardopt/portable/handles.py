"""Handles: what ``state_dict()`` gives DCP in place of tensors.

A handle has the global shape and dtype of an entry and knows which boxes of it this rank holds, but it
is not a DTensor and cannot be computed with. Asked for write items it lends live memory to a save;
asked for chunks it makes scratch for a load. Live state is never a load's target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from shardopt.errors import FormatError, ShardoptError
from shardopt.geometry import Box
from shardopt.portable.bound import Lease, ThisProcessOnly
from shardopt.portable.scratch import Scratch
from shardopt.torch_compat import make_wrapper

__all__ = ["ABSENT_SHAPE", "BoxHandle", "BytesHandle", "Handle", "Lease", "ThisProcessOnly"]

# An entry that does not exist yet is saved under its key as a tensor of this shape: no element, no pickle.
ABSENT_SHAPE: tuple[int, ...] = (0,)

_OUTDATED = (
    "the optimizer has stepped, loaded or got a parameter group since this state dict was made, and the dict lends the "
    "optimizer's live memory, so values of two moments would be mixed. Call state_dict() again for the present state; "
    "keep copy.deepcopy(optimizer.state_dict()) to come back to an earlier one."
)
_READ_INTO = (
    "this state dict has been read into by a load, and what was read is not in the live memory that a save would "
    "write. Give it to load_state_dict(), and save the optimizer's state_dict() of then."
)
_NOT_PICKLED = (
    "this state dict has been read into by a load, and what was read does not go into a pickle. Give it to "
    "load_state_dict(), and pickle the optimizer's state_dict() of then."
)
# What a handle has until it is told otherwise; one for all of them.
_OPEN_ENDED = Lease()

_UNFILLED = "this handle was made by zeros_like and nothing was copied into it; there is nothing to save."

_PASSED_THROUGH = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    }
)
_COPIED = frozenset(
    {
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
    }
)


class _SavedSize:
    """What a handle answers when DCP compares sizes: never different, but it remembers the saved one.

    DCP stops at the first size that differs. The handle lets it pass, declares no chunk to read, and the
    load reports it together with every other problem.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __eq__(self, other: object) -> bool:
        return not self != other

    def __ne__(self, other: object) -> bool:
        if isinstance(other, (tuple, list)):
            self._handle.saved_size = tuple(other)
        return False

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._handle.shape)

    def __iter__(self) -> Iterator[int]:
        return iter(self._handle.shape)

    def __getitem__(self, dim: int) -> int:
        return self._handle.shape[dim]


class Handle(torch.Tensor):
    """A stand-in for one entry of the portable state.

    Attributes:
        tensors: live memory lent to a save, one tensor a box.
        offsets: where each starts in global coordinates.
        saved_size: global shape in the checkpoint that DCP compared with, None before a load.
        scratch: what a load has filled; None before it, empty when there was nothing to read.
        refuse_save: why the state must be neither saved nor loaded elsewhere, or None. It can still be read into.
        outdated: whether the optimizer has changed since it lent its memory.
    """

    tensors: list[Tensor]
    offsets: list[tuple[int, ...]]
    saved_size: tuple[int, ...] | None
    scratch: list[Scratch] | None
    refuse_save: str | None
    outdated: Lease

    def _fill(self, tensors: Sequence[Tensor], offsets: Sequence[tuple[int, ...]]) -> None:
        self.tensors = list(tensors)
        self.offsets = list(offsets)
        self.saved_size = None
        self.scratch = None
        self.refuse_save = None
        self.outdated = _OPEN_ENDED

    @property
    def why_outdated(self) -> str | None:
        """Why its live memory must be neither saved nor loaded, or None."""
        return self.refuse_save or (_OUTDATED if self.outdated.over() else None)

    @property
    def was_read(self) -> bool:
        """Whether a load has asked this handle for memory."""
        return self.scratch is not None

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The global shape, in a form that DCP finds equal to any other."""
        return _SavedSize(self) if dim is None else self.shape[dim]

    def new_empty(self, size: Sequence[int], **kwargs: Any) -> Handle:  # type: ignore[override]
        """An empty handle of the same kind; stagers call it and then copy the attributes."""
        return _blank(type(self), tuple(self.shape), self.dtype, torch.device(kwargs.get("device") or self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        other = _blank(type(self), tuple(self.shape), self.dtype, self.device)
        memo[id(self)] = other
        for key, value in vars(self).items():
            setattr(other, key, copy.deepcopy(value, memo))
        return other

    def _unfilled(self) -> Handle:
        """A handle of the same kind for a copy on the CPU; to save it before the copy is an error."""
        other = _blank(type(self), tuple(self.shape), self.dtype, torch.device("cpu"))
        other._fill([], [])
        other.refuse_save = _UNFILLED
        return other

    def _take(self, source: Handle) -> Handle:
        """Becomes a snapshot of ``source``, once."""
        if self.refuse_save is not _UNFILLED:
            # The next state may have other shapes (a longer manifest, a new entry), and a tensor's shape is fixed.
            raise RuntimeError(
                "a handle cannot be written over, which BlockingAsyncStager(cache_staged_state_dict=True) does at its "
                "second save; use torch's DefaultStager, which reuses its memory too."
            )
        for key, value in vars(source).items():
            if key != "tensors":
                setattr(self, key, copy.deepcopy(value))
        self.tensors = [tensor.to("cpu", copy=True) for tensor in source.tensors]
        return self

    def __reduce_ex__(self, proto: Any) -> Any:
        # A stager's copy goes to another process, where saving refuses it on all ranks alike; raised here, the error
        # of one rank would leave the others waiting for it.
        original = self.outdated.value is not None
        refusal = _NOT_PICKLED if self.was_read else self.why_outdated if original else None
        if refusal is not None:
            raise ShardoptError(refusal)
        return (_rebuild, (type(self), tuple(self.shape), self.dtype, str(self.device), dict(vars(self))))

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PASSED_THROUGH:
            return args[0]
        if func in _COPIED:
            return copy.deepcopy(args[0])
        # BlockingAsyncStager, which every FileSystemWriter is too, makes a blank of each tensor and copies into it.
        if func is torch.ops.aten.zeros_like.default:
            return args[0]._unfilled()
        if func is torch.ops.aten.copy_.default and type(args[0]) is type(args[1]):
            return args[0]._take(args[1])
        # Not a TypeError: torch turns those into "unsupported operand", and the sentence is lost.
        raise RuntimeError(
            f"{func}: an entry of ShardedStateOptimizer.state_dict() is a handle for saving and loading, not a tensor; "
            "use optimizer.sharded_state() for DTensors to look at or compute with."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        held = ", ".join(f"{offset}+{tuple(t.shape)}" for offset, t in zip(self.offsets, self.tensors, strict=True))
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, holds=[{held}])"

    def _write_item(
        self, fqn: str, offset: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]
    ) -> WriteItem:
        chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=torch.Size(shape))
        return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """DCP is saving: the boxes this rank can write. Replicas offer the same boxes; DCP keeps one."""
        refusal = self.why_outdated or (_READ_INTO if self.was_read else None)
        if refusal is not None:
            raise ShardoptError(refusal)
        shape = tuple(self.shape)
        return [
            self._write_item(fqn, offset, tuple(tensor.shape), shape)
            for offset, tensor in zip(self.offsets, self.tensors, strict=True)
            # An empty box has the offset of a real one and would shadow it; a tensor without elements needs its key.
            if tensor.numel() or 0 in shape
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP is loading: the boxes this rank wants."""
        self.scratch = self._make_scratch()
        return [
            ChunkStorageMetadata(offsets=torch.Size(part.box.offset), sizes=torch.Size(part.box.size))
            for part in self.scratch
            if part.box.volume
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        """The memory behind one box: live when saving, scratch when loading."""
        wanted = tuple(index.offset or ())
        if self.scratch is not None:
            for part in self.scratch:
                if part.box.offset == wanted and part.box.volume:
                    return part.target()
        else:
            for offset, tensor in zip(self.offsets, self.tensors, strict=True):
                if offset == wanted:
                    return tensor
        raise FormatError(f"{index.fqn}: no box of this entry starts at {wanted} on this rank.")

    def _make_scratch(self) -> list[Scratch]:
        raise NotImplementedError


class BoxHandle(Handle):
    """An element-wise entry: a tensor of the parameter's global shape, of which this rank holds one box or nothing."""

    box: Box | None
    absent: bool
    template: ThisProcessOnly
    placed: ThisProcessOnly

    @staticmethod
    def make(
        shape: tuple[int, ...],
        box: Box | None,
        live: Tensor | None,
        *,
        like: Tensor,
        place: Callable[[Tensor], Tensor],
        elsewhere: torch.dtype | None = None,
    ) -> BoxHandle:
        """A handle for an entry that exists (``live``, or ``elsewhere``) or does not exist yet.

        Args:
            shape: global shape.
            box: this rank's part; None when it has none.
            live: the entry's memory on this rank, shape ``box.size``.
            like: a tensor whose shape, strides, dtype and device a new entry takes.
            place: makes a DTensor (or plain tensor) of a local part, for ``full_tensor``.
            elsewhere: dtype of an entry that exists on other ranks only.
        """
        like = (like if live is None else live).detach()
        if live is None and elsewhere is not None:
            handle = _blank(BoxHandle, shape, elsewhere, like.device)
            handle._fill([], [])
        elif live is None or box is None:
            handle = _blank(BoxHandle, ABSENT_SHAPE, torch.uint8, like.device)
            handle._fill([torch.empty(ABSENT_SHAPE, dtype=torch.uint8)], [(0,)])
        else:
            handle = _blank(BoxHandle, shape, like.dtype, like.device)
            handle._fill([like], [box.offset])
        handle.box = box
        handle.absent = live is None and elsewhere is None
        handle.template = ThisProcessOnly((shape, like))
        handle.placed = ThisProcessOnly(place)
        return handle

    @property
    def wanted_shape(self) -> tuple[int, ...]:
        """Global shape a load must find."""
        return self.template.value[0]

    def _make_scratch(self) -> list[Scratch]:
        if self.template.value is None:
            raise ShardoptError(
                "a copy of a handle (staged, deep-copied or sent to another process) cannot be read into; load into "
                "what state_dict() returns."
            )
        shape, like = self.template.value
        if self.box is None or (self.saved_size is not None and self.saved_size != shape):
            return []
        return [Scratch(self.box, like.dtype, lambda dtype: torch.empty_like(like, dtype=dtype), any_dtype=True)]

    def full_tensor(self) -> Tensor:
        """Collective. The whole entry on every rank of the parameter's mesh."""
        place = self.placed.value
        if place is None:
            raise TypeError("this handle was staged or sent to another process, where its mesh is not known.")
        if self.absent:
            raise TypeError("this entry does not exist yet; there is nothing to gather.")
        if not self.tensors:
            raise TypeError("this entry is kept whole, by another rank alone; there is nothing to gather here.")
        tensor = place(self.tensors[0])
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class BytesHandle(Handle):
    """Bytes of any length as one 1-D uint8 tensor: the manifest, or a parameter's whole values."""

    wanted: bool

    @staticmethod
    def make(chunks: Sequence[tuple[int, Tensor]], total_bytes: int) -> BytesHandle:
        """A handle over chunks ``(offset in bytes, uint8 tensor)`` that together cover ``total_bytes``."""
        handle = _blank(BytesHandle, (total_bytes,), torch.uint8, torch.device("cpu"))
        parts = list(chunks) or [(0, torch.empty(0, dtype=torch.uint8))]
        handle._fill([tensor for _, tensor in parts], [(offset,) for offset, _ in parts])
        handle.wanted = True
        return handle

    @staticmethod
    def elsewhere(total_bytes: int) -> BytesHandle:
        """A handle for bytes that another rank writes, and that another rank reads."""
        handle = BytesHandle.make([], total_bytes)
        handle.wanted = False
        return handle

    @staticmethod
    def of(data: bytes) -> BytesHandle:
        """A handle over one piece of bytes."""
        # bytearray: torch warns about memory it could write to and python could not.
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return BytesHandle.make([(0, tensor)], len(data))

    def as_read(self) -> BytesHandle:
        """The same bytes in a handle that is filled, as if a load had brought them."""
        data = self.contents()
        handle = BytesHandle.make([(0, data)], data.numel())
        handle.saved_size = tuple(data.shape)
        handle.scratch = handle._make_scratch()
        handle.scratch[0].receive((0,), (data.numel(),), data)
        return handle

    def _make_scratch(self) -> list[Scratch]:
        if not self.wanted or self.saved_size is None or len(self.saved_size) != 1:
            return []
        total_bytes = self.saved_size[0]
        box = Box((0,), (total_bytes,))
        return [Scratch(box, torch.uint8, lambda dtype: torch.empty(total_bytes, dtype=dtype))]

    def problem(self) -> str | None:
        """Why a load did not bring all of its bytes, in words; None when they are there to be used."""
        if self.scratch is None:
            return None
        if not self.scratch:
            return f"saved with shape {self.saved_size}, expected one dim of bytes."
        (scratch,) = self.scratch
        if scratch.wrong_dtype is not None:
            return f"saved as {scratch.wrong_dtype}, expected bytes (uint8)."
        gap = scratch.missing()
        if gap is not None:
            return f"the bytes from {gap.offset[0]} to {gap.end[0]} were not delivered; the checkpoint is incomplete."
        return None

    def contents(self) -> Tensor:
        """The bytes: as loaded if a load read them, else the live ones in one piece. Ask for ``problem`` first."""
        if self.scratch is not None:
            return self.scratch[0].tensor()
        data = torch.empty(tuple(self.shape), dtype=torch.uint8)
        for (offset,), tensor in zip(self.offsets, self.tensors, strict=True):
            data[offset : offset + tensor.numel()] = tensor
        return data


def _blank(cls: type[Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    return make_wrapper(cls, shape, dtype, device)


def _rebuild(
    cls: type[Handle], shape: tuple[int, ...], dtype: torch.dtype, device: str, state: dict[str, Any]
) -> Handle:
    handle = _blank(cls, shape, dtype, torch.device(device))
    for key, value in state.items():
        setattr(handle, key, value)
    return handle
