"""Jobs that use DCP's and torch's settings, or break what the wrapper relies on, on one topology."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardopt import ShardedStateOptimizer
from tests.ranks.trajectories import Held, Track
from tests.support.rules import Rule

ADAMW = Rule(torch.optim.AdamW, {"lr": 0.125, "amsgrad": True})


class CachingPlanner(dcp.DefaultSavePlanner):
    """A class of its own, because torch keeps the plans by the planner's class name and for the process's life."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def _save_in_two_threads(optimizer: torch.optim.Optimizer, path: str) -> None:
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
    dcp.save({"optim": optimizer}, storage_writer=writer)


def _save_with_cached_plans(optimizer: torch.optim.Optimizer, path: str) -> None:
    dcp.save({"optim": optimizer}, checkpoint_id=path, planner=CachingPlanner())


def _save_unflattened(optimizer: torch.optim.Optimizer, path: str) -> None:
    dcp.save(optimizer.state_dict(), checkpoint_id=path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))


def _load(optimizer: torch.optim.Optimizer, path: str) -> None:
    dcp.load({"optim": optimizer}, checkpoint_id=path)


def _load_unflattened(optimizer: torch.optim.Optimizer, path: str) -> None:
    state_dict = optimizer.state_dict()
    dcp.load(state_dict, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    optimizer.load_state_dict(state_dict)


SETTINGS: dict[str, tuple[Callable[[Any, str], None], Callable[[Any, str], None]]] = {
    "two threads": (_save_in_two_threads, _load),
    "cached plans": (_save_with_cached_plans, _load),
    "unflattened": (_save_unflattened, _load_unflattened),
}


def differing(got: Held, want: Held) -> list[str]:
    """Keys in which two states of one rank differ in bits; weights count too."""
    keys = {*got.parts, *want.parts, *got.values, *want.values}
    return sorted(key for key in keys if _bits(got, key) != _bits(want, key))


def _bits(held: Held, key: str) -> Any:
    if key in held.parts:
        box, values = held.parts[key]
        return box, values.tobytes()
    return held.values.get(key)


def save_and_load_job(topology: str, setting: str, root: str) -> list[list[str]]:
    """Saves three times with the setting: without state, then with, then with changed values and equal sizes.

    Returns:
        For each save what a fresh optimizer that loads it holds otherwise, on this rank.
    """
    save, load = SETTINGS[setting]
    track = Track(topology)
    optimizer = track.make(ADAMW)
    found = []
    # 12 steps: the counters get a second digit, so the manifest gets longer.
    for name, steps in (("none", range(0)), ("some", range(12)), ("more", range(12, 13))):
        track.train(optimizer, steps)
        path = os.path.join(root, name)
        save(optimizer, path)
        fresh = track.make(ADAMW)
        load(fresh, path)
        found.append(differing(track.held(fresh), track.held(optimizer)))
    return found


def overflow_job(topology: str | None, fused: bool, unscale: bool) -> tuple[Held, list[float]]:
    """Four steps under a GradScaler, of which the second has an inf in one element, which only its holders see.

    Args:
        topology: None for the unsharded run.
        fused: whether the kernel itself unscales and skips.
        unscale: whether gradients are unscaled before the step, as for clipping.

    Returns:
        What this rank holds, and the scale after each step.
    """
    track = Track(topology)
    optimizer = track.make(Rule(torch.optim.AdamW, {"lr": 0.125, "fused": fused}))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    box = track.boxes["odd.column.weight"]
    holds_last = box.end == (7, 3)
    scales = []
    for step in range(4):
        loss_scale = scaler.scale(torch.tensor(1.0)).item()
        track.give_gradients(step, scale=loss_scale)
        if step == 1 and holds_last:
            _local(track.params["odd.column.weight"].grad).view(-1)[-1] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return track.held(optimizer), scales


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_by_hand_job(rows: Sequence[int]) -> None:
    """Wraps an optimizer over one parameter of which rank r holds ``rows[r]`` rows."""
    mesh = init_device_mesh("cpu", (len(rows),))
    part = torch.zeros(rows[dist.get_rank()], 2)
    shape = torch.Size((sum(rows), 2))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=(2, 1)))
    ShardedStateOptimizer(torch.optim.SGD(model.parameters(), lr=0.125), model, vote_timeout=2.0)


def save_unlike_job(path: str, what: str) -> None:
    """Saves after one rank's state of one parameter has become other than its peer's."""
    track = Track("fsdp2+plain")
    optimizer = track.make(ADAMW)
    track.train(optimizer, range(1))
    plain, sharded = track.params["odd.rows3"], track.params["odd.column.weight"]
    if dist.get_rank() == 1:
        if what == "values of a plain parameter":
            optimizer.state[plain]["exp_avg"][0] += 1
        elif what == "a missing state":
            del optimizer.state[sharded]
        else:
            optimizer.param_groups[0]["lr"] = 0.25
    dcp.save({"optim": optimizer}, checkpoint_id=path)
