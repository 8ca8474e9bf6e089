"""Times SwapAdamW's step against torch's fused AdamW on the same DTensors, and weighs its memory.

    python benchmarks/swap.py

Many small parameters under ``fully_shard``, on 1 and on 2 ranks, each with its share of the CPUs (LOCAL_WORLD_SIZE, as
torchrun sets it). All variants run in one process and take turns, a few steps each:

* fused: torch's AdamW(fused=True) on the DTensors;
* swap: SwapAdamW;
* wrapped: SwapAdamW in a ShardedStateOptimizer, with a vote in every step;
* clip + fused: torch.nn.utils.clip_grad_norm_ and torch's AdamW(fused=True);
* clip + swap: SwapAdamW.clip_grad_norm_, which is folded into its step.

The ranks start each step together, and a step takes as long as its slowest rank. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness.bars import Bar, print_bars, print_table
from harness.launch import Ranks
from harness.results import LOCAL_RESULTS, conditions, record
from step import Bank, Config, adamw, sharded_bank, slowest, time_in_turns
from torch import distributed as dist

from shardopt import ShardedStateOptimizer, SwapAdamW

_REQUIRED_FASTER = 3.0
# One rank has twice the elements, at the speed of the same memory.
_REQUIRED_FASTER_ALONE = 2.0
_ALLOWED_MEMORY = 1.01
_WARM_UP_STEPS = 3
_MAX_NORM = 1.0


def clipped(
    bank: Bank, optimizer: torch.optim.Optimizer, clip: Callable[..., object], *first: Any
) -> Callable[[], None]:
    """A clip and a step."""

    def step() -> None:
        clip(*first, _MAX_NORM)
        optimizer.step()

    return step


def time_steps(config: Config) -> tuple[dict[str, list[float]], float]:
    """Collective. Milliseconds of every step of every variant on this rank, and bytes of slab per byte of moments."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    banks = [sharded_bank(config.shapes) for _ in range(5)]
    swaps = [SwapAdamW(bank.parameters()) for bank in banks[:3]]
    fused = [adamw(bank, config) for bank in banks[3:]]
    moments = 2 * sum(part.to_local().nbytes for part in banks[0].parts)  # type: ignore[operator]
    variants: dict[str, Callable[[], object]] = {
        "fused": fused[0].step,
        "swap": swaps[0].step,
        "wrapped": ShardedStateOptimizer(swaps[1], banks[1]).step,
        "clip + fused": clipped(banks[4], fused[1], torch.nn.utils.clip_grad_norm_, list(banks[4].parameters())),
        "clip + swap": clipped(banks[2], swaps[2], swaps[2].clip_grad_norm_),
    }
    samples = time_in_turns(variants, config.steps, block=config.block, warm_up=_WARM_UP_STEPS)
    return samples, swaps[0].slab_bytes / moments


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--steps", type=int, default=80, help="timed steps of each variant")
    parser.add_argument("--block", type=int, default=2, help="steps of one variant before the next has its turn")
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "swap.jsonl", help="file that gets the results")
    return parser.parse_args()


def measure(ranks: Ranks, arguments: argparse.Namespace) -> list[Bar]:
    """Runs, records and prints."""
    sizes = {name: getattr(arguments, name) for name in ("tensors", "rows", "columns", "steps", "block")}
    config = Config(kernel="fused", **sizes)
    bars: list[Bar] = []
    rows: list[list[str]] = []
    titles: list[str] = []
    for num_ranks in arguments.ranks:
        found = ranks.run(num_ranks, time_steps, config)
        samples, memory = slowest([times for times, _ in found]), max(ratio for _, ratio in found)
        told = {"ranks": num_ranks, "slab per moments": round(memory, 4), **asdict(config)}
        record(arguments.out, "swap", told, samples)
        label = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
        medians = {name: statistics.median(times) for name, times in samples.items()}
        titles = ["milliseconds a step, median", *medians]
        rows.append([label, *(f"{median:.3f}" for median in medians.values())])
        limit = _REQUIRED_FASTER if num_ranks > 1 else _REQUIRED_FASTER_ALONE
        ratio = medians["fused"] / medians["swap"]
        bars.append(Bar(name=f"{label}: fused / swap", value=ratio, limit=limit, at_least=True, unit="x"))
        bars.append(Bar(name=f"{label}: slab / moments", value=memory, limit=_ALLOWED_MEMORY, at_least=False, unit="x"))
    print(f"{arguments.tensors} tensors of {arguments.rows}x{arguments.columns}; load {conditions()['load']}\n")
    print_table(titles, rows)
    return bars


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    with Ranks(max(arguments.ranks)) as ranks:
        bars = measure(ranks, arguments)
    return print_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
