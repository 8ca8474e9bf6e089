"""Times SwapAdamW's step of parameters on a GPU against what the link and the memory of the host allow.

    python benchmarks/swap_gpu.py

Float32 parameters, one of which has a quarter of all elements. All variants run in one process and take turns; a sample
is one step, from an idle device to an idle device, by the host's clock:

* swap: SwapAdamW, with its defaults;
* serial: for each parameter, moments in, torch's fused AdamW, moments out, all on one stream, pinned;
* fused: torch's AdamW(fused=True), whose moments stay on the device.

The limit is max(8 P / B, 16 P / D) seconds for P elements, from two rates that are measured in the same run:

* B, bytes a second in each direction: pinned memory is copied in and out at once, and the slower one counts;
* D, bytes a second that the host's memory is read and written with: while such copies run, the host's cores copy other
  memory, and all of the traffic counts.

Exits with 1 if a bar is missed, and with 2 where there is no GPU. It has not run on one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness.bars import Bar, print_bars, print_table
from harness.results import LOCAL_RESULTS, conditions, record
from torch import nn

from shardopt import SwapAdamW

_WARM_UP_STEPS = 3
_MOST_OVER_LIMIT = 1.15
_LEAST_OVER_SERIAL = 1.7
_MOST_OVER_RING = 1.01
_COPY_BYTES = 512 << 20
_COPY_REPEATS = 5
_FP32_MOMENTS = 8  # bytes of an element, in each direction


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured.

    Attributes:
        mebi: Mi elements of all parameters.
        tensors: parameters; the first has a quarter of all elements.
        steps: timed ones of each variant.
    """

    mebi: int
    tensors: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes a second.

    Attributes:
        link: in each direction, both being busy.
        memory: of the host, read and written.
    """

    link: float
    memory: float

    def limit(self, numel: int) -> float:
        """Milliseconds that a step of so many elements takes at least."""
        return 1e3 * max(_FP32_MOMENTS * numel / self.link, 2 * _FP32_MOMENTS * numel / self.memory)


class SerialSwap:
    """AdamW whose moments come and go one parameter at a time, with nothing at the same time as anything else."""

    def __init__(self, params: Sequence[nn.Parameter], *, pin: bool) -> None:
        self._params = params
        self._optimizers = [torch.optim.AdamW([param], fused=True) for param in params]
        self._moments = [
            {
                name: torch.zeros(param.shape, dtype=param.dtype, device="cpu", pin_memory=pin)
                for name in ("exp_avg", "exp_avg_sq")
            }
            for param in params
        ]
        self._steps = [torch.zeros((), dtype=torch.float32, device=param.device) for param in params]

    def step(self) -> None:
        """One step."""
        for param, optimizer, moments, count in zip(
            self._params, self._optimizers, self._moments, self._steps, strict=True
        ):
            there = {name: one.to(param.device, non_blocking=True, copy=True) for name, one in moments.items()}
            optimizer.state[param] = {"step": count, **there}
            optimizer.step()
            for name, one in moments.items():
                one.copy_(there[name], non_blocking=True)
            optimizer.state.clear()


def parameters(config: Config, device: torch.device) -> list[nn.Parameter]:
    """Parameters with gradients."""
    total = config.mebi << 20
    first = total // 4 if config.tensors > 1 else total
    sizes = (
        [first, *[(total - first) // (config.tensors - 1)] * (config.tensors - 1)] if config.tensors > 1 else [first]
    )
    made = [nn.Parameter(torch.ones(size, device=device)) for size in sizes]
    for param in made:
        param.grad = torch.full_like(param, 1e-3)
    return made


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure_rates(device: torch.device) -> Rates:
    """Both rates, medians."""
    numel = _COPY_BYTES // 4
    up, down = (torch.ones(numel, pin_memory=True) for _ in range(2))
    into, out = (torch.ones(numel, device=device) for _ in range(2))
    here, there = torch.ones(numel), torch.ones(numel)
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            into.copy_(up, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            down.copy_(out, non_blocking=True)

    def with_cores() -> int:
        copied = 0
        for _ in range(_COPY_REPEATS):
            both()
        while not all(stream.query() for stream in streams):
            here.copy_(there)
            copied += 2 * _COPY_BYTES
        return copied + 2 * _COPY_REPEATS * _COPY_BYTES

    _seconds(both)
    link = statistics.median(_seconds(both) for _ in range(_COPY_REPEATS))
    rates = []
    for _ in range(_COPY_REPEATS):
        moved: list[int] = []
        spent = _seconds(lambda moved=moved: moved.append(with_cores()))
        rates.append(moved[0] / spent)
    return Rates(link=_COPY_BYTES / link, memory=statistics.median(rates))


def time_steps(config: Config, device: torch.device) -> tuple[dict[str, list[float]], dict[str, float], int]:
    """Milliseconds of every step of every variant; bytes of the device that SwapAdamW took, and its ring; elements."""
    params = parameters(config, device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    swap = SwapAdamW(params)
    for _ in range(_WARM_UP_STEPS):
        swap.step()
    torch.cuda.synchronize()
    memory = {
        "peak": float(torch.cuda.max_memory_allocated(device) - before),
        "ring": float(swap._engine.device_bytes),  # type: ignore[attr-defined]
    }
    variants: dict[str, Callable[[], object]] = {
        "swap": swap.step,
        "serial": SerialSwap(params, pin=True).step,
        "fused": torch.optim.AdamW(params, fused=True).step,
    }
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(_WARM_UP_STEPS + config.steps):
        for name, step in variants.items():
            spent = 1e3 * _seconds(step)
            if number >= _WARM_UP_STEPS:
                samples[name].append(spent)
    return samples, memory, sum(param.numel() for param in params)


def bars_of(medians: dict[str, float], limit: float, memory: dict[str, float]) -> list[Bar]:
    """What is asked for."""
    return [
        Bar(name="swap / limit", value=medians["swap"] / limit, limit=_MOST_OVER_LIMIT, at_least=False, unit="x"),
        Bar(
            name="serial / swap",
            value=medians["serial"] / medians["swap"],
            limit=_LEAST_OVER_SERIAL,
            at_least=True,
            unit="x",
        ),
        Bar(
            name="peak device memory / ring",
            value=memory["peak"] / memory["ring"],
            limit=_MOST_OVER_RING,
            at_least=False,
            unit="x",
        ),
    ]


def draw(medians: dict[str, float], limit: float, path: Path) -> None:
    """Medians as bars, and the limit as a line."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 2.4), layout="constrained")
    bars = axes.barh(
        list(medians), list(medians.values()), color=["#1f6f8b" if name == "swap" else "#9aa5b1" for name in medians]
    )
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.axvline(limit, color="#444444", linestyle="--", label=f"limit, {limit:.1f}")
    axes.legend(loc="lower right", frameon=False)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step, median")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebi", type=int, default=1024, help="Mi elements of all parameters")
    parser.add_argument("--tensors", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--picture", type=Path, help="file that gets a picture of the medians")
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "swap_gpu.jsonl", help="file that gets the results")
    return parser.parse_args()


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    if not torch.cuda.is_available():
        print("swap_gpu: torch finds no CUDA device, so nothing was measured.")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    config = Config(mebi=arguments.mebi, tensors=arguments.tensors, steps=arguments.steps)
    rates = measure_rates(device)
    samples, memory, numel = time_steps(config, device)
    limit = rates.limit(numel)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    told = {"device": torch.cuda.get_device_name(device), **asdict(config), "elements": numel, **asdict(rates)}
    record(arguments.out, "swap_gpu", {**told, "limit": limit, "bytes": memory}, samples)
    print(
        f"{numel:,} elements on {told['device']}; copies {rates.link / 1e9:.1f} GB/s each way at once, host memory "
        f"{rates.memory / 1e9:.1f} GB/s; load {conditions()['load']}\n"
    )
    rows = [[name, f"{median:.2f}", f"{median / limit:.2f}"] for name, median in [("limit", limit), *medians.items()]]
    print_table(["a step", "ms, median", "times the limit"], rows)
    if arguments.picture is not None:
        draw(medians, limit, arguments.picture)
    return print_bars(bars_of(medians, limit, memory))


if __name__ == "__main__":
    sys.exit(main())
