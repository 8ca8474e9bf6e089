"""What the frozen checkpoints were made of, and how their expected values are written down. Never change a format's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shardopt import ShardedStateOptimizer

DIRECTORY = Path(__file__).resolve().parent
# scripts/cross_torch.sh has other checkpoints of the same optimizer read.
FORMAT1 = Path(os.environ.get("GOLDEN_FOLDER", DIRECTORY / "format1"))
STEPS = 2


class Format1Model(nn.Module):
    """5 and 1 rows do not divide by 2 or 4; ``idle`` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.one = nn.Parameter(torch.empty(1, 2))
        self.idle = nn.Parameter(torch.empty(4))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(-1, 1, param.numel()).reshape(param.shape))


def build(world_size: int) -> tuple[ShardedStateOptimizer, Format1Model]:
    """The optimizer that format 1 was saved from, with the options a fresh one has. 0 ranks: no process group."""
    model = Format1Model()
    if world_size:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    groups = [
        {"params": [model.layer.weight, model.one], "lr": torch.tensor(0.5)},
        {"params": [model.layer.bias, model.idle], "weight_decay": 0.0},
    ]
    inner = torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75), amsgrad=True, foreach=False)
    return ShardedStateOptimizer(inner, model, vote_timeout=60.0), model


def train(optimizer: ShardedStateOptimizer, model: Format1Model) -> None:
    """The steps before the save, and the schedule's last word on ``lr``."""
    for step in range(1, STEPS + 1):
        for name, param in model.named_parameters():
            if name == "idle":
                continue
            whole = torch.linspace(-step, 2 * step, param.numel()).reshape(param.shape)
            sharded = isinstance(param, DTensor)
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements) if sharded else whole
        optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.0625)
    optimizer.param_groups[1]["lr"] = 0.03125


def spell(values: dict[str, Any]) -> str:
    """Values as JSON, tensors as (dtype, shape, row-major bytes in hex)."""
    return json.dumps(values, default=_spell_tensor, indent=1, sort_keys=True) + "\n"


def _spell_tensor(value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise TypeError(f"cannot write down a {type(value).__name__}")
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": raw.numpy().tobytes().hex()}
