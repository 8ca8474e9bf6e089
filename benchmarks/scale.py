"""What grows with the number of ranks, measured on a few and worked out for 8 to 4,096.

    python benchmarks/scale.py

Four things of shardopt grow with the number of ranks N, or with parameters and ranks together. Each is measured as far
as one machine goes, a model with stated assumptions is fitted to it, and the table is that model: nothing in it above
the measured numbers has been run.

* a vote: ranks as threads with a connection each, all of one process, over one TCP store. Fitted: a + b * N. The
  threads and the store share this machine's cores, so b holds the ranks' own work too, which on N machines is done at
  once, and no network: it is the store's load that is worked out, not the latency of a network.
* the manifest: of AdamW with P parameters on 1, 2 and 4 ranks; of AdamW8bit, whose blocks every rank describes.
  Fitted: a + b * P, and for 8 bits + c * P * N.
* a save's plan: DCP's own planners over handles of N simulated ranks, every one with a part of each of P parameters.
  Fitted: bytes of a rank's plan = a + b * P; seconds of CPU in which the first rank plans for all = a * I, with I = 2 *
  P * N items; bytes of .metadata = a * P + b * I. All plans go through the store to the first rank.
* an owner exchange: what the real assignment (largest first, to the least loaded) gives each rank to receive for the
  matrices of a model, checked against the bytes that an optimizer on 2 and 4 ranks sends.

Exits with 1 if a fitted model is further from a measured number than it may be.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.bars import Bar, print_bars, print_table
from harness.launch import Ranks
from harness.results import LOCAL_RESULTS, conditions, record
from scaling.fitting import Fit, fitted
from scaling.parts import exchanged_bytes, manifest_bytes, owner_loads, plan_sizes, vote_ms

_KIB, _MIB = 1 << 10, 1 << 20
# How far a model may be from what was measured, in parts of it. Times of a shared machine scatter, sizes do not.
_MOST_OFF = {"vote": 0.5, "manifest": 0.01, "manifest of 8 bits": 0.1, "plan": 0.01, "planning": 0.5, "metadata": 0.01}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model the table is for: matrices of a GPT.

    Attributes:
        layers: of four matrices each.
        width: of the residual.
        vocabulary: rows of the embedding.
    """

    layers: int
    width: int
    vocabulary: int

    @property
    def volumes(self) -> list[int]:
        """Elements of each parameter."""
        block = [3 * self.width**2, self.width**2, 4 * self.width**2, 4 * self.width**2]
        return [self.vocabulary * self.width, *block * self.layers]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What was fitted; arguments as in the docstring above.

    Attributes:
        vote: milliseconds, of N.
        manifest: bytes, of P.
        quantised: bytes of the manifest with 8-bit state, of P and P * N.
        plan: bytes of one rank's plan, of P.
        planning: seconds of the first rank, of items.
        metadata: bytes, of items.
    """

    vote: Fit
    manifest: Fit
    quantised: Fit
    plan: Fit
    planning: Fit
    metadata: Fit


def measure_votes(arguments: argparse.Namespace) -> Fit:
    """Votes of more and more threads."""
    samples = {num_ranks: vote_ms(num_ranks, arguments.votes) for num_ranks in arguments.vote_ranks}
    record(
        arguments.out, "scale: vote", {"votes": arguments.votes}, {str(key): value for key, value in samples.items()}
    )
    return fitted("vote", [((1.0, float(n)), value) for n, value in samples.items()])


def measure_manifests(ranks: Ranks, arguments: argparse.Namespace) -> tuple[Fit, Fit]:
    """Manifests of two optimizers."""
    samples: dict[str, dict[str, int]] = {}
    points: dict[str, list[tuple[tuple[float, ...], float]]] = {"AdamW": [], "AdamW8bit": []}
    for kind, found in points.items():
        for num_ranks in (1, 2, 4):
            for num_params in arguments.parameters:
                size = ranks.run(num_ranks, manifest_bytes, kind, num_params)[0]
                samples.setdefault(kind, {})[f"{num_params} parameters, {num_ranks} ranks"] = size
                terms = (1.0, float(num_params)) + ((float(num_params * num_ranks),) if kind == "AdamW8bit" else ())
                found.append((terms, size))
    record(arguments.out, "scale: manifest", {"parameters": arguments.parameters}, samples)
    return fitted("manifest", points["AdamW"]), fitted("manifest of 8 bits", points["AdamW8bit"])


def measure_plans(arguments: argparse.Namespace) -> tuple[Fit, Fit, Fit]:
    """DCP's planners."""
    plan: list[tuple[tuple[float, ...], float]] = []
    planning: list[tuple[tuple[float, ...], float]] = []
    metadata: list[tuple[tuple[float, ...], float]] = []
    samples: dict[str, Any] = {}
    for num_params in arguments.parameters:
        for num_ranks in arguments.plan_ranks:
            sizes = plan_sizes(num_params, num_ranks)
            samples[f"{num_params} parameters, {num_ranks} ranks"] = asdict(sizes)
            items = float(2 * num_params * num_ranks)
            plan.append(((1.0, float(num_params)), sizes.plan_bytes))
            planning.append(((items,), sizes.planning_s))
            metadata.append(((float(num_params), items), sizes.metadata_bytes))
    record(arguments.out, "scale: plan", {"parameters": arguments.parameters}, samples)
    return fitted("plan", plan), fitted("planning", planning), fitted("metadata", metadata)


def check_exchange(ranks: Ranks, arguments: argparse.Namespace) -> list[Bar]:
    """Whether the worked-out bytes of an exchange are those of a real one."""
    volumes = [shape[0] * shape[1] for shape in arguments.exchanged]
    bars: list[Bar] = []
    samples: dict[str, Any] = {}
    for num_ranks in (2, 4):
        sent = sorted(ranks.run(num_ranks, exchanged_bytes, arguments.exchanged))
        # Of what others own, the shards of parameter and gradient; of its own, new parameters to the others.
        expected = sorted(
            4 * (2 * (sum(volumes) - load) + (num_ranks - 1) * load) / num_ranks
            for load in owner_loads(volumes, num_ranks)
        )
        samples[f"{num_ranks} ranks"] = {"sent": sent, "worked out": expected}
        name = f"owner exchange, each of {num_ranks} ranks: sent / worked out"
        off = [found / wanted for found, wanted in zip(sent, expected, strict=True)]
        bars.append(Bar(name=name, value=max(off), limit=1.01, at_least=False, unit="x"))
        bars.append(Bar(name=name, value=min(off), limit=0.99, at_least=True, unit="x"))
    record(arguments.out, "scale: exchange", {"shapes": arguments.exchanged}, samples)
    return bars


def row(num_ranks: int, model: Model, parts: Parts) -> list[str]:
    """One line of the table."""
    volumes = model.volumes
    num_params, items = len(volumes), 2 * len(volumes) * num_ranks
    loads = owner_loads(volumes, num_ranks)
    received = 2 * 4 * max(loads) * (num_ranks - 1) / num_ranks
    plan = parts.plan.at(1.0, num_params)
    cells = [
        f"{parts.vote.at(1.0, num_ranks):.1f}",
        f"{parts.manifest.at(1.0, num_params) / _KIB:.0f}",
        f"{parts.quantised.at(1.0, num_params, num_params * num_ranks) / _KIB:.0f}",
        f"{plan * num_ranks / _MIB:.1f}",
        f"{parts.planning.at(items):.1f}",
        f"{parts.metadata.at(num_params, items) / _MIB:.1f}",
        f"{received / _MIB:.0f}",
        f"{sum(load > 0 for load in loads)}",
    ]
    return [f"{num_ranks:,} ranks", *cells]


_TITLES = [
    "worked out",
    "vote, ms",
    "manifest, KiB",
    "of 8 bits, KiB",
    "plans, MiB",
    "planning, s",
    ".metadata, MiB",
    "owner gets, MiB",
    "owners",
]


def shape(text: str) -> tuple[int, int]:
    """``4x3`` as a shape."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096], help="of the table")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--vote-ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="threads that vote")
    parser.add_argument("--votes", type=int, default=60, help="of each number of threads")
    parser.add_argument("--parameters", type=int, nargs="+", default=[50, 200], help="of the models measured")
    parser.add_argument("--plan-ranks", type=int, nargs="+", default=[16, 32, 64], help="simulated ranks of a plan")
    parser.add_argument("--exchanged", type=shape, nargs="+", default=[(64, 32), (32, 32), (128, 16), (16, 64), (8, 8)])
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "scale.jsonl", help="file that gets the results")
    return parser.parse_args()


def main() -> int:
    """Measures, fits, and prints the table; the exit status."""
    arguments = read_arguments()
    model = Model(layers=arguments.layers, width=arguments.width, vocabulary=arguments.vocabulary)
    vote = measure_votes(arguments)
    plan, planning, metadata = measure_plans(arguments)
    with Ranks(4) as ranks:
        manifest, quantised = measure_manifests(ranks, arguments)
        bars = check_exchange(ranks, arguments)
    parts = Parts(vote=vote, manifest=manifest, quantised=quantised, plan=plan, planning=planning, metadata=metadata)
    fits = [vote, manifest, quantised, plan, planning, metadata]
    print(f"load {conditions()['load']}\n")
    print_table(["fitted", "model", "off by at most"], [[one.name, one.said, f"{100 * one.off:.0f} %"] for one in fits])
    volumes = model.volumes
    print(f"{len(volumes)} matrices, {sum(volumes) / 1e9:.1f} billion elements in float32, AdamW\n")
    rows = [row(num_ranks, model, parts) for num_ranks in arguments.ranks]
    record(arguments.out, "scale: table", asdict(model), {"titles": _TITLES, "rows": rows})
    print_table(_TITLES, rows)
    limits = [
        Bar(name=f"{one.name}: model off by", value=one.off, limit=_MOST_OFF[one.name], at_least=False) for one in fits
    ]
    return print_bars([*limits, *bars])


if __name__ == "__main__":
    sys.exit(main())
