"""Weighs checkpoints of 8-bit state: bytes on disk, and what a save and a load take beyond what must be there.

    python benchmarks/quantised.py

A model of 512 MiB (fp32) with bitsandbytes' AdamW8bit, two moments, on 2 ranks under ``local``. Three matters:

* blocks that are the whole parameter's, saved and loaded on 2 ranks: their bits move as they are;
* the same checkpoint loaded into an optimizer that has state already: that state is held once more, since nothing live
  is overwritten before every rank has agreed;
* blocks that cross rows, saved on 2 ranks and loaded on 1: each parameter is quantised anew from its exact values.

In bytes for each element of this rank's part. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness.bars import Bar, print_bars, print_table
from harness.launch import Ranks
from harness.memory import Footprint, measure
from harness.results import LOCAL_RESULTS, conditions, record
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardopt import ShardedStateOptimizer

_MOST_BYTES_ON_DISK = 2.1
_MOST_BYTES_EXTRA = 0.05
_BLOCK = 256
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Config:
    """The state that is saved and loaded.

    Attributes:
        parameters: number of parameters.
        rows: rows of each over all ranks.
        columns: columns of each; blocks cross rows if it is no multiple of 256.
    """

    parameters: int
    rows: int
    columns: int

    @property
    def num_elements(self) -> int:
        """Of all parameters."""
        return self.parameters * self.rows * self.columns


class Bank(nn.Module):
    """Parameters sharded by rows."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__()
        whole = torch.Size((config.rows, config.columns))
        local = (config.rows // mesh.size(), config.columns)
        self.parts = nn.ParameterList(
            nn.Parameter(
                DTensor.from_local(
                    torch.zeros(local), mesh, [Shard(0)], run_check=False, shape=whole, stride=(config.columns, 1)
                )
            )
            for _ in range(config.parameters)
        )


def build(config: Config, *, with_state: bool) -> ShardedStateOptimizer:
    """Collective. A wrapped AdamW8bit; its state is put there, since steps would leave gaps in the heap."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bank = Bank(config, mesh)
    inner = bitsandbytes.optim.AdamW8bit(bank.parameters(), lr=1e-3)
    optimizer = ShardedStateOptimizer(inner, bank, compute="local")
    local = (config.rows // mesh.size(), config.columns)
    blocks = -(-local[0] * local[1] // _BLOCK)
    tables = inner.name2qmap
    for part in bank.parts if with_state else ():
        inner.state[part] = {
            "step": 1,
            "state1": torch.randint(0, 256, local, dtype=torch.uint8),
            "qmap1": tables["dynamic"],
            "absmax1": torch.rand(blocks),
            "state2": torch.randint(0, 256, local, dtype=torch.uint8),
            "qmap2": tables["udynamic"],
            "absmax2": torch.rand(blocks),
        }
    return optimizer


def warm_up(directory: Path) -> None:
    """Collective. Saves and loads something small, so that nothing is imported or started while measuring."""
    tiny = Config(parameters=1, rows=64, columns=_BLOCK)
    dcp.save({"optim": build(tiny, with_state=True)}, checkpoint_id=directory)
    dcp.load({"optim": build(tiny, with_state=False)}, checkpoint_id=directory)


def weigh_save(config: Config, directory: Path, name: str) -> dict[str, Footprint]:
    """Collective. The memory of a save."""
    warm_up(directory / f"{name}: first save")
    optimizer = build(config, with_state=True)
    return {f"{name}: save": measure(lambda: dcp.save({"optim": optimizer}, checkpoint_id=directory / name))}


def weigh_load(config: Config, directory: Path, name: str) -> dict[str, Footprint]:
    """Collective. The memory of a load into an optimizer without state, and of one into what that has left."""
    warm_up(directory / f"{name}: first load")
    optimizer = build(config, with_state=False)

    def load() -> None:
        dcp.load({"optim": optimizer}, checkpoint_id=directory / name)

    return {f"{name}: fresh load": measure(load), f"{name}: warm load": measure(load)}


def run(arguments: argparse.Namespace, directory: Path) -> list[Bar]:
    """Measures everything."""
    aligned = Config(parameters=arguments.parameters, rows=arguments.side, columns=arguments.side)
    crossing = Config(parameters=arguments.parameters, rows=arguments.side, columns=arguments.side - 24)
    jobs: list[tuple[int, Callable[..., dict[str, Footprint]], Config, str]] = [
        (2, weigh_save, aligned, "aligned"),
        (2, weigh_load, aligned, "aligned"),
        (2, weigh_save, crossing, "crossing"),
        (1, weigh_load, crossing, "crossing"),
    ]
    bars: list[Bar] = []
    rows: list[list[str]] = []
    for num_ranks, weigh, config, name in jobs:
        # New processes: what a save leaves behind is no part of a load.
        with Ranks(num_ranks) as ranks:
            results = ranks.run(num_ranks, weigh, config, directory, name)
        per_rank = config.num_elements // num_ranks
        for operation in results[0]:
            footprints = [one[operation] for one in results]
            record(
                arguments.out,
                "quantised memory",
                {"ranks": num_ranks, "operation": operation, **asdict(config)},
                {"footprint": [asdict(one) for one in footprints]},
            )
            extra = max(_extra(operation, one, per_rank) for one in footprints) / per_rank
            dense = 4 * config.rows * config.columns / per_rank if operation.startswith("crossing") else 0.0
            limit = _MOST_BYTES_EXTRA + (dense if "load" in operation else 0.0)
            bars.append(
                Bar(
                    name=f"{operation}, {num_ranks} ranks, extra memory",
                    value=extra,
                    limit=limit,
                    at_least=False,
                    unit=" B",
                )
            )
            rows.append([operation, *(f"{value / _MIB:.1f}" for value in asdict(footprints[0]).values())])
    for name, config in (("aligned", aligned), ("crossing", crossing)):
        on_disk = sum(file.stat().st_size for file in (directory / name).rglob("*") if file.is_file())
        bars.append(
            Bar(
                name=f"{name}: on disk",
                value=on_disk / config.num_elements,
                limit=_MOST_BYTES_ON_DISK,
                at_least=False,
                unit=" B",
            )
        )
    print(f"{aligned.num_elements * 4 / _MIB:.0f} MiB of parameters; load {conditions()['load']}\n")
    print_table(["resident MiB, rank 0", "before", "peak", "after"], rows)
    return bars


def _extra(operation: str, footprint: Footprint, num_elements: int) -> int:
    """Bytes beyond what must be resident: of a load the new state, of a warm one that and the old."""
    if operation.endswith("fresh load"):
        return footprint.peak - footprint.after
    if operation.endswith("warm load"):
        return footprint.peak - footprint.before - 2 * (num_elements + 4 * num_elements // _BLOCK)
    return footprint.peak - footprint.before


def main() -> int:
    """Measures, records and prints; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=32, help="number of parameters")
    parser.add_argument("--side", type=int, default=2048, help="rows and columns of each")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written (default: for temporary files)")
    parser.add_argument(
        "--out", type=Path, default=LOCAL_RESULTS / "quantised.jsonl", help="file that gets the results"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        return print_bars(run(arguments, Path(directory)))


if __name__ == "__main__":
    sys.exit(main())
