"""Parameters that are not sharded and whose state is each rank's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.ranks import RankPool
from tests.support.rules import state
from tests.support.snapshot import snapshot


class Experts(nn.Module):
    """A sharded layer, and an expert that is another on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(3, 5)
        self.expert = nn.Parameter(torch.ones(2, 2))

    def forward(self) -> None:
        """Never run: gradients are set."""


def make(plain: str, steps: int) -> tuple[ShardedStateOptimizer, Experts]:
    model = Experts()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params={model.expert})
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=0.125), model, plain=plain)
    for step in range(steps):
        for param in model.dense.parameters():
            param.grad = torch.ones_like(param)
        model.expert.grad = torch.full((2, 2), 1.0 + step + 10 * dist.get_rank())
        optimizer.step()
    return optimizer, model


def own(optimizer: ShardedStateOptimizer, model: Experts) -> Any:
    return state(optimizer, nn.ParameterDict({"expert": model.expert}))


def save(root: str, plain: str = "per_rank") -> tuple[Any, str]:
    optimizer, model = make(plain, 2)
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    return own(optimizer, model), repr(optimizer)


def load(root: str, steps: int, stock: bool) -> Any:
    optimizer, model = make("per_rank", steps)
    if stock:
        dcp.load({"optim": optimizer}, checkpoint_id=root)
    else:
        optimizer.prepare_load(root).commit()
    return own(optimizer, model)


def refused(root: str, plain: str) -> tuple[str, list[str]]:
    optimizer, model = make(plain, 1)
    before = snapshot(optimizer, model)
    with pytest.raises(LoadError) as caught:
        optimizer.prepare_load(root)
    return str(caught.value), before.diff(snapshot(optimizer, model))


def load_cast(root: str, dtype: str) -> Any:
    """Into an expert of another dtype."""
    model = Experts()
    model.expert = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params={model.expert})
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=0.125), model, plain="per_rank")
    try:
        optimizer.prepare_load(root, dtype=dtype).commit()
    except LoadError as error:
        return str(error)
    return {entry: value.dtype for entry, value in optimizer.state[model.expert].items()}


def test_state_of_ones_own_is_held_to_its_dtype(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path))
    for text in ranks.run(2, load_cast, str(tmp_path), "same"):
        assert "expert: state 'exp_avg' was saved as float32, this optimizer keeps bfloat16" in text
    for kept in ranks.run(2, load_cast, str(tmp_path), "live"):
        assert kept == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def load_anew(root: str) -> bool:
    optimizer, model = make("per_rank", 1)
    optimizer.prepare_load(root, fresh=["expert"]).commit()
    return model.expert in optimizer.state


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_each_rank_gets_its_own_state_back_B8(stock: bool, steps: int, ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(2, save, str(tmp_path))
    assert saved[0][0] != saved[1][0]
    assert "not sharded, each rank's own: expert\n" in saved[0][1] + "\n"
    assert ranks.run(2, load, str(tmp_path), steps, stock) == [one for one, _ in saved]


def test_state_that_differs_is_refused_unless_it_is_declared_B8(ranks: RankPool, tmp_path: Path) -> None:
    for outcome in ranks.outcomes(2, save, str(tmp_path / "none"), "replicated"):
        assert outcome.error_type == "RankFailureError"
        assert "expert: state 'exp_avg' of a parameter that is not sharded: rank 0 / rank 1" in outcome.error
        assert "plain='per_rank'" in outcome.error


def test_another_number_of_ranks_is_refused_and_can_start_anew(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path))
    for world_size in (1, 4):
        for text, changes in ranks.run(world_size, refused, str(tmp_path), "per_rank"):
            assert "expert: each of 2 ranks has saved state of its own" in text
            assert changes == []
        assert ranks.run(world_size, load_anew, str(tmp_path)) == [False] * world_size


def test_replicated_parameters_do_not_take_state_of_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path))
    for text, changes in ranks.run(2, refused, str(tmp_path), "replicated"):
        assert "wrap it unsharded, on as many ranks, with plain='per_rank'" in text
        assert changes == []


def test_an_unknown_kind_of_plain_is_refused() -> None:
    model = Experts()
    with pytest.raises(ValueError, match="expected one of 'replicated', 'per_rank'"):
        ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model, plain="own")
