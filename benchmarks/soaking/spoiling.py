"""Before a leg loads, what it holds is made wrong: an earlier load must not have done the work of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.models import local_tensor

if TYPE_CHECKING:
    from benchmarks.soaking.leg import LegRun

__all__ = ["spoil"]

_ELSEWHERE = 1001  # a step in which late parameters have gradients
_NO_STEP = -1


def spoil(run: LegRun) -> None:
    """Changes weights, state that is there, group values, the scheduler and the number of steps. Collective."""
    optimizer = run.optimizer
    with torch.no_grad():
        for param in run.training.params.values():
            local_tensor(param).mul_(4).add_(1)
    # By a step, which keeps state as the rule has it; where a rank has none, there is none to spoil on any.
    if run.has_state:
        run.training.give_gradients(_ELSEWHERE)
        optimizer.step()
        optimizer.zero_grad()
    run.scheduler.step()
    for inner in optimizer.optimizers:
        for group in inner.param_groups:
            group.update({key: _spoiled(value) for key, value in group.items() if key != "params"})
    run.extra.step = _NO_STEP


def _spoiled(value: Any) -> Any:
    """Another number; what is not one, or chooses the kernel, as it was."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.mul_(0.5).add_(0.125)
    if isinstance(value, tuple):
        return tuple(_spoiled(one) for one in value)
    return value * 0.5 + 0.125 if isinstance(value, float) else value
