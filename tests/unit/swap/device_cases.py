"""SwapAdamW on a simulated device, beside one on the host over the same parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardopt import SwapAdamW
from shardopt.swap import swap_adamw
from shardopt.swap.device_engine import DeviceEngine
from shardopt.swap.engines import EngineOptions
from shardopt.swap.simulated_kernel import HostKernel
from shardopt.swap.simulator import SimBackend

BF16 = torch.bfloat16

# Of fp32 moments, 128 bytes a block row: two blocks of 1,024 elements.
CHUNK_BYTES = 16 << 10


@contextmanager
def simulated(backend: SimBackend) -> Iterator[None]:
    """Optimizers that are made within update parameters on the simulated device."""

    def make(device: torch.device, options: EngineOptions) -> DeviceEngine:
        return DeviceEngine(
            options.keeps,
            device=device,
            backend=backend,
            kernel=HostKernel(),
            pin=False,
            seed=options.seed,
            chunk_bytes=options.chunk_bytes,
            budget_bytes=options.budget_bytes,
        )

    genuine = swap_adamw.make_engine
    swap_adamw.make_engine = make
    try:
        yield
    finally:
        swap_adamw.make_engine = genuine


def on_device(params: Any, backend: SimBackend, **options: Any) -> SwapAdamW:
    """An optimizer whose state streams through the simulated device."""
    with simulated(backend):
        return SwapAdamW(params, **{"chunk_bytes": CHUNK_BYTES, **options})


SHAPES = [(7,), (64, 33), (5000,), (3, 1), (0, 4), (33, 100), (1,)]


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters whose values hang on their place."""
    return [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(place)).to(dtype))
        for place, shape in enumerate(shapes)
    ]


def give_gradients(params: Sequence[nn.Parameter], step: int, *, without: Sequence[int] = ()) -> None:
    """New gradients; those of the step before stay alive in what has not run yet."""
    for place, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + place)
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if place in without else grad


def everything(params: Sequence[nn.Parameter], optimizer: SwapAdamW) -> list[Tensor]:
    """State, then weights: reading the state waits for the device."""
    state = [entry for param in params for _, entry in sorted(optimizer.state[param].items())]
    return [*state, *(param.detach() for param in params)]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "bf16 moments": {"moment_dtype": BF16, "amsgrad": True, "seed": 7},
    "bf16": {"dtype": BF16},
    "fp32 masters": {"dtype": BF16, "master": "fp32", "moment_dtype": BF16},
    "remainders": {"dtype": BF16, "master": "remainder16"},
}


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.0}]


def pair(
    seed: int, kind: str = "plain", **options: Any
) -> tuple[list[Any], SwapAdamW, list[Any], SwapAdamW, SimBackend]:
    """An optimizer on a device, and its twin on the host."""
    given = {**KINDS[kind], **options}
    dtype = given.pop("dtype", torch.float32)
    params, twins = parameters(dtype=dtype), parameters(dtype=dtype)
    backend = SimBackend(seed)
    host = {key: value for key, value in given.items() if key != "device_budget_bytes"}
    return (
        params,
        on_device(groups(params), backend, lr=0.05, **given),
        twins,
        SwapAdamW(groups(twins), lr=0.05, **host),
        backend,
    )


def step_both(params: list[Any], optimizer: SwapAdamW, twins: list[Any], other: SwapAdamW, number: int) -> None:
    for some in (params, twins):
        give_gradients(some, number, without=(number % len(some),))
    optimizer.step()
    other.step()
