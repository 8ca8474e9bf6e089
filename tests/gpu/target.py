"""Where checks run: a GPU, or a simulated one on which their own logic is tried."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt import SwapAdamW
from shardopt.swap.backend import Stream
from shardopt.swap.launches import DeviceKernel, TritonKernel
from shardopt.swap.simulated_kernel import HostKernel
from shardopt.swap.simulator import Counts, SimBackend
from tests.unit.swap.device_cases import on_device

__all__ = ["CudaTarget", "Memory", "Target"]

# About 20 ms at 2 GHz: longer than all that a small step does.
_SLEEP_CYCLES = 40_000_000


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Device memory.

    Attributes:
        now: bytes that are in use.
        peak: the most there were since the last ``forget_peak``.
        requests: how often memory was asked for, ever.
    """

    now: int
    peak: int
    requests: int


class Target:
    """The simulated device: memory of the host, and the host's kernel.

    Attributes:
        device: of the parameters.
        is_dry: whether there is no GPU.
    """

    is_dry = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._seed = 0
        self._backends: list[SimBackend] = []

    def name(self) -> str:
        """What it is."""
        return "simulated"

    def kernel(self) -> DeviceKernel:
        """The kernel that steps rows there."""
        return HostKernel()

    def optimizer(self, params: Any, **options: Any) -> SwapAdamW:
        """An optimizer of parameters there."""
        self._seed += 1
        self._backends.append(SimBackend(self._seed, eagerness=options.pop("eagerness", None)))
        return on_device(params, self._backends[-1], **options)

    def finish(self) -> None:
        """Waits for the device, and lets go of what nobody holds."""
        for backend in self._backends:
            backend.finish()
        races = [str(race) for backend in self._backends for race in backend.races]
        assert not races, races
        gc.collect()

    def forget(self) -> None:
        """Ends one check and what it has made."""
        self.finish()
        self._backends.clear()

    @contextlib.contextmanager
    def nothing_waits(self) -> Iterator[None]:
        """The host must not wait for the device within."""
        before = [backend.counts.synchronizations for backend in self._backends]
        yield
        waits = [backend.counts.synchronizations for backend in self._backends]
        assert waits == before, f"the host waited: {before} synchronisations before, {waits} after"

    def memory(self) -> Memory:
        """Of the device; the simulated one never takes any back."""
        counts = [backend.counts for backend in self._backends]
        asked = sum(one.allocated_bytes for one in counts)
        return Memory(now=asked, peak=asked, requests=sum(_requests(one) for one in counts))

    def forget_peak(self) -> None:
        """What memory there was at most counts from now on."""
        return

    def delay(self, optimizer: SwapAdamW, stream: Stream) -> None:
        """Makes a stream of the optimizer's busy for some milliseconds."""
        return

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for what this asks for."""
        begun = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - begun


class CudaTarget(Target):
    """A GPU, the current one."""

    is_dry = False

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", torch.cuda.current_device())

    def name(self) -> str:
        """The GPU's."""
        return torch.cuda.get_device_name(self.device)

    def kernel(self) -> DeviceKernel:
        """The Triton kernel."""
        return TritonKernel()

    def optimizer(self, params: Any, **options: Any) -> SwapAdamW:
        """An optimizer as users make it."""
        options.pop("eagerness", None)
        return SwapAdamW(params, **{"chunk_bytes": 16 << 10, **options})

    def finish(self) -> None:
        """Waits for the device, and lets go of what nobody holds."""
        torch.cuda.synchronize(self.device)
        gc.collect()

    @contextlib.contextmanager
    def nothing_waits(self) -> Iterator[None]:
        """Torch raises where it makes the host wait."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def memory(self) -> Memory:
        """As torch's allocator counts it."""
        stats = torch.cuda.memory_stats(self.device)
        return Memory(
            now=stats["allocated_bytes.all.current"],
            peak=stats["allocated_bytes.all.peak"],
            requests=stats["allocation.all.allocated"],
        )

    def forget_peak(self) -> None:
        """Also of what waits to be handed out again."""
        self.finish()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def delay(self, optimizer: SwapAdamW, stream: Stream) -> None:
        """A kernel that does nothing for a while."""
        with torch.cuda.stream(optimizer._engine.backend._stream(stream)):
            torch.cuda._sleep(_SLEEP_CYCLES)

    def seconds(self, work: Callable[[], object]) -> float:
        """By the host's clock, the device being idle before and after."""
        torch.cuda.synchronize(self.device)
        return super().seconds(work)


def _requests(counts: Counts) -> int:
    return counts.allocations + counts.host_allocations


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors, wherever they are, hold the same; of NaNs it is enough that both are."""
    one, two = left.detach().cpu().contiguous().reshape(-1), right.detach().cpu().contiguous().reshape(-1)
    if one.dtype != two.dtype or left.shape != right.shape:
        return False
    # Bits: zeros have signs.
    bits = torch.int16 if one.element_size() == 2 else torch.int32
    differ = one.view(bits) != two.view(bits)
    if one.dtype.is_floating_point:
        differ &= ~(one.isnan() & two.isnan())
    return not differ.any()
