"""Measures what the pictures show and no other benchmark does: how numbers change with sizes.

    python benchmarks/curves.py                # all of:
    python benchmarks/curves.py step checkpoint bytes vote kernel

* step: torch's fused AdamW on DTensors, bare and wrapped, by the number of tensors, on 2 ranks;
* checkpoint: dcp.save and dcp.load of the wrapper, and of the same moments as bare DTensors, by the number of
  parameters, on 2 ranks;
* bytes: state for each element of the parameters, by optimizer, weighed after a step;
* vote: a vote by the number of ranks: processes up to 4, and threads, all of one process, beyond;
* kernel: bytes of memory that a step of the host kernel moves each second, by the size of the tensor, beside a loop
  that moves as many and does no arithmetic, and torch's fused step.

There is no bar: benchmarks/step.py, checkpoint.py, consensus.py and host_kernel.py have them. benchmarks/pictures.py
draws the results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from checkpoint import Config as CheckpointConfig
from checkpoint import time_operations
from harness.bars import print_table
from harness.launch import Ranks
from harness.results import LOCAL_RESULTS, conditions, record
from host_kernel import Config as KernelConfig
from host_kernel import Kernel, fused, measured
from scaling.parts import vote_ms
from step import Config as StepConfig
from step import slowest, time_adamw
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardopt import SwapAdamW
from shardopt.scope import Scope
from shardopt.swap.host_kernel import available_isas, default_threads

_RANKS = 2
_BF16 = torch.bfloat16
# A step of AdamW reads parameter, gradient and two moments in fp32, and writes all but the gradient.
_BYTES_OF_STEP = 4 * 4 + 3 * 4


def steps(ranks: Ranks, arguments: argparse.Namespace) -> None:
    """Milliseconds a step."""
    rows: list[list[str]] = []
    for tensors in arguments.tensors:
        config = StepConfig(kernel="fused", tensors=tensors, rows=16, columns=16, steps=arguments.steps, block=2)
        samples = slowest(ranks.run(_RANKS, time_adamw, config))
        record(arguments.out, "curve: step", {"ranks": _RANKS, **asdict(config)}, samples)
        medians = {name: statistics.median(samples[name]) for name in ("bare", "wrapped", "no vote")}
        rows.append([f"{tensors} tensors", *(f"{value:.2f}" for value in medians.values())])
    print_table(["ms a step, 2 ranks", "bare", "wrapped", "no vote"], rows)


def checkpoints(ranks: Ranks, arguments: argparse.Namespace) -> None:
    """Seconds a save and a load."""
    rows: list[list[str]] = []
    names: list[str] = []
    for parameters in arguments.parameters:
        config = CheckpointConfig(parameters=parameters, rows=64, columns=64)
        with tempfile.TemporaryDirectory() as directory:
            per_rank = ranks.run(_RANKS, time_operations, config, arguments.rounds, Path(directory))
        samples = slowest(per_rank)
        record(arguments.out, "curve: checkpoint", {"ranks": _RANKS, **asdict(config)}, samples)
        names = list(samples)
        rows.append([f"{parameters} parameters", *(f"{statistics.median(times):.3f}" for times in samples.values())])
    print_table(["seconds, 2 ranks", *names], rows)


def _public(name: str, **options: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        import pytorch_optimizer

        return pytorch_optimizer.load_optimizer(name)(params, **options)

    return make


def _bitsandbytes(params: list[Tensor]) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params)


_OPTIMIZERS: Mapping[str, tuple[torch.dtype, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "AdamW": (torch.float32, lambda params: torch.optim.AdamW(params)),
    "AdamW, amsgrad": (torch.float32, lambda params: torch.optim.AdamW(params, amsgrad=True)),
    "SGD, momentum": (torch.float32, lambda params: torch.optim.SGD(params, momentum=0.9)),
    "Muon": (torch.float32, lambda params: torch.optim.Muon(params)),
    "Adafactor": (torch.float32, lambda params: torch.optim.Adafactor(params)),
    "Lion": (torch.float32, _public("lion")),
    "SwapAdamW": (torch.float32, lambda params: SwapAdamW(params)),
    "SwapAdamW, bf16 moments": (torch.float32, lambda params: SwapAdamW(params, moment_dtype=_BF16)),
    "SwapAdamW, bf16, fp32 masters": (_BF16, lambda params: SwapAdamW(params, master="fp32", moment_dtype=_BF16)),
    "SwapAdamW, bf16, remainders": (_BF16, lambda params: SwapAdamW(params, master="remainder16", moment_dtype=_BF16)),
    "bitsandbytes AdamW8bit": (torch.float32, _bitsandbytes),
}
_SIDE = 512


def _bytes(value: Any) -> int:
    if is_traceable_wrapper_subclass(value):
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) else 0


def bytes_of_state(arguments: argparse.Namespace) -> None:
    """Bytes for each element."""
    samples: dict[str, float] = {}
    for name, (dtype, make) in _OPTIMIZERS.items():
        param = torch.nn.Parameter(torch.randn(_SIDE, _SIDE).to(dtype))
        with warnings.catch_warnings():
            # What a library has to say of its own future.
            warnings.simplefilter("ignore")
            optimizer = make([param])
            param.grad = torch.randn(_SIDE, _SIDE).to(dtype)
            optimizer.step()
        total = sum(_bytes(value) for entries in optimizer.state.values() for value in entries.values())
        samples[name] = round(total / param.numel(), 4)
    record(arguments.out, "curve: bytes", {"shape": [_SIDE, _SIDE]}, samples)
    print_table(["state", "bytes an element"], [[name, f"{value:.3f}"] for name, value in samples.items()])


def time_votes(votes: int) -> list[float]:
    """Collective. Milliseconds of each vote on this rank."""
    scope = Scope.over(range(dist.get_world_size()), timeout_s=60.0, name="curve")
    times: list[float] = []
    for _ in range(votes):
        dist.barrier()
        begin = time.perf_counter()
        scope.vote("step")
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def votes(ranks: Ranks, arguments: argparse.Namespace) -> None:
    """Milliseconds a vote."""
    samples: dict[str, list[float]] = {}
    for num_ranks in (2, 4):
        per_rank = ranks.run(num_ranks, time_votes, arguments.votes)
        samples[f"{num_ranks} processes"] = [round(max(times), 3) for times in zip(*per_rank, strict=True)][5:]
    for num_ranks in arguments.threads:
        samples[f"{num_ranks} threads"] = vote_ms(num_ranks, arguments.votes)
    record(arguments.out, "curve: vote", {"votes": arguments.votes}, samples)
    rows = [[name, f"{statistics.median(times):.2f}"] for name, times in samples.items()]
    print_table(["a vote", "ms, median"], rows)


def kernels(arguments: argparse.Namespace) -> None:
    """Bytes a second."""
    rows: list[list[str]] = []
    num_threads = default_threads()
    torch.set_num_threads(num_threads)
    for numel in arguments.elements:
        # Small ones are over at once; as many bytes for each size.
        repeats = max(5, min(200, (64 << 20) // numel))
        config = KernelConfig(numel=numel, threads=num_threads, isa=available_isas()[-1], repeats=repeats)
        param = torch.nn.Parameter(torch.randn(numel))
        param.grad = torch.randn(numel)
        kernel = Kernel(param.detach().clone(), param.grad, config)
        variants = {"kernel": kernel.step, "memory": kernel.probe, "torch fused": fused(param).step}
        samples = measured(variants, repeats)
        record(arguments.out, "curve: kernel", {"bytes of step": _BYTES_OF_STEP, **asdict(config)}, samples)
        rates = [numel * _BYTES_OF_STEP / statistics.median(times) / 1e9 for times in samples.values()]
        rows.append([f"{numel:,} elements", *(f"{rate:.1f}" for rate in rates)])
    print_table([f"GB/s, {num_threads} threads", "kernel", "memory", "torch fused"], rows)


_PARTS = ("step", "checkpoint", "bytes", "vote", "kernel")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[*_PARTS], help="which, of: " + " ".join(_PARTS))
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each variant")
    parser.add_argument("--parameters", type=int, nargs="+", default=[30, 100, 300, 1000])
    parser.add_argument("--rounds", type=int, default=3, help="saves and loads of each kind")
    parser.add_argument("--threads", type=int, nargs="+", default=[8, 16, 32, 64], help="that vote")
    parser.add_argument("--votes", type=int, default=60, help="of each number of ranks")
    sizes = [1 << exponent for exponent in range(14, 26, 2)]
    parser.add_argument("--elements", type=int, nargs="+", default=sizes, help="of the kernel's tensor")
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "curves.jsonl", help="file that gets the results")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - set(_PARTS):
        parser.error(f"{sorted(unknown)}: expected {', '.join(_PARTS)}")
    return arguments


def main() -> int:
    """Measures, records and prints."""
    arguments = read_arguments()
    print(f"load {conditions()['load']}\n")
    alone: Mapping[str, Callable[[argparse.Namespace], None]] = {"bytes": bytes_of_state, "kernel": kernels}
    together: Mapping[str, Callable[[Ranks, argparse.Namespace], None]] = {
        "step": steps,
        "checkpoint": checkpoints,
        "vote": votes,
    }
    with Ranks(4) as ranks:
        for name in arguments.what:
            if name in together:
                together[name](ranks, arguments)
            else:
                alone[name](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
