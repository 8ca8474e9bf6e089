"""What the ring needs of a device: memory, three streams, events. ``CudaBackend`` gives it that of CUDA."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Backend", "CudaBackend", "Launch", "Stream"]


class Stream(enum.IntEnum):
    """The queues of a device: each does its work in order, and none waits for another unless it is told to."""

    COMPUTE = 0  # whatever stream is the current one: gradients come from it, and the next forward pass follows on it
    UPLOAD = 1
    DOWNLOAD = 2


class Launch(Protocol):
    """Work for the compute stream that knows which memory it touches."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def reads(self) -> Sequence[Tensor]:
        """Tensors of which it reads some."""
        ...

    @property
    def writes(self) -> Sequence[Tensor]:
        """Tensors of which it writes some; it may read these too."""
        ...

    def run(self) -> None:
        """Enqueues the work on the current stream. Allocates nothing, waits for nothing; if it raises, did nothing."""
        ...


class Backend(Protocol):
    """A device. All but ``synchronize`` return at once: what they ask for is done later, in its stream's order."""

    def compute(self) -> int:
        """Tells which stream ``COMPUTE`` is right now: another number is another stream."""
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory: [nbytes] of uint8, at an address that is a multiple of 256.

        What used the memory before may still be at work on the compute stream; nothing else knows of it. The tensor's
        end is safe at any time, whichever streams still use it.
        """
        ...

    def allocate_host(self, nbytes: int) -> Tensor:
        """Pinned host memory: [nbytes] of uint8. Whoever drops it must know that no copy still uses it."""
        ...

    def event(self) -> Any:
        """A new event, not recorded yet."""
        ...

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copies between host and device. Both are contiguous, of one size and dtype."""
        ...

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Runs a launch."""
        ...

    def record(self, event: Any, stream: Stream) -> None:
        """Makes the event stand for all that the stream was given so far. Earlier waits keep what it stood for then."""
        ...

    def wait(self, stream: Stream, event: Any) -> None:
        """Makes what the stream is given from now on wait for the event; the host goes on."""
        ...

    def query(self, event: Any) -> bool:
        """Whether all that the event stands for is done."""
        ...

    def synchronize(self, event: Any) -> None:
        """The host waits until all is done that the event stands for."""
        ...

    def host_reads(self, tensor: Tensor) -> None:
        """Tells that the host reads host memory that streams use, right now. A device has no use for it, a test has."""
        ...

    def host_writes(self, tensor: Tensor) -> None:
        """The same of a write."""
        ...


class CudaBackend:
    """A CUDA device. Nothing of it has ever run on one: only its calls were checked, against torch without a GPU.

    Args:
        device: with an index, or the current one is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # Made once: fresh streams at each step make the allocator keep a pool for each.
        self._upload = torch.cuda.Stream(self.device)
        self._download = torch.cuda.Stream(self.device)
        # Streams that were the current one when memory was allocated.
        self._allocated_on: set[int] = set()

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream is Stream.COMPUTE:
            return torch.cuda.current_stream(self.device)
        return self._upload if stream is Stream.UPLOAD else self._download

    def compute(self) -> int:
        """Tells which stream is the current one of this device: its handle."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of torch's allocator, which aligns to 512 bytes and hands out again what the current stream let go."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._allocated_on.add(self.compute())
        if nbytes:
            # Or it would be handed out again at the tensor's end while copies are still at work.
            memory.record_stream(self._upload)
            memory.record_stream(self._download)
        return memory

    def allocate_host(self, nbytes: int) -> Tensor:
        """Memory of torch's pinned allocator, which rounds it up to a power of two."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """An event without a clock, which is the cheaper kind."""
        return torch.cuda.Event(enable_timing=False)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """A copy that the host does not wait for where its memory is pinned; elsewhere CUDA makes the host wait."""
        with torch.cuda.stream(self._stream(stream)):
            target.copy_(source, non_blocking=True)

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Runs a launch with that stream as the current one."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream(stream)):
            # Work on another stream than that of the allocation is not known to the allocator either.
            current = self._stream(stream)
            if self._allocated_on - {current.cuda_stream}:
                for tensor in (*launch.reads, *launch.writes):
                    tensor.record_stream(current)
            launch.run()

    def record(self, event: torch.cuda.Event, stream: Stream) -> None:
        """Records the event on that stream."""
        event.record(self._stream(stream))

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        """Makes the stream wait; CUDA keeps what the event stands for at this moment."""
        self._stream(stream).wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        """Whether it is done."""
        return event.query()

    def synchronize(self, event: torch.cuda.Event) -> None:
        """The host waits for the event alone, not for the device."""
        event.synchronize()

    def host_reads(self, tensor: Tensor) -> None:
        """Nothing: CUDA has no use for it."""

    def host_writes(self, tensor: Tensor) -> None:
        """Nothing: CUDA has no use for it."""
