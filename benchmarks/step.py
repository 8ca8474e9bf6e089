"""Times the wrapper's step against the bare optimizer's on the same DTensors.

    python benchmarks/step.py

Parameters and gradients are those of ``fully_shard``. All variants run in one process and take turns, a few steps each,
so that whatever else the machine does meets all of them alike. AdamW, on 1 and on 2 ranks:

* bare: torch's AdamW on the DTensors;
* wrapped: ShardedStateOptimizer with its defaults (compute local, a vote in every step);
* no vote: the same with consensus="off";
* plain: torch's AdamW on plain tensors of the shards' shape, the least that any wrapper of it can cost.

Muon on the matrices of a GPT, on 2 and on 4 ranks:

* bare: torch's Muon on the DTensors, whose dispatch redistributes them as each operation needs. On CPUs, and so here,
  it uses an all_gather wherever on GPUs it would use an all_to_all;
* owner: ShardedStateOptimizer with compute="owner" (its default for Muon), which brings each matrix to one rank;
* replicated: the same with compute="replicated", which brings each matrix to every rank.

The ranks start each step together, and a step takes as long as its slowest rank. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
_REQUIRED_OF_MUON = 1.0
_WARM_UP_STEPS = 3
# The first makes the state; a step takes so long that nothing else needs to get warm.
_MUON_WARM_UP_STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured of AdamW.

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

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of all parameters."""
        return [(self.rows, self.columns)] * self.tensors


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """What is measured of Muon.

    Attributes:
        width: of the GPT whose matrices are the parameters.
        layers: its transformer blocks, of four matrices each.
        steps: steps of each variant that are timed; each follows one of another variant.
    """

    width: int
    layers: int
    steps: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of all matrices: attention's two, then those of the feed-forward network."""
        width = self.width
        return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * self.layers


class Bank(nn.Module):
    """Parameters, and a loss that gives each of them a gradient."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self) -> torch.Tensor:
        """Half the sum of squares, so that each gradient is its parameter."""
        return torch.stack([part.square().sum() for part in self.parts]).sum() / 2


def sharded_bank(shapes: Sequence[tuple[int, int]]) -> Bank:
    """Collective. A bank under ``fully_shard``, after one backward pass: its gradients are FSDP2's own."""
    bank = Bank(shapes)
    fully_shard(bank)
    bank().backward()
    if not all(isinstance(part.grad, DTensor) for part in bank.parts):
        raise RuntimeError("fully_shard gave gradients that are no DTensors; this benchmark measures those.")
    return bank


def plain_bank(config: Config) -> Bank:
    """A bank of plain tensors that have the shape of this rank's shards."""
    rows = len(torch.arange(config.rows).chunk(dist.get_world_size())[dist.get_rank()])
    bank = Bank([(rows, config.columns)] * config.tensors)
    bank().backward()
    return bank


def adamw(bank: Bank, config: Config) -> torch.optim.AdamW:
    """The first optimizer under test."""
    return torch.optim.AdamW(bank.parameters(), **{config.kernel: True})


def time_adamw(config: Config) -> dict[str, list[float]]:
    """Collective. Milliseconds of every step of every variant of AdamW on this rank."""
    bare, wrapped, quiet = (sharded_bank(config.shapes) for _ in range(3))
    scope = Scope.over(range(dist.get_world_size()), timeout_s=60.0, name="benchmark")
    variants: dict[str, Callable[[], object]] = {
        "bare": adamw(bare, config).step,
        "wrapped": ShardedStateOptimizer(adamw(wrapped, config), wrapped).step,
        "no vote": ShardedStateOptimizer(adamw(quiet, config), quiet, consensus="off").step,
        "plain": adamw(plain_bank(config), config).step,
        "vote": lambda: scope.vote("step"),
    }
    return time_in_turns(variants, config.steps, block=config.block, warm_up=_WARM_UP_STEPS)


def time_muon(config: MuonConfig) -> dict[str, list[float]]:
    """Collective. Milliseconds of every step of every variant of Muon on this rank."""

    # Said once in each process, in the middle of the table; the table says it.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)

    def muon(bank: Bank) -> torch.optim.Muon:
        return torch.optim.Muon(bank.parameters())

    bare, owner, replicated = (sharded_bank(config.shapes) for _ in range(3))
    variants: dict[str, Callable[[], object]] = {
        "bare": muon(bare).step,
        "owner": ShardedStateOptimizer(muon(owner), owner, compute="owner").step,
        "replicated": ShardedStateOptimizer(muon(replicated), replicated, compute="replicated").step,
    }
    return time_in_turns(variants, config.steps, block=1, warm_up=_MUON_WARM_UP_STEPS)


def time_in_turns(
    variants: Mapping[str, Callable[[], object]], steps: int, *, block: int, warm_up: int
) -> dict[str, list[float]]:
    """Collective. Milliseconds of every call of every variant, ``block`` of them in one turn."""
    for step in variants.values():
        for _ in range(warm_up):
            step()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    # The same order on every rank, another in every round: none always has to follow the one that clears the caches.
    order, names = random.Random(0), list(variants)
    for start in range(0, steps, block):
        for name in order.sample(names, len(names)):
            for _ in range(min(block, steps - start)):
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
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of ranks for AdamW")
    parser.add_argument("--kernels", nargs="+", default=list(_REQUIRED), choices=list(_REQUIRED))
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--steps", type=int, default=80, help="timed steps of each variant")
    parser.add_argument("--block", type=int, default=2, help="steps of one variant before the next has its turn")
    parser.add_argument("--muon-ranks", type=int, nargs="*", default=[2, 4], help="numbers of ranks for Muon")
    parser.add_argument("--muon-width", type=int, default=512)
    parser.add_argument("--muon-layers", type=int, default=2)
    parser.add_argument("--muon-steps", type=int, default=11, help="timed steps of each variant of Muon")
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "step.jsonl", help="file that gets the results")
    return parser.parse_args()


def measure_adamw(ranks: Ranks, arguments: argparse.Namespace) -> list[Bar]:
    """Runs, records and prints all that is asked of AdamW."""
    bars: list[Bar] = []
    rows: list[list[str]] = []
    titles: list[str] = []
    for num_ranks, kernel in itertools.product(arguments.ranks, arguments.kernels):
        sizes = {name: getattr(arguments, name) for name in ("tensors", "rows", "columns", "steps", "block")}
        config = Config(kernel=kernel, **sizes)
        samples = slowest(ranks.run(num_ranks, time_adamw, config))
        record(arguments.out, "step", {"ranks": num_ranks, **asdict(config)}, samples)
        label = f"{kernel}=True, {num_ranks} rank{'s' * (num_ranks > 1)}"
        titles, medians = _row(label, samples, rows)
        ratio = medians["bare"] / medians["wrapped"]
        bars.append(Bar(name=f"{label}: bare / wrapped", value=ratio, limit=_REQUIRED[kernel], at_least=True, unit="x"))
    if rows:
        print(
            f"AdamW, {arguments.tensors} tensors of {arguments.rows}x{arguments.columns}; load {conditions()['load']}\n"
        )
        print_table(titles, rows)
    return bars


def measure_muon(ranks: Ranks, arguments: argparse.Namespace) -> list[Bar]:
    """Runs, records and prints all that is asked of Muon."""
    config = MuonConfig(width=arguments.muon_width, layers=arguments.muon_layers, steps=arguments.muon_steps)
    bars: list[Bar] = []
    rows: list[list[str]] = []
    titles: list[str] = []
    for num_ranks in arguments.muon_ranks:
        samples = slowest(ranks.run(num_ranks, time_muon, config))
        record(arguments.out, "step of Muon", {"ranks": num_ranks, **asdict(config)}, samples)
        label = f"Muon, {num_ranks} ranks"
        titles, medians = _row(label, samples, rows)
        ratio = medians["bare"] / medians["owner"]
        bars.append(Bar(name=f"{label}: bare / owner", value=ratio, limit=_REQUIRED_OF_MUON, at_least=True, unit="x"))
    if rows:
        shapes = ", ".join(f"{rows}x{columns}" for rows, columns in config.shapes[:4])
        print(f"torch.optim.Muon, {config.layers} times {shapes}; load {conditions()['load']}")
        print("bare: on DTensors, whose all_to_all is an all_gather on CPUs\n")
        print_table(titles, rows)
    return bars


def _row(
    label: str, samples: Mapping[str, Sequence[float]], rows: list[list[str]]
) -> tuple[list[str], dict[str, float]]:
    """Adds the medians to a table; its titles, and the medians."""
    medians = {name: statistics.median(times) for name, times in samples.items()}
    rows.append([label, *(f"{median:.3f}" for median in medians.values())])
    return ["milliseconds a step, median", *medians], medians


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    with Ranks(max([*arguments.ranks, *arguments.muon_ranks])) as ranks:
        bars = measure_adamw(ranks, arguments) + measure_muon(ranks, arguments)
    return print_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
