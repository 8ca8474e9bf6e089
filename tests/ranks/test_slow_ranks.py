"""A rank that is merely slow: the others wait in a vote, with its deadline and not that of the process group."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import ShardedStateOptimizer
from tests.ranks.refusals import SHAPE
from tests.support.models import build, set_gradients
from tests.support.ranks import RankPool

GROUP_S = 1.5  # what the process group lets a collective wait
SLOW_S = 2.5 * GROUP_S


class SlowToStage:
    """Something else in the checkpoint that takes its time on rank 0."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 0:
            time.sleep(SLOW_S)
        return {"value": torch.ones(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


def _impatient_group() -> None:
    """The job's process group anew, with a limit that slow ranks exceed."""
    rank, world_size, store = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("impatient", store.clone()),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_S),
    )


def outlast(path: str) -> tuple[int, bool]:
    """The steps after a slow step and a slow save, and whether a collective would have given up."""
    _impatient_group()
    model = build("fsdp", SHAPE)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model, vote_timeout=60.0)
    slow = optimizer.register_step_pre_hook(lambda *_: time.sleep(SLOW_S) if dist.get_rank() == 0 else None)
    set_gradients(model, 0)
    optimizer.step()
    slow.remove()
    shardopt.save({"optim": optimizer, "slow": SlowToStage()}, path, timeout_s=60.0)
    optimizer.step()
    steps = int(optimizer.state[next(model.parameters())]["step"])
    try:
        if dist.get_rank() == 0:
            time.sleep(SLOW_S)
        dist.barrier()
    except RuntimeError as error:
        return steps, "imed out" in str(error)
    return steps, False


@pytest.mark.slow
def test_a_slow_rank_outlasts_the_groups_time_limit_in_steps_and_saves_E7(ranks: RankPool, tmp_path: Any) -> None:
    seen = ranks.run(2, outlast, str(tmp_path / "saved"), deadline_s=60.0)
    assert [steps for steps, _ in seen] == [2, 2]
    assert seen[1][1], "the group would have waited too: this shows nothing"
