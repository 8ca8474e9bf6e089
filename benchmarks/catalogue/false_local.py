"""Looks for classes that auto calls element-wise and that are not: 200 steps at the shapes models have, cut in two.

No ranks: what a rank of a local run does is the rule on its part of each parameter, and nothing else. Two kinds of
gradients, since each shows couplings that the other never does: random ones, whose size swings over four decades, one
of them zero and one missing; and those of a quadratic loss with noise.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.catalogue.models import TrainedModel
from benchmarks.catalogue.protocols import classes, protocol_of
from benchmarks.catalogue.sessions import seed_step
from shardopt import ShardedStateOptimizer

__all__ = ["NUM_STEPS", "false_locals", "first_difference"]

NUM_STEPS = 200

_SHAPES: Mapping[str, tuple[int, ...]] = {
    "mix": (160, 192),
    "offsets": (5001,),
    "conv": (128, 3, 3, 3),
    "embed": (250, 64),
    "norm": (256,),
    "down": (8, 192),
    "up": (64, 8),
}
# Where dim 0 is cut, evenly and unevenly. Every first part is a multiple of 64 elements: torch's vector loops round
# what is left over otherwise, and that is no coupling. So the rest of ``offsets`` is left over in whole and part alike.
_CUTS: tuple[Mapping[str, int], ...] = (
    {"mix": 80, "offsets": 2560, "conv": 64, "embed": 125, "norm": 128, "down": 4, "up": 32},
    {"mix": 97, "offsets": 64, "conv": 128, "embed": 249, "norm": 192, "down": 0, "up": 8},
)

Gradient = Callable[[int, str, Tensor, Tensor], Tensor | None]
Cut = Mapping[str, slice]


class _Parts(TrainedModel):
    """Parameters of these names and values, and no loss."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def _given(step: int, name: str, noise: Tensor, param: Tensor) -> Tensor | None:
    if step == 2 and name == "mix":
        return torch.zeros_like(noise)
    return None if step == 3 and name == "conv" else noise * 10.0 ** (step % 4 - 2)


def _dependent(step: int, name: str, noise: Tensor, param: Tensor) -> Tensor | None:
    return None if step == 6 and name == "conv" else param / 2 + noise / 10


_REGIMES: Mapping[str, Gradient] = {"random": _given, "closed-loop": _dependent}


def false_locals(names: Sequence[str]) -> tuple[int, list[str]]:
    """How many of the classes auto calls local, and a line for each of them that is not."""
    num_local, wrong = 0, []
    with _alone():
        for name in names:
            if protocol_of(name).calls != "step" or not _is_local(name):
                continue
            num_local += 1
            found = [
                f"with {regime} gradients {where}"
                for regime, gradient in _REGIMES.items()
                if (where := first_difference(name, gradient)) is not None
            ]
            wrong += [f"{name}: {'; '.join(found)}"] * bool(found)
            print(f"{num_local:4} {name:45}{'differs' if found else 'same'}", flush=True)
    return num_local, wrong


def first_difference(name: str, gradient: Gradient, *, num_steps: int = NUM_STEPS) -> str | None:
    """Where parts first get other bits than the whole, in words; None if they never do."""
    wholes = _steps(name, gradient, {key: slice(None) for key in _SHAPES}, num_steps)
    cuts: list[Cut] = []
    for cut in _CUTS:
        cuts += [{key: slice(0, at) for key, at in cut.items()}, {key: slice(at, None) for key, at in cut.items()}]
    runs = [_steps(name, gradient, cut, num_steps) for cut in cuts]
    for step, whole in enumerate(wholes):
        for cut, run in zip(cuts, runs, strict=True):
            try:
                parts = next(run)
            except Exception as error:
                return f"parts raise {type(error).__name__} at step {step + 1}: {str(error)[:100]}"
            for key, part in parts.items():
                if not torch.equal(part.view(torch.int32), whole[key][cut[key]].view(torch.int32)):
                    rows = f"rows {cut[key].start} to {'the end' if cut[key].stop is None else cut[key].stop}"
                    return f"{rows} of {key} differ at step {step + 1}"
    return None


def _steps(name: str, gradient: Gradient, cut: Cut, num_steps: int) -> Iterator[dict[str, Tensor]]:
    """Parameters after each step of a run on parts of them."""
    source = torch.Generator().manual_seed(5)
    model = _Parts({key: (torch.randn(shape, generator=source) / 8)[cut[key]] for key, shape in _SHAPES.items()})
    optimizers: Sequence[Any] = protocol_of(name).make(classes()[name], model)
    for step in range(num_steps):
        for key, param in model.named_parameters():
            noise = torch.randn(_SHAPES[key], generator=source)[cut[key]]
            found = gradient(step, key, noise, param.detach())
            param.grad = None if found is None else found.clone()
        seed_step(step)
        for optimizer in optimizers:
            optimizer.step()
        yield {key: param.detach() for key, param in model.named_parameters()}


def _is_local(name: str) -> bool:
    model = _Parts({key: torch.zeros(shape) + 0.1 for key, shape in _SHAPES.items()})
    try:
        optimizers: Sequence[Any] = protocol_of(name).make(classes()[name], model)
        said = ShardedStateOptimizer(optimizers, model).explain()
    except Exception:
        # What cannot be made of these parameters, or not be wrapped, is not called local.
        return False
    return "compute='local'" in said.partition("\n")[0]


@contextmanager
def _alone() -> Iterator[None]:
    """One thread, and without the advice that classes of other libraries log and warn of."""
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            logging.disable(disabled)
