"""A thousand steps, in every twentieth of which a rank fails: carrying on gives the bits of a run without failures."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from shardopt import ShardedStateOptimizer
from tests.faults.kinds import RAISED, make_error
from tests.faults.stage import caught
from tests.support.models import Shape, SmallModel, build, local_tensor, set_gradients
from tests.support.ranks import RankPool

SHAPE = Shape(rows=(1, 3), width=3, hidden=5)  # on 4 ranks the last one holds no element of anything
EVERY = 20
VOTE_TIMEOUT_S = 60.0

Undo = Callable[[], object]


def raising(kind: str) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise make_error(kind)

    return fail


def in_the_wrappers_hook(optimizer: ShardedStateOptimizer, model: SmallModel, kind: str) -> Undo:
    return optimizer.register_step_pre_hook(raising(kind)).remove


def in_the_inner_hook(optimizer: ShardedStateOptimizer, model: SmallModel, kind: str) -> Undo:
    return optimizer.optimizers[0].register_step_pre_hook(raising(kind)).remove


def a_plain_gradient(optimizer: ShardedStateOptimizer, model: SmallModel, kind: str) -> Undo:
    model.up.weight.grad = torch.zeros(model.up.weight.shape)
    return bool


def a_gradient_placed_otherwise(optimizer: ShardedStateOptimizer, model: SmallModel, kind: str) -> Undo:
    param: Any = model.up.weight
    param.grad = DTensor.from_local(torch.zeros(param.shape), param.device_mesh, [Replicate()], run_check=False)
    return bool


def another_group(optimizer: ShardedStateOptimizer, model: SmallModel, kind: str) -> Undo:
    params = optimizer.param_groups[0]["params"]
    last = params.pop()
    return lambda: params.append(last)


FAULTS = (
    in_the_wrappers_hook,
    in_the_inner_hook,
    a_plain_gradient,
    a_gradient_placed_otherwise,
    another_group,
    None,  # in the closure
)


class Gradients:
    """A few steps' gradients, to be given again and again."""

    def __init__(self, model: SmallModel) -> None:
        self.params = [*model.parameters()]
        self.drawn: list[list[Any]] = []
        for step in range(7):
            set_gradients(model, step)
            self.drawn.append([param.grad for param in self.params])

    def give(self, step: int) -> None:
        """Those of a step; the optimizer does not write to them."""
        for param, gradient in zip(self.params, self.drawn[step % len(self.drawn)], strict=True):
            param.grad = gradient


def fail_once(optimizer: ShardedStateOptimizer, model: SmallModel, chosen: random.Random) -> str:
    """A step that fails on one rank, the same one for all who have the same generator; what this rank raises."""
    faulty, fault, kind = chosen.randrange(dist.get_world_size()), chosen.choice(FAULTS), chosen.choice([*RAISED])
    bad = dist.get_rank() == faulty
    undo = fault(optimizer, model, kind) if bad and fault is not None else bool
    closure = raising(kind) if fault is None and bad else bool if fault is None else None
    found = caught(lambda: optimizer.step(closure))
    undo()
    assert (found.kind == "RankFailureError" and f"rank {faulty}" in found.text) or (
        bad and kind == "interrupted" and found.kind == "KeyboardInterrupt"
    ), found
    return found.kind


def run(steps: int, every: int) -> tuple[dict[str, int], list[bytes]]:
    """How often each thing was raised, and this rank's part of all parameters and state in the end.

    Without failures nobody votes: what votes do cannot be in the bits that are expected.
    """
    model = build("fsdp", SHAPE)
    inner = torch.optim.AdamW(model.parameters(), lr=0.125)
    consensus = "every-step" if every else "off"
    optimizer = ShardedStateOptimizer(inner, model, consensus=consensus, vote_timeout=VOTE_TIMEOUT_S)
    gradients, chosen = Gradients(model), random.Random(0)
    raised: dict[str, int] = {}
    for step in range(steps):
        gradients.give(step)
        if every and step % every == 0:
            what = fail_once(optimizer, model, chosen)
            raised[what] = raised.get(what, 0) + 1
            gradients.give(step)
        optimizer.step()
    held = [local_tensor(param) for param in model.parameters()]
    held += [local_tensor(value) for entries in optimizer.state.values() for value in entries.values()]
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    return raised, [tensor.numpy().tobytes() for tensor in held]


@pytest.mark.parametrize(("world_size", "steps"), [(2, 1000), (4, 200)])
def test_failures_carried_on_from_leave_no_trace(world_size: int, steps: int, ranks: RankPool) -> None:
    well = ranks.run(world_size, run, steps, 0)
    for (raised, held), (nothing, expected) in zip(ranks.run(world_size, run, steps, EVERY), well, strict=True):
        assert nothing == {}
        assert sum(raised.values()) == steps // EVERY
        assert "" not in raised
        assert held == expected
