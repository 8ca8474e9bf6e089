"""LBFGS, which calls its closure several times in a step, on the sharded model and unsharded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt import ShardedStateOptimizer
from tests.ranks.trajectories import VOTE_TIMEOUT_S, Held, Track, slices
from tests.ranks.whole_runs import weights_of


def lbfgs_job(topology: str | None) -> tuple[Held, list[float], int]:
    """Three steps: weights, the losses that ``step`` has returned, and how often the closure was called."""
    track = Track(topology)
    used = {fqn: param for fqn, param in track.params.items() if fqn != "odd.idle"}
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(
        list(used.values()), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    )
    if topology is not None:
        optimizer = ShardedStateOptimizer(optimizer, track.model, vote_timeout=VOTE_TIMEOUT_S)
    source = torch.Generator().manual_seed(3)
    target = {fqn: torch.randn(param.shape, generator=source) for fqn, param in used.items()}
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for fqn, param in used.items():
            # As the model's forward pass would see it: the weights that the optimizer is trying.
            off = (param.full_tensor() if isinstance(param, DTensor) else param).detach() - target[fqn]
            loss += (off**4).sum()
            give(param, 4 * off**3, fqn)
        return loss

    def give(param: Tensor, gradient: Tensor, fqn: str) -> None:
        if not isinstance(param, DTensor):
            param.grad = gradient
            return
        part = gradient[slices(track.boxes[fqn])].clone()
        param.grad = DTensor.from_local(
            part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    return weights_of(track), losses, calls
