"""Which engine updates parameters: it hangs on where they are."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from shardopt.errors import PlacementError
from shardopt.swap.backend import CudaBackend
from shardopt.swap.device_engine import DeviceEngine
from shardopt.swap.engine import Engine
from shardopt.swap.held import Keeps
from shardopt.swap.host_engine import HostEngine
from shardopt.swap.launches import TritonKernel
from shardopt.swap.triton_kernel import require_triton

__all__ = ["EngineOptions", "make_engine"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What ``SwapAdamW`` was given; see there.

    Attributes:
        keeps: what is kept for each parameter.
        pin: whether slabs are registered with CUDA, or "auto".
        seed: of random bits.
        num_threads: at most so many step on the host.
        chunk_bytes: of state that is copied at a time.
        budget_bytes: of device memory for state that stays there.
    """

    keeps: Keeps
    _: KW_ONLY
    pin: bool | str
    seed: int
    num_threads: int | None
    chunk_bytes: int
    budget_bytes: int


def make_engine(device: torch.device, options: EngineOptions) -> Engine:
    """The engine for parameters on a device.

    Raises:
        PlacementError: there is none for it.
        ImportError: it needs triton, which cannot be imported.
    """
    if device.type == "cpu":
        return HostEngine(options.keeps, pin=options.pin is True, seed=options.seed, num_threads=options.num_threads)
    if device.type != "cuda":
        raise PlacementError(
            f"SwapAdamW cannot update parameters on {device}: it knows the host and CUDA devices. Keep them on the "
            "host (fully_shard(..., offload_policy=CPUOffloadPolicy()), or model.cpu())."
        )
    require_triton()
    backend = CudaBackend(device)
    return DeviceEngine(
        options.keeps,
        device=backend.device,
        backend=backend,
        kernel=TritonKernel(),
        pin=options.pin is not False,
        seed=options.seed,
        chunk_bytes=options.chunk_bytes,
        budget_bytes=options.budget_bytes,
    )
