"""Job: runs blocks of the documentation as a script would, in one namespace."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import shardopt
from tests.support.docs_blocks import Session

IMPORTED = {"shardopt": shardopt, "torch": torch, "dcp": dcp, "fully_shard": fully_shard}


def run_session(session: Session, path: str) -> int:
    """Runs the blocks; returns how many there were.

    They find what pages take for granted: imports, a ``model``, a ``batch``, and ``path``, a directory that sessions of
    one page share; where the model is sharded also an ``optimizer`` that has stepped, its ``scheduler`` and ``step``.
    """
    torch.manual_seed(0)
    # Weights of more than 4,096 elements have 8-bit state.
    layers = {"body": nn.Linear(64, 96), "tanh": nn.Tanh(), "head": nn.Linear(96, 64)}
    model = nn.Sequential(OrderedDict(layers))
    names: dict[str, Any] = {**IMPORTED, "CPUOffloadPolicy": CPUOffloadPolicy}
    names.update(model=model, batch=torch.ones(8, 64), path=path)
    if session.sharded:
        names.update(_training(model, names["batch"]))
    for block in session.blocks:
        # Lines of tracebacks are the page's.
        exec(compile("\n" * (block.line - 1) + block.code, session.page, "exec"), names)
    return len(session.blocks)


def _training(model: nn.Sequential, batch: torch.Tensor) -> dict[str, Any]:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = shardopt.ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    model(batch).square().mean().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    optimizer.zero_grad()
    return {"optimizer": optimizer, "scheduler": scheduler, "step": 1}
