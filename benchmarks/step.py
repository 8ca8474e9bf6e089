"""Times the wrapper's step against bare AdamW on the same DTensors.

    python benchmarks/step.py

Parameters and gradients are those of ``fully_shard``, on 1 and on 2 ranks. All variants run in one process and take
turns, a few steps each, so that whatever else the machine does meets all of them alike:

* bare: torch's AdamW on the DTensors;
* wrapped: ShardedStateOptimizer with its defaults (compute local, a vote in every step);
* no vote: the same with consensus="off";
* plain: torch's AdamW on plain tensors of the shards' shape, the least that any wrapper of it can cost.

The ranks start each step together, and a step takes as long as its slowest rank. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness.bars import Bar, print_bars, print_table
from harness.launch import Ranks
from harness.results import LOCAL_RESULTS, conditions, record
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardopt import ShardedStateOptimizer
from shardopt.scope import Scope

# How many times faster than bare the wrapped step has to be.
_REQUIRED = {"fused": 2.5, "foreach": 1.2}
_WARM_UP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured.

    Attributes:
        kernel: the implementation AdamW is told to use, ``"fused"`` or ``"foreach"``.
        tensors: number of parameters.
        rows: rows of each, sharded.
        columns: columns of each.
        steps: steps of each variant that are timed.
        block: steps of one variant before the next has its turn.
    """

    kernel: str
    tensors: int
    rows: int
    columns: int
    steps: int
    block: int


class Bank(nn.Module):
    """Parameters, and a loss that gives each of them a gradient."""

    def __init__(self, tensors: int, rows: int, columns: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(rows, columns)) for _ in range(tensors))

    def forward(self) -> torch.Tensor:
        """Half the sum of squares, so that each gradient is its parameter."""
        return torch.stack([part.square().sum() for part in self.parts]).sum() / 2


def sharded_bank(config: Config) -> Bank:
    """Collective. A bank under ``fully_shard``, after one backward pass: its gradients are FSDP2's own."""
    bank = Bank(config.tensors, config.rows, config.columns)
    fully_shard(bank)
    bank().backward()
    return bank


def plain_bank(config: Config) -> Bank:
    """A bank of plain tensors that have the shape of this rank's shards."""
    rows = len(torch.arange(config.rows).chunk(dist.get_world_size())[dist.get_rank()])
    bank = Bank(config.tensors, rows, config.columns)
    bank().backward()
    return bank


def adamw(bank: Bank, config: Config) -> torch.optim.AdamW:
    """The optimizer under test."""
    return torch.optim.AdamW(bank.parameters(), **{config.kernel: True})


def build_variants(config: Config) -> dict[str, Callable[[], object]]:
    """Collective. What is timed, by name."""
    bare, wrapped, quiet = sharded_bank(config), sharded_bank(config), sharded_bank(config)
    if not all(isinstance(part.grad, DTensor) for part in wrapped.parts):
        raise RuntimeError("fully_shard gave gradients that are no DTensors; this benchmark measures those.")
    scope = Scope.over(range(dist.get_world_size()), timeout_s=60.0, name="benchmark")
    return {
        "bare": adamw(bare, config).step,
        "wrapped": ShardedStateOptimizer(adamw(wrapped, config), wrapped).step,
        "no vote": ShardedStateOptimizer(adamw(quiet, config), quiet, consensus="off").step,
        "plain": adamw(plain_bank(config), config).step,
        "vote": lambda: scope.vote("step"),
    }


def time_steps(config: Config) -> dict[str, list[float]]:
    """Collective. Milliseconds of every step of every variant on this rank."""
    variants = build_variants(config)
    for step in variants.values():
        for _ in range(_WARM_UP_STEPS):
            step()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    # The same order on every rank, another in every round: none always has to follow the one that clears the caches.
    order, names = random.Random(0), list(variants)
    for start in range(0, config.steps, config.block):
        for name in order.sample(names, len(names)):
            for _ in range(min(config.block, config.steps - start)):
                dist.barrier()
                begin = time.perf_counter()
                variants[name]()
                samples[name].append((time.perf_counter() - begin) * 1e3)
    return samples


def slowest(per_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Each step's time on its slowest rank, in microseconds' precision."""
    return {
        name: [round(max(times), 3) for times in zip(*(samples[name] for samples in per_rank), strict=True)]
        for name in per_rank[0]
    }


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure on")
    parser.add_argument("--kernels", nargs="+", default=list(_REQUIRED), choices=list(_REQUIRED))
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--steps", type=int, default=80, help="timed steps of each variant")
    parser.add_argument("--block", type=int, default=2, help="steps of one variant before the next has its turn")
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "step.jsonl", help="file that gets the results")
    return parser.parse_args()


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    bars: list[Bar] = []
    rows: list[list[str]] = []
    names: list[str] = []
    with Ranks(max(arguments.ranks)) as ranks:
        for num_ranks in arguments.ranks:
            for kernel in arguments.kernels:
                sizes = {name: getattr(arguments, name) for name in ("tensors", "rows", "columns", "steps", "block")}
                config = Config(kernel=kernel, **sizes)
                samples = slowest(ranks.run(num_ranks, time_steps, config))
                record(arguments.out, "step", {"ranks": num_ranks, **asdict(config)}, samples)
                medians = {name: statistics.median(times) for name, times in samples.items()}
                names = list(medians)
                label = f"{kernel}=True, {num_ranks} rank{'s' * (num_ranks > 1)}"
                rows.append([label, *(f"{median:.3f}" for median in medians.values())])
                ratio = medians["bare"] / medians["wrapped"]
                bars.append(
                    Bar(name=f"{label}: bare / wrapped", value=ratio, limit=_REQUIRED[kernel], at_least=True, unit="x")
                )
    print(f"AdamW, {arguments.tensors} tensors of {arguments.rows}x{arguments.columns}; load {conditions()['load']}\n")
    print_table(["milliseconds a step, median", *names], rows)
    return print_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
