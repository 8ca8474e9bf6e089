"""Classes that nobody has told shardopt of: element-wise ones are found to be that, and equal the unsharded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import ShardedStateOptimizer
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import Shape, SmallModel, build, set_gradients
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences

SHAPE = Shape()
STEPS_SAVED = 3
STEPS = 6


class SignOfMomentum(torch.optim.Optimizer):
    """A step of ``lr`` against the sign of an interpolated momentum; the sums of signs are kept as integers."""

    def __init__(self, params: Any, lr: float, beta: float = 0.75) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"count": 0, "average": torch.zeros_like(param), "signs": torch.zeros_like(param).int()}
                state["count"] += 1
                state["average"].lerp_(param.grad, 1 - group["beta"])
                signs = state["average"].sign()
                state["signs"] += signs.int()
                param.sub_(signs, alpha=group["lr"])


def made(topology: Any) -> tuple[ShardedStateOptimizer, SmallModel]:
    model = build(topology, SHAPE)
    return ShardedStateOptimizer(SignOfMomentum(model.parameters(), lr=0.125), model), model


def train(optimizer: ShardedStateOptimizer, model: SmallModel, steps: range) -> dict[str, Any]:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
    return {**gathered(optimizer, model), **gathered_parameters(model)}


def save(topology: Any, path: str) -> tuple[dict[str, Any], str]:
    optimizer, model = made(topology)
    train(optimizer, model, range(STEPS_SAVED))
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    return train(optimizer, model, range(STEPS_SAVED, STEPS)), optimizer.explain()


def resume(topology: Any, path: str) -> dict[str, Any]:
    optimizer, model = made(topology)
    dcp.load({"model": model}, checkpoint_id=path)
    optimizer.prepare_load(path).commit()
    return train(optimizer, model, range(STEPS_SAVED, STEPS))


@pytest.mark.parametrize(("topology", "world_size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp_tp", 4)])
def test_a_rule_of_ones_own_equals_the_unsharded_run_and_moves_between_rank_counts(
    topology: str, world_size: int, ranks: RankPool, tmp_path: Path
) -> None:
    (oracle, _), *_ = ranks.run(1, save, "plain", str(tmp_path / "plain"))
    for found, said in ranks.run(world_size, save, topology, str(tmp_path / "sharded")):
        assert value_differences(oracle, found) == []
        assert "compute='local'" in said
    for path in ("plain", "sharded"):
        for resumed in ranks.run(world_size, resume, topology, str(tmp_path / path)):
            assert value_differences(oracle, resumed) == []
    for resumed in ranks.run(1, resume, "plain", str(tmp_path / "sharded")):
        assert value_differences(oracle, resumed) == []
