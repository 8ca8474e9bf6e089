"""Clips that one rank alone cannot take part in."""

from __future__ import annotations

import torch
import torch.distributed as dist

import shardopt
from tests.ranks.swap_jobs import make, set_gradients


def spoilt_clip_job() -> tuple[str, str]:
    """On rank 1 a moment has another shape; what every rank raises, while the group works on."""
    model, optimizer = make("fsdp", "plain", wrapped=False)
    set_gradients(model, 0)
    own = optimizer.state[model.scale]["exp_avg"]
    if dist.get_rank() == 1:
        optimizer.state[model.scale]["exp_avg"] = torch.zeros(99)
    try:
        optimizer.clip_grad_norm_(1.0)
        raised = ("nothing", "")
    except shardopt.ShardoptError as error:
        raised = (type(error).__name__, str(error))
    optimizer.state[model.scale]["exp_avg"] = own
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return raised
