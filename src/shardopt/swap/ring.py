"""Chunks of state that stream from the host through a few slots of device memory and back, while launches step them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from shardopt.errors import ShardoptError
from shardopt.swap.backend import Backend, Launch, Stream
from shardopt.swap.order import Mark, Order, Point
from shardopt.swap.step_tables import StepTables

__all__ = ["Entries", "MakeLaunch", "Ring"]

# Flat memory of each entry of a chunk (exp_avg, ...), all of one number of elements, of dtypes of their own.
Entries: TypeAlias = Mapping[str, Tensor]
# Makes the launch of one chunk from its number, its entries on the device and the step's tables there.
MakeLaunch: TypeAlias = Callable[[int, Entries, Sequence[Tensor]], Launch]

_NUM_TABLES = 4
# Of each entry in device memory.
_ALIGNMENT = 256

_Shape: TypeAlias = tuple[tuple[str, torch.dtype, int], ...]


@dataclass(slots=True)
class _Slot:
    """Room on the device for one chunk.

    Attributes:
        views: the entries of chunks of each shape that uses it.
        downloaded: when its last copy to the host was done.
        free: when it can be written to.
    """

    views: dict[_Shape, dict[str, Tensor]]
    downloaded: Mark
    free: Point


@dataclass(slots=True)
class _Resident:
    """A chunk that stays on the device.

    Attributes:
        views: its entries there.
        is_loaded: whether it is there already.
        stepped: when the last launch was done that made of it what the host lacks; None where it lacks nothing.
    """

    views: dict[str, Tensor]
    is_loaded: bool = field(default=False)
    stepped: Point | None = field(default=None)


class Ring:
    """Steps chunks of state on the device: each is copied to a slot, stepped there by one launch, and copied back.

    A step allocates nothing and does not make the host wait, unless the device is four steps behind. Its last copies
    run into whatever comes next: until ``drain``, the host memory must be neither read nor written, nor freed. What
    launches do to other memory (parameters) is in the order of the compute stream, as everything there.

    Nothing of it has run on a GPU; its order of accesses is what ``shardopt.swap.simulator`` tests.

    Args:
        backend: the device.
        chunks: on the host, contiguous; the ring keeps them.
        table_bytes: room for the tables of one step, as ``table_room`` says; the ring makes four times that.
        depth: chunks that are on the device at a time, at most.
        budget_bytes: of further device memory, for chunks that stay there: the first ones that fit.

    Raises:
        ValueError: an argument is out of range, or a chunk's memory is not as it must be; all is listed.
    """

    def __init__(
        self, backend: Backend, chunks: Sequence[Entries], *, table_bytes: int, depth: int = 3, budget_bytes: int = 0
    ) -> None:
        _check(chunks, table_bytes, depth, budget_bytes)
        self._backend = backend
        self._chunks = [dict(entries) for entries in chunks]
        self._order = Order(backend)
        self._uploaded = self._order.new_mark()
        self._launched = self._order.new_mark()
        self._drained = self._order.new_mark()
        sizes = [_room(entries) for entries in chunks]
        self._resident = self._make_residents(sizes, budget_bytes)
        streamed = [index for index in range(len(chunks)) if index not in self._resident]
        self.num_slots = min(depth, len(streamed))
        self.slot_bytes = max((sizes[index] for index in streamed), default=0)
        memory = self._allocate(self.num_slots * self.slot_bytes)
        self._tables = StepTables(backend, self._order, nbytes=table_bytes, num_pairs=_NUM_TABLES)
        # Whatever had the memory before is on the compute stream.
        self._made = self._order.mark(self._order.new_mark(), Stream.COMPUTE)
        self._slots = [self._make_slot(memory, number, streamed) for number in range(self.num_slots)]
        self._next = 0
        self._broken: Point | None = None
        # When each chunk's host memory was last written, and the last of these.
        self._home = [self._made] * len(chunks)
        self._last_home = self._made

    def _allocate(self, nbytes: int) -> Tensor | None:
        return self._backend.allocate(nbytes) if nbytes else None

    def _make_residents(self, sizes: Sequence[int], budget_bytes: int) -> dict[int, _Resident]:
        starts: dict[int, int] = {}
        end = 0
        for index, size in enumerate(sizes):
            if end + size <= budget_bytes:
                starts[index] = end
                end += size
        self.resident_bytes = end
        memory = self._allocate(end)
        if memory is None:
            return {}
        return {
            index: _Resident(_views(memory[start : start + sizes[index]], _shape(self._chunks[index])))
            for index, start in starts.items()
        }

    def _make_slot(self, memory: Tensor | None, number: int, streamed: Sequence[int]) -> _Slot:
        assert memory is not None
        own = memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]
        shapes = {_shape(self._chunks[index]) for index in streamed}
        return _Slot({shape: _views(own, shape) for shape in shapes}, self._order.new_mark(), self._made)

    @property
    def device_bytes(self) -> int:
        """All device memory the ring has asked for: slots, tables, and chunks that stay there."""
        return self.num_slots * self.slot_bytes + self._tables.device_bytes + self.resident_bytes

    @property
    def num_resident(self) -> int:
        """Chunks that stay on the device."""
        return len(self._resident)

    def step(self, chunks: Sequence[int], tables: Sequence[NDArray[Any]], make_launch: MakeLaunch) -> None:
        """Steps some chunks; the others are neither copied nor touched.

        Args:
            chunks: their numbers, each once. Without any there is nothing to do.
            tables: of this step; may be changed as soon as this returns.
            make_launch: called once for each chunk, in their order.

        Raises:
            ValueError: the tables need more room than there is; nothing was done.
            Exception: whatever ``make_launch`` or a launch raises. The chunks before that one were stepped.
        """
        if not chunks:
            return
        self._order.enter()
        views, copied = self._tables.upload(tables, self._made)
        try:
            for chunk in chunks:
                resident = self._resident.get(chunk)
                if resident is None:
                    self._step_streamed(chunk, views, copied, make_launch)
                else:
                    self._step_resident(chunk, resident, views, copied, make_launch)
        except BaseException:
            # Copies may have been asked for that no mark stands for yet.
            self._order.mark(self._uploaded, Stream.UPLOAD)
            self._last_home = self._order.mark(self._drained, Stream.DOWNLOAD)
            # And a part of a launch may be under way, whose memory nobody else knows to be in use.
            self._broken = self._order.mark(self._launched, Stream.COMPUTE)
            raise
        finally:
            self._tables.release(copied)

    def _step_streamed(self, chunk: int, tables: Sequence[Tensor], copied: Point, make_launch: MakeLaunch) -> None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self.num_slots
        host = self._chunks[chunk]
        device = slot.views[_shape(host)]
        there = self._upload(device, host, slot.free, self._home[chunk])
        launched = self._launch(make_launch(chunk, device, tables), there, copied)
        slot.free = self._home[chunk] = self._download([(device, host)], slot.downloaded, launched)

    def _step_resident(
        self, chunk: int, resident: _Resident, tables: Sequence[Tensor], copied: Point, make_launch: MakeLaunch
    ) -> None:
        needed = [copied]
        if not resident.is_loaded:
            needed.append(self._upload(resident.views, self._chunks[chunk], self._made, self._home[chunk]))
            resident.is_loaded = True
        resident.stepped = self._launch(make_launch(chunk, resident.views, tables), *needed)

    def _upload(self, device: Entries, host: Entries, *after: Point) -> Point:
        self._order.wait(Stream.UPLOAD, *after)
        for name, source in host.items():
            self._backend.copy(device[name], source, Stream.UPLOAD)
        return self._order.mark(self._uploaded, Stream.UPLOAD)

    def _launch(self, launch: Launch, *after: Point) -> Point:
        self._order.wait(Stream.COMPUTE, *after)
        self._backend.launch(launch, Stream.COMPUTE)
        return self._order.mark(self._launched, Stream.COMPUTE)

    def _download(self, pairs: Sequence[tuple[Entries, Entries]], mark: Mark, *after: Point) -> Point:
        self._order.wait(Stream.DOWNLOAD, *after)
        for device, host in pairs:
            for name, target in host.items():
                self._backend.copy(target, device[name], Stream.DOWNLOAD)
        self._last_home = self._order.mark(mark, Stream.DOWNLOAD)
        return self._last_home

    def drain(self) -> None:
        """Brings all state to the host, and waits for it: after this nothing is in flight, and the host may do as it
        likes with the state's memory until the next step. Say ``host_changed`` if it has written there."""
        stepped = {index: one.stepped for index, one in self._resident.items() if one.stepped is not None}
        if stepped:
            pairs = [(self._resident[index].views, self._chunks[index]) for index in stepped]
            home = self._download(pairs, self._drained, *stepped.values())
            for index in stepped:
                self._resident[index].stepped = None
                self._home[index] = home
        self._settle()

    def _settle(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            self._order.host(broken)
        self._order.host(self._last_home)
        # Where a launch has failed, nobody has waited for what was uploaded for it.
        self._order.host(Point(self._uploaded, self._uploaded.tick))

    def host_changed(self) -> None:
        """Takes notice that the host has written to the state's memory, after ``drain``.

        Raises:
            ShardoptError: launches have made something since then that the host lacks, and that would be lost.
        """
        ahead = [index for index, one in self._resident.items() if one.stepped is not None]
        if ahead:
            raise ShardoptError(
                f"chunks {ahead} were stepped on the device, and the host has written over older values of them; call "
                "drain() before the host writes"
            )
        for one in self._resident.values():
            one.is_loaded = False

    def __del__(self) -> None:
        # The host memory may be freed, and unregistered, right after this. A device that has failed does nothing more.
        if hasattr(self, "_last_home"):
            with suppress(RuntimeError):
                self._settle()


def _check(chunks: Sequence[Entries], table_bytes: int, depth: int, budget_bytes: int) -> None:
    problems = [
        f"{name} is {value!r}; it must be at least {least}"
        for name, value, least in (
            ("table_bytes", table_bytes, 0),
            ("depth", depth, 1),
            ("budget_bytes", budget_bytes, 0),
        )
        if value < least
    ]
    for index, entries in enumerate(chunks):
        shapes = {name: tuple(tensor.shape) for name, tensor in entries.items()}
        if len(set(shapes.values())) != 1 or any(tensor.dim() != 1 for tensor in entries.values()):
            problems.append(f"chunk {index}: its entries have shapes {shapes}; they must be flat and of one length")
        problems += [
            f"chunk {index}: {name} has stride {tensor.stride()}; it must be contiguous"
            for name, tensor in entries.items()
            if not tensor.is_contiguous()
        ]
    if problems:
        raise ValueError("\n".join(problems))


def _shape(entries: Entries) -> _Shape:
    return tuple((name, tensor.dtype, tensor.numel()) for name, tensor in entries.items())


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _room(entries: Entries) -> int:
    """Bytes of device memory that a chunk takes."""
    return sum(_padded(tensor.numel() * tensor.element_size()) for tensor in entries.values())


def _views(memory: Tensor, shape: _Shape) -> dict[str, Tensor]:
    """The entries of a chunk one after the other in memory."""
    views: dict[str, Tensor] = {}
    start = 0
    for name, dtype, numel in shape:
        nbytes = numel * dtype.itemsize
        views[name] = memory[start : start + nbytes].view(dtype)
        start += _padded(nbytes)
    return views
