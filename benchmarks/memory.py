"""Weighs a step with compute="owner".

    python benchmarks/memory.py

A rank's resident memory during a step, at its peak, over what was there before the step and what has to come: the whole
parameters and whole gradients that it owns, and in the first step their state. What is over that are the buffers of
exchanges and the rule's own temporary tensors. The parameters are the matrices of a GPT, as
under ``fully_shard``; the rules are torch's, of which SGD takes nothing for itself.

Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness.bars import Bar, print_bars, print_table
from harness.launch import Ranks
from harness.memory import Footprint, measure
from harness.results import LOCAL_RESULTS, conditions, record
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shardopt import ShardedStateOptimizer
from shardopt.torch_compat import local_shard

_MIB = 1 << 20
# Over the largest parameter: it travels in one piece.
_MOST_OVER_BYTES = 256 * _MIB

# Bytes. glibc reads it when a process starts; without it the threshold rises as tensors are freed, their memory is
# kept, and what a step takes out of that is not seen.
_OWN_MAPPING_FROM = "65536"

_RULES: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=False),
    "Adafactor": lambda params: torch.optim.Adafactor(params, foreach=False),
}
_MOMENTS = ("first step", "later step")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model whose optimizer is stepped.

    Attributes:
        vocabulary: rows of the embedding, the largest parameter.
        width: its columns.
        layers: transformer blocks, of four matrices each.
    """

    vocabulary: int
    width: int
    layers: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of all parameters, which are float32."""
        width = self.width
        block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        return [(self.vocabulary, width), *block * self.layers]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each parameter."""
        return [rows * columns * torch.float32.itemsize for rows, columns in self.shapes]


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """One step on one rank.

    Attributes:
        footprint: resident bytes around the step.
        owned: bytes of the whole parameters that the rank owns; their gradients are as large.
        state: bytes of the state that the step has made.
    """

    footprint: Footprint
    owned: int
    state: int

    @property
    def over(self) -> int:
        """Bytes at the peak beyond those that have to be there."""
        return self.footprint.peak - self.footprint.before - 2 * self.owned - self.state


def weigh(config: Config, rule: str) -> list[Weighed]:
    """Collective. The first step and a later one, on this rank."""
    params = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in config.shapes)
    fully_shard(params)
    inner = _RULES[rule](list(params))
    optimizer = ShardedStateOptimizer(inner, params, compute="owner")
    found: list[Weighed] = []
    for _ in _MOMENTS:
        before = _state_bytes(inner)
        for param in params:
            param.grad = param.detach().clone()
        footprint = measure(optimizer.step)
        owned = sum(param.numel() * param.element_size() for param in params if inner.state.get(param))
        found.append(Weighed(footprint=footprint, owned=owned, state=_state_bytes(inner) - before))
        optimizer.zero_grad()
    if not all(param.numel() > local_shard(param).numel() for param in params):
        raise RuntimeError("a parameter is whole on one rank, which takes no memory; use 2 ranks or more.")
    return found


def _state_bytes(inner: torch.optim.Optimizer) -> int:
    values = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in values)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks to measure on, from 2")
    parser.add_argument("--rules", nargs="+", default=list(_RULES), choices=list(_RULES))
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "memory.jsonl", help="file that gets the results")
    return parser.parse_args()


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    config = Config(vocabulary=arguments.vocabulary, width=arguments.width, layers=arguments.layers)
    limit = (_MOST_OVER_BYTES + max(config.sizes)) / _MIB
    bars: list[Bar] = []
    rows: list[list[str]] = []
    os.environ["MALLOC_MMAP_THRESHOLD_"] = _OWN_MAPPING_FROM
    for num_ranks, rule in itertools.product(arguments.ranks, arguments.rules):
        # New processes each time: memory that an earlier rule has left would be used again, and not be counted.
        with Ranks(num_ranks) as ranks:
            per_rank: list[list[Weighed]] = ranks.run(num_ranks, weigh, config, rule)
        steps = dict(zip(_MOMENTS, zip(*per_rank, strict=True), strict=True))
        samples = {moment: [asdict(weighed) for weighed in there] for moment, there in steps.items()}
        record(arguments.out, "memory", {"ranks": num_ranks, "rule": rule, **asdict(config)}, samples)
        for moment, there in steps.items():
            worst = max(there, key=lambda weighed: weighed.over)
            label = f"{rule}, {num_ranks} ranks, {moment}"
            rows.append([label, *_in_mib(worst)])
            bars.append(Bar(name=f"{label}: over", value=worst.over / _MIB, limit=limit, at_least=False, unit=" MiB"))
    total = sum(config.sizes) / _MIB
    print(f"{total:.0f} MiB of parameters, the largest {max(config.sizes) / _MIB:.0f}; load {conditions()['load']}\n")
    print_table(["MiB on the rank where most is over", "owned", "state", "peak", "kept", "over"], rows)
    return print_bars(bars)


def _in_mib(weighed: Weighed) -> list[str]:
    footprint = weighed.footprint
    sizes = [
        weighed.owned,
        weighed.state,
        footprint.peak - footprint.before,
        footprint.after - footprint.before,
        weighed.over,
    ]
    return [f"{size / _MIB:.1f}" for size in sizes]


if __name__ == "__main__":
    sys.exit(main())
