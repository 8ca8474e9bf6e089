"""Times checkpoints of the wrapper, and their memory, against the same tensors as a bare dict of DTensors.

    python benchmarks/checkpoint.py            # both of:
    python benchmarks/checkpoint.py time
    python benchmarks/checkpoint.py memory

time: ``dcp.save`` and ``dcp.load`` of a ShardedStateOptimizer over AdamW with 1,000 parameters, in turns with those of
a dict that holds the same 2,000 moments as DTensors: no step counters, no hyper-parameters, no names of groups.

memory: 1 GiB of moments. How far the peak of resident memory is above what has to be there: above what was resident
before a save; above what is resident after a load into an optimizer without state; above what was resident before a
load into an optimizer with state, plus that state once more, since nothing live is overwritten before every rank has
agreed. In percent of the state a rank holds, on the rank where it is most.

Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness.bars import Bar, print_bars, print_table
from harness.launch import Ranks
from harness.memory import Footprint, measure
from harness.results import LOCAL_RESULTS, conditions, record
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardopt import ShardedStateOptimizer

_MOST_TIMES_BARE = 1.3
_MOST_PERCENT_OVER = 2.0
_MIB = 1 << 20
_OPERATIONS = ("save", "load")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The state that is saved and loaded.

    Attributes:
        parameters: number of parameters; AdamW keeps two moments of each.
        rows: rows of each over all ranks; a multiple of the number of ranks.
        columns: columns of each.
    """

    parameters: int
    rows: int
    columns: int


class Bank(nn.Module):
    """Parameters sharded by rows."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__()
        shard = (config.rows // mesh.size(), config.columns)
        self.parts = nn.ParameterList(
            nn.Parameter(DTensor.from_local(torch.randn(shard), mesh, [Shard(0)], run_check=False))
            for _ in range(config.parameters)
        )


def build(config: Config, *, with_state: bool) -> ShardedStateOptimizer:
    """Collective. A wrapped AdamW, with the state it has after a step or without any.

    The state is put there: steps would leave gaps in the heap, and a save that takes memory could hide in them.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bank = Bank(config, mesh)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(bank.parameters(), fused=True), bank)
    for part in bank.parts if with_state else ():
        moments = {name: torch.rand(config.rows // mesh.size(), config.columns) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[part] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def state_bytes(optimizer: ShardedStateOptimizer) -> int:
    """Bytes of moments on this rank."""
    return sum(_local(value).nbytes for value in optimizer.sharded_state().values())


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def operations(optimizer: ShardedStateOptimizer, directory: Path) -> dict[str, Callable[[], Any]]:
    """What is measured, by name; wrapped and bare work on the same memory."""
    moments = optimizer.sharded_state()
    return {
        "wrapped save": lambda: dcp.save({"optim": optimizer}, checkpoint_id=directory / "wrapped"),
        "bare save": lambda: dcp.save({"optim": moments}, checkpoint_id=directory / "bare"),
        "wrapped load": lambda: dcp.load({"optim": optimizer}, checkpoint_id=directory / "wrapped"),
        "bare load": lambda: dcp.load({"optim": moments}, checkpoint_id=directory / "bare"),
    }


def warm_up(directory: Path) -> None:
    """Collective. Saves and loads something small, so that nothing is imported or started while measuring."""
    tiny = Config(parameters=1, rows=dist.get_world_size(), columns=1)
    for operation in operations(build(tiny, with_state=True), directory).values():
        operation()


def time_operations(config: Config, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Collective. Seconds of every save and load on this rank."""
    warm_up(directory / "first")
    optimizer = build(config, with_state=True)
    samples: dict[str, list[float]] = {}
    for index in range(rounds):
        for name, operation in operations(optimizer, directory / str(index)).items():
            dist.barrier()
            begin = time.perf_counter()
            operation()
            samples.setdefault(name, []).append(time.perf_counter() - begin)
    return samples


def weigh_saves(config: Config, directory: Path) -> tuple[int, dict[str, Footprint]]:
    """Collective. Bytes of state on this rank, and the memory of saves."""
    warm_up(directory / "first save")
    optimizer = build(config, with_state=True)
    todo = operations(optimizer, directory)
    return state_bytes(optimizer), {name: measure(todo[name]) for name in ("wrapped save", "bare save")}


def weigh_loads(config: Config, directory: Path) -> tuple[int, dict[str, Footprint]]:
    """Collective. Bytes of state on this rank, and the memory of loads of what ``weigh_saves`` saved."""
    warm_up(directory / "first load")
    optimizer = build(config, with_state=False)
    load = operations(optimizer, directory)["wrapped load"]
    weighed = {"fresh load": measure(load), "warm load": measure(load)}
    weighed["bare load"] = measure(operations(optimizer, directory)["bare load"])
    return state_bytes(optimizer), weighed


def compare_times(ranks: Ranks, num_ranks: int, arguments: argparse.Namespace) -> list[Bar]:
    """Measures, records and prints times on one number of ranks."""
    config = Config(parameters=arguments.parameters, rows=arguments.rows, columns=arguments.columns)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        per_rank = ranks.run(num_ranks, time_operations, config, arguments.rounds, Path(directory))
    # A checkpoint takes as long as its slowest rank.
    samples = {
        name: [round(max(times), 4) for times in zip(*(one[name] for one in per_rank), strict=True)]
        for name in per_rank[0]
    }
    record(arguments.out, "checkpoint time", {"ranks": num_ranks, **asdict(config)}, samples)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    label = _label(num_ranks)
    print(f"{2 * config.parameters} moments of {config.rows}x{config.columns}, {label}; load {conditions()['load']}\n")
    rows = [
        [operation, f"{medians[f'wrapped {operation}']:.2f}", f"{medians[f'bare {operation}']:.2f}"]
        for operation in _OPERATIONS
    ]
    print_table(["seconds, median", "wrapped", "bare"], rows)
    return [
        Bar(
            name=f"{label}: {operation} time, wrapped / bare",
            value=medians[f"wrapped {operation}"] / medians[f"bare {operation}"],
            limit=_MOST_TIMES_BARE,
            at_least=False,
            unit="x",
        )
        for operation in _OPERATIONS
    ]


def compare_memory(num_ranks: int, arguments: argparse.Namespace) -> list[Bar]:
    """Measures, records and prints memory on one number of ranks."""
    side = arguments.moment_side
    config = Config(parameters=arguments.big_parameters, rows=side, columns=side)
    footprints: dict[str, list[Footprint]] = {}
    num_bytes: list[int] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for weigh in (weigh_saves, weigh_loads):
            # New processes: what a save leaves behind is no part of a load.
            with Ranks(num_ranks) as ranks:
                results = ranks.run(num_ranks, weigh, config, Path(directory))
            num_bytes = [size for size, _ in results]
            footprints.update({name: [weighed[name] for _, weighed in results] for name in results[0][1]})
    samples = {name: [asdict(footprint) for footprint in per_rank] for name, per_rank in footprints.items()}
    record(arguments.out, "checkpoint memory", {"ranks": num_ranks, **asdict(config), "state": num_bytes}, samples)
    label = _label(num_ranks)
    print(f"{num_bytes[0] / _MIB:.0f} MiB of state on each rank, {label}\n")
    rows = [
        [name, *(f"{value / _MIB:.1f}" for value in asdict(per_rank[0]).values())]
        for name, per_rank in footprints.items()
    ]
    print_table(["resident MiB, rank 0", "before", "peak", "after"], rows)
    return [bar for name in _NEEDED for bar in _memory_bars(f"{label}: {name}", name, footprints[name], num_bytes)]


# How often the state must be resident beyond what was before: at the peak, and afterwards.
_NEEDED = {"wrapped save": (0, 0), "fresh load": (1, 1), "warm load": (1, 0)}


def _memory_bars(label: str, name: str, per_rank: list[Footprint], num_bytes: list[int]) -> list[Bar]:
    at_peak, afterwards = _NEEDED[name]
    over: dict[str, list[float]] = {"peak": [], "kept": []}
    for footprint, size in zip(per_rank, num_bytes, strict=True):
        over["peak"].append(100 * ((footprint.peak - footprint.before) / size - at_peak))
        over["kept"].append(100 * ((footprint.after - footprint.before) / size - afterwards))
    return [
        Bar(name=f"{label}, {what} over needed", value=max(values), limit=_MOST_PERCENT_OVER, at_least=False, unit="%")
        for what, values in over.items()
    ]


def _label(num_ranks: int) -> str:
    return f"{num_ranks} rank{'s' * (num_ranks > 1)}"


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["time", "memory"], help="time, memory, or both")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure on")
    parser.add_argument("--parameters", type=int, default=1000, help="time: number of parameters")
    parser.add_argument("--rows", type=int, default=64, help="time: rows of each")
    parser.add_argument("--columns", type=int, default=64, help="time: columns of each")
    parser.add_argument("--rounds", type=int, default=3, help="time: saves and loads of each kind")
    parser.add_argument("--big-parameters", type=int, default=128, help="memory: number of parameters")
    parser.add_argument("--moment-side", type=int, default=1024, help="memory: rows and columns of each")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written (default: for temporary files)")
    parser.add_argument(
        "--out", type=Path, default=LOCAL_RESULTS / "checkpoint.jsonl", help="file that gets the results"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - {"time", "memory"}:
        parser.error(f"{sorted(unknown)}: expected time or memory")
    return arguments


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    bars: list[Bar] = []
    if "time" in arguments.what:
        with Ranks(max(arguments.ranks)) as ranks:
            for num_ranks in arguments.ranks:
                bars += compare_times(ranks, num_ranks, arguments)
    if "memory" in arguments.what:
        for num_ranks in arguments.ranks:
            bars += compare_memory(num_ranks, arguments)
    return print_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
