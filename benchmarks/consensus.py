"""Times what the checks of a step cost: the vote, and the look at groups, parameters and gradients before it.

    python benchmarks/consensus.py

AdamW of many small parameters under ``fully_shard``, on 2 and on 4 ranks. All variants run in one process and take
turns, a few steps each:

* checked: ShardedStateOptimizer with its defaults, a vote in every step;
* off: the same with consensus="off";
* waiting: the same with consensus="off" and a bare all_gather of 64 bytes in a pre-hook, the cheapest way to agree in
  the place where it has to be done;
* vote: a vote alone;
* all_gather: one bare all_gather of 64 bytes over the ranks' gloo group, what the cheapest way to agree would cost.

The ranks start each step together, and a step takes as long as its slowest rank. Checks may cost 1.5 of the all_gather,
or 0.5 ms if that is more: beyond "off", which nothing that waits in a step can keep where processes share cores, and
beyond "waiting". Exits with 1 if they cost more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from harness.bars import Bar, print_bars, print_table
from harness.launch import Ranks
from harness.results import LOCAL_RESULTS, conditions, record
from step import Config, adamw, sharded_bank, slowest
from torch import distributed as dist

from shardopt import ShardedStateOptimizer
from shardopt.scope import Scope

_ALLOWED_ALL_GATHERS = 1.5
_ALLOWED_MS = 0.5
_GATHERED_BYTES = 64
_WARM_UP_STEPS = 3


def build_variants(config: Config) -> dict[str, Callable[[], object]]:
    """Collective. What is timed, by name."""
    checked, quiet, waiting = (sharded_bank(config.shapes) for _ in range(3))
    scope = Scope.over(range(dist.get_world_size()), timeout_s=60.0, name="benchmark")
    mine = torch.zeros(_GATHERED_BYTES, dtype=torch.uint8)
    everybodys = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    waits = ShardedStateOptimizer(adamw(waiting, config), waiting, consensus="off")
    waits.register_step_pre_hook(lambda *_: dist.all_gather(everybodys, mine))
    return {
        "checked": ShardedStateOptimizer(adamw(checked, config), checked).step,
        "off": ShardedStateOptimizer(adamw(quiet, config), quiet, consensus="off").step,
        "waiting": waits.step,
        "vote": lambda: scope.vote("step"),
        "all_gather": lambda: dist.all_gather(everybodys, mine),
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


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks to measure on")
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120, help="timed steps of each variant")
    parser.add_argument("--block", type=int, default=2, help="steps of one variant before the next has its turn")
    parser.add_argument(
        "--out", type=Path, default=LOCAL_RESULTS / "consensus.jsonl", help="file that gets the results"
    )
    return parser.parse_args()


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    bars: list[Bar] = []
    rows: list[list[str]] = []
    names: list[str] = []
    with Ranks(max(arguments.ranks)) as ranks:
        for num_ranks in arguments.ranks:
            sizes = {name: getattr(arguments, name) for name in ("tensors", "rows", "columns", "steps", "block")}
            config = Config(kernel="fused", **sizes)
            samples = slowest(ranks.run(num_ranks, time_steps, config))
            record(arguments.out, "consensus", {"ranks": num_ranks, **asdict(config)}, samples)
            medians = {name: statistics.median(times) for name, times in samples.items()}
            names = list(medians)
            ratio = medians["checked"] / medians["off"]
            rows.append([f"{num_ranks} ranks", *(f"{median:.3f}" for median in medians.values()), f"{ratio:.2f}x"])
            limit = max(_ALLOWED_ALL_GATHERS * medians["all_gather"], _ALLOWED_MS)
            for other in ("off", "waiting"):
                cost = medians["checked"] - medians[other]
                name = f"{num_ranks} ranks: checked - {other}"
                bars.append(Bar(name=name, value=cost, limit=limit, at_least=False, unit=" ms"))
    print(f"AdamW, {arguments.tensors} tensors of {arguments.rows}x{arguments.columns}; load {conditions()['load']}\n")
    print_table(["milliseconds, median", *names, "checked / off"], rows)
    return print_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
