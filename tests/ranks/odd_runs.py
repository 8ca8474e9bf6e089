"""Rules that draw random numbers or keep turned matrices, and optimizers that one rank alone has stepped."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardopt import ShardedStateOptimizer
from tests.ranks.trajectories import SAVED_AFTER, STEPS, VOTE_TIMEOUT_S, Array, Held, Track
from tests.ranks.whole_runs import weights_of


class Noisy(torch.optim.SGD):
    """Adds noise to every parameter, of the generator that everybody draws from."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn(param.shape), alpha=0.01)


def noisy_job(topology: str, root: str, resume: dict[str, Array] | None) -> tuple[Held, Held, bool]:
    """Weights at the save and at the end, and whether the rank's own generator is where it was.

    Args:
        topology: of the model.
        root: saved to; or with ``resume`` loaded from.
        resume: weights to go on with.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    track = Track(topology)
    # Elsewhere when it goes on: in a new process nobody is where the old one was.
    torch.manual_seed(1000 + rank if resume is None else 2000 + rank)
    optimizer = ShardedStateOptimizer(
        Noisy(list(track.params.values()), lr=0.125), track.model, vote_timeout=VOTE_TIMEOUT_S
    )
    assert optimizer._inventory.parts[0].choice.compute == "replicated"
    before = torch.get_rng_state()
    middle = weights_of(track)
    if resume is None:
        track.put(track.start)
        track.train(optimizer, range(SAVED_AFTER))
        middle = weights_of(track)
        dcp.save({"optim": optimizer}, checkpoint_id=root)
    else:
        dcp.load({"optim": optimizer}, checkpoint_id=root)
        track.put_whole(resume)
    track.train(optimizer, range(SAVED_AFTER, STEPS))
    return middle, weights_of(track), torch.equal(before, torch.get_rng_state())


class Turned(torch.optim.SGD):
    """Keeps a matrix that lies column by column, and sees whether it still does: products round otherwise if not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        params = [param for group in self.param_groups for param in group["params"]]
        norm = sum(float(param.norm()) for param in params)
        for param in params:
            state = self.state[param]
            if not state:
                state["factor"] = torch.randn(5, 3).t()
            assert state["factor"].stride() == (1, 3), state["factor"].stride()
            param.mul_(1 + norm * float(state["factor"].sum()) * 1e-6)


def turned_job(topology: str) -> bool:
    """Whether state lies in every step, on every rank, as the rule has laid it."""
    track = Track(topology)
    inner = Turned(list(track.params.values()), lr=0.125)
    optimizer = ShardedStateOptimizer(inner, track.model, compute="replicated", vote_timeout=VOTE_TIMEOUT_S)
    track.train(optimizer, range(STEPS))
    return True


def warm_job(warm_rank: int) -> str:
    """One rank alone has stepped before its optimizer is wrapped: the error."""
    track = Track("fsdp2")
    inner = torch.optim.SGD(track.params.values(), lr=0.125, momentum=0.5)
    if dist.get_rank() == warm_rank:
        for param in track.params.values():
            inner.state[param]["momentum_buffer"] = torch.zeros_like(param)
    try:
        ShardedStateOptimizer(inner, track.model, compute="owner", vote_timeout=VOTE_TIMEOUT_S)
    except Exception as error:
        total = torch.ones(1)
        dist.all_reduce(total)
        return f"{type(error).__name__}: {error}" * (total.item() == 2)
    return "wrapped"
