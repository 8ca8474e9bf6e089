"""What is measured: votes of threads, manifests, DCP's plans for simulated ranks, bytes of an owner exchange."""

from __future__ import annotations

import io
import logging
import pickle
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.fsdp import fully_shard

from shardopt import ShardedStateOptimizer
from shardopt.collector import paused_collector
from shardopt.geometry import Box
from shardopt.portable.handles import BoxHandle
from shardopt.presentation.ownership import Balance
from shardopt.scope.ballot import Ballot
from shardopt.scope.channel import Channel
from shardopt.scope.record import Record

__all__ = [
    "PlanSizes",
    "bitsandbytes_adamw",
    "exchanged_bytes",
    "manifest_bytes",
    "owner_loads",
    "plan_sizes",
    "vote_ms",
]

_TIMEOUT = timedelta(seconds=120)
_WARM_UP_VOTES = 5
# On 4 ranks 34 rows each, of 4,420 elements: enough for 8-bit state, and no whole number of blocks, so that each rank's
# part is described by itself.
_QUANTISED_SHAPE = (136, 130)
_SHAPE = (8, 4)


def vote_ms(num_ranks: int, votes: int) -> list[float]:
    """Milliseconds from the first rank's vote to the last one's verdict, of each of some votes of as many threads."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    begun = [[0.0] * num_ranks for _ in range(votes + _WARM_UP_VOTES)]
    ended = [[0.0] * num_ranks for _ in range(votes + _WARM_UP_VOTES)]
    together = threading.Barrier(num_ranks)

    def rank(index: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=_TIMEOUT)
        ballot = Ballot(dist.PrefixStore("vote", store), range(num_ranks), index, timeout_s=_TIMEOUT.total_seconds())
        for vote in range(len(begun)):
            together.wait()
            begun[vote][index] = time.perf_counter()
            if not ballot.cast(Record("step")).ok:
                raise RuntimeError(f"vote {vote} of {num_ranks} threads failed")
            ended[vote][index] = time.perf_counter()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(map(all, ended)):
        raise RuntimeError(f"a thread of {num_ranks} did not finish its votes")
    times = [1e3 * (max(end) - min(start)) for start, end in zip(begun, ended, strict=True)]
    return [round(value, 3) for value in times[_WARM_UP_VOTES:]]


def bitsandbytes_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """A new AdamW8bit."""
    # It logs which of its GPU kernels it does without.
    logging.disable(logging.WARNING)
    try:
        import bitsandbytes
    finally:
        logging.disable(logging.NOTSET)
    return bitsandbytes.optim.AdamW8bit(params)


def manifest_bytes(kind: str, num_params: int) -> int:
    """Collective. Length of the manifest of an optimizer that has stepped once."""
    shape = _SHAPE if kind == "AdamW" else _QUANTISED_SHAPE
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for _ in range(num_params))
    fully_shard(model)
    if kind == "AdamW":
        inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:
        inner = bitsandbytes_adamw(model.parameters())
    optimizer = ShardedStateOptimizer(inner, model, compute="local")
    for param in model.parameters():
        param.grad = torch.ones_like(param, requires_grad=False)
    optimizer.step()
    (manifest,) = optimizer.state_dict()["manifest"].tensors
    return manifest.numel()


@dataclass(frozen=True, kw_only=True)
class PlanSizes:
    """Of one save.

    Attributes:
        plan_bytes: of one rank's plan, pickled.
        planning_s: of CPU, in which the first rank plans for all.
        metadata_bytes: of what describes the checkpoint, pickled.
    """

    plan_bytes: int
    planning_s: float
    metadata_bytes: int


def plan_sizes(num_params: int, num_ranks: int) -> PlanSizes:
    """Two moments of each parameter, of which every simulated rank has a row; planned by DCP."""
    plans: list[Any] = []
    for rank in range(num_ranks):
        planner = DefaultSavePlanner()
        planner.set_up_planner(_handles(num_params, num_ranks, rank), is_coordinator=rank == 0)
        plans.append(pickle.dumps(planner.create_local_plan()))
    planner = DefaultSavePlanner()
    planner.set_up_planner(_handles(num_params, num_ranks, 0), is_coordinator=True)
    planner.create_local_plan()
    # Of this process alone: one thread plans, and the machine may have others to serve.
    begun = time.process_time()
    with paused_collector():
        parts, metadata = planner.create_global_plan([pickle.loads(plan) for plan in plans])
        for part in parts:
            pickle.dumps(part)
    planning_s = time.process_time() - begun
    file = io.BytesIO()
    pickle.dump(metadata, file)
    return PlanSizes(plan_bytes=len(plans[-1]), planning_s=planning_s, metadata_bytes=len(file.getvalue()))


def _handles(num_params: int, num_ranks: int, rank: int) -> dict[str, Any]:
    row = torch.zeros(1, 4)
    box = Box((rank, 0), (1, 4))
    return {
        f"optim.state.layers.{index}.attention.weight.{name}": BoxHandle.make(
            (num_ranks, 4), box, row, like=row, place=lambda local: local
        )
        for index in range(num_params)
        for name in ("exp_avg", "exp_avg_sq")
    }


def owner_loads(volumes: Sequence[int], num_ranks: int) -> list[int]:
    """Elements that each rank owns."""
    balance = Balance(num_ranks)
    balance.assign(volumes)
    return balance.loads


def exchanged_bytes(shapes: Sequence[tuple[int, int]]) -> int:
    """Collective. Bytes that this rank sends in a step with owners."""
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
    fully_shard(model)
    optimizer = ShardedStateOptimizer(torch.optim.Muon(list(model.parameters())), model, compute="owner")
    for param in model.parameters():
        param.grad = torch.ones_like(param, requires_grad=False)
    sent = 0
    genuine = Channel.exchange

    def counted(self: Channel, received: Tensor, out: Tensor, *sizes: Sequence[int]) -> None:
        nonlocal sent
        sent += out.numel()
        genuine(self, received, out, *sizes)

    Channel.exchange = counted  # type: ignore[method-assign]
    try:
        optimizer.step()
    finally:
        Channel.exchange = genuine  # type: ignore[method-assign]
    return sent
