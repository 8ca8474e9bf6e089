"""Times the AdamW step on host memory: the kernel in csrc/ against torch's fused one, and against memory itself.

    python benchmarks/host_kernel.py

One tensor of float32, with as many threads for torch as for the kernel. All variants run in one process, in turn, each
time in another order; ratios are medians of the ratios of neighbours in time. The variants:

- a step: ``torch.optim.AdamW(fused=True)``, over tensors of its own and over the kernel's, and the kernel. Equally
  large tensors of torch tend to fall on the same lines of the first-level cache, which costs;
- what memory allows: the kernel's loop over the same four buffers with next to no arithmetic, which reads all of them
  and writes three, values unchanged (``probe_rows`` in csrc/engine.cpp);
- clipping and a step: ``torch.nn.utils.clip_grad_norm_`` and torch's step; and the kernel's sum of squares, whose
  coefficient its step takes;
- a gradient in bf16 that is scaled, and a copy of the parameter in bf16: three passes, with torch's step and with the
  kernel's, and the kernel alone. Torch has no pass at the speed of memory that widens and multiplies, so the first of
  the three only widens, which is less than has to be done;
- other formats of the kernel, and DeepSpeed's CPU Adam where it is installed.

The kernel's moments lie in huge pages that its own threads have touched first, as those of ``SwapAdamW`` do; parameter
and gradient are torch's tensors. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from harness.bars import Bar, print_bars, print_table
from harness.results import LOCAL_RESULTS, conditions, record
from torch import Tensor

from shardopt import _host
from shardopt.swap.host_kernel import (
    HYPER,
    ROW,
    DtypeCode,
    MasterKind,
    Table,
    adamw_hyper,
    adamw_rows,
    available_isas,
    default_threads,
    first_touch,
    sum_of_squares,
)

_SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
_HYPERS = np.array([adamw_hyper(**_SETTINGS, step=10)], HYPER)
_SCALE = 65536.0  # of the loss, for the gradients in bf16
_FP32, _BF16 = torch.float32, torch.bfloat16

# What the kernel's numbers are measured by: its variant, theirs, the least ratio, and what bytes of an element move.
_BARS = [
    ("step", "step, torch fused", 0.95),
    ("step", "step, torch fused, the kernel's memory", 0.95),
    ("step", "probe", 0.85),
    ("clip + step", "clip + step, torch", 1.5),
    ("bf16 in and out", "bf16 in and out, three passes", 1.25),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured.

    Attributes:
        numel: elements of the tensor.
        threads: of torch and of the kernel.
        isa: level of the kernel.
        repeats: how often each variant runs; one more run comes first and does not count.
    """

    numel: int
    threads: int
    isa: str
    repeats: int


class Slab:
    """Zeros in huge pages, where the system has them, cut into tensors."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._free = 0

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next piece, from a multiple of 256 bytes on."""
        found = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._free)
        self._free += -(-numel * dtype.itemsize // 256) * 256
        return found


class Kernel:
    """A parameter, its moments, and the row that points to them."""

    def __init__(
        self, param: Tensor, grad: Tensor, config: Config, *, moments: torch.dtype = _FP32, master: Tensor | None = None
    ) -> None:
        numel = param.numel()
        self.config, self.param, self.grad, self.master = config, param, grad, master
        slab = Slab(2 * (numel * moments.itemsize + 256))
        self.moments = [slab.tensor(numel, moments) for _ in range(2)]
        self.out = torch.empty(numel, dtype=_BF16)
        self.rows: Table = np.zeros(1, ROW)
        row = self.rows[0]
        row["param"], row["grad"] = param.data_ptr(), grad.data_ptr()
        row["exp_avg"], row["exp_avg_sq"] = (moment.data_ptr() for moment in self.moments)
        row["numel"] = row["index_run"] = numel
        for name, dtype in (("param", param.dtype), ("grad", grad.dtype), ("moment", moments)):
            row[f"{name}_dtype"] = DtypeCode.BF16 if dtype == _BF16 else DtypeCode.FP32
        if master is not None:
            row["master"] = master.data_ptr()
            row["master_kind"] = MasterKind.FP32 if master.dtype == _FP32 else MasterKind.REMAINDER16
        first_touch(self.rows, num_threads=config.threads)

    def with_copy(self) -> Kernel:
        """Itself, and every step writes a copy in bf16."""
        self.rows["out"] = self.out.data_ptr()
        return self

    def step(self, grad_scale: float = 1.0) -> None:
        """One step."""
        config = self.config
        adamw_rows(self.rows, _HYPERS, seed=0, grad_scale=grad_scale, num_threads=config.threads, isa=config.isa)

    def clip_and_step(self) -> None:
        """One step whose gradients' norm is 1."""
        norm = float(sum_of_squares(self.rows, num_threads=self.config.threads, isa=self.config.isa).sum() ** 0.5)
        self.step(min(1.0, 1.0 / (norm + 1e-6)))

    def probe(self) -> None:
        """Memory traffic of a step."""
        problems = _host.probe_rows(self.rows.view(np.uint8), self.config.threads, self.config.isa)
        if problems:
            raise RuntimeError(f"the probe was refused: {problems}")


def fused(param: Tensor) -> torch.optim.Optimizer:
    """Torch's fused AdamW over the parameter, which has a gradient; it has made its state."""
    optimizer = torch.optim.AdamW(
        [param],
        lr=_SETTINGS["lr"],
        betas=(_SETTINGS["beta1"], _SETTINGS["beta2"]),
        eps=_SETTINGS["eps"],
        weight_decay=_SETTINGS["weight_decay"],
        fused=True,
    )
    optimizer.step()
    return optimizer


def in_fp32(config: Config) -> dict[str, Callable[[], object]]:
    """A step of float32, alone and after clipping."""
    param = torch.nn.Parameter(torch.randn(config.numel))
    param.grad = torch.randn(config.numel)
    kernel = Kernel(param.detach().clone(), param.grad, config)
    same = torch.nn.Parameter(kernel.param)
    same.grad = param.grad
    theirs, placed = fused(param), fused(same)
    for name, moment in zip(("exp_avg", "exp_avg_sq"), kernel.moments, strict=True):
        placed.state[same][name] = moment

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        theirs.step()

    return {
        "step, torch fused": theirs.step,
        "step, torch fused, the kernel's memory": placed.step,
        "step": kernel.step,
        "probe": kernel.probe,
        "clip + step, torch": clip_and_step,
        "clip + step": kernel.clip_and_step,
        **_deepspeed(param),
    }


def in_and_out_in_bf16(config: Config) -> dict[str, Callable[[], object]]:
    """A step with a scaled gradient in bf16 and a copy of the parameter in bf16."""
    narrow, wide = torch.randn(config.numel).mul_(_SCALE).to(_BF16), torch.empty(config.numel)
    param = torch.nn.Parameter(torch.randn(config.numel))
    param.grad = wide
    theirs = fused(param)
    one = Kernel(param.detach().clone(), narrow, config).with_copy()
    three = Kernel(param.detach().clone(), wide, config)
    copy = torch.empty(config.numel, dtype=_BF16)

    def three_passes(step: Callable[[], object], value: Tensor) -> None:
        wide.copy_(narrow)
        step()
        copy.copy_(value)

    return {
        "bf16 in and out, three passes": lambda: three_passes(theirs.step, param.detach()),
        "bf16 in and out, three passes, the kernel's step": lambda: three_passes(three.step, three.param),
        "bf16 in and out": lambda: one.step(1 / _SCALE),
    }


def in_other_formats(config: Config) -> dict[str, Callable[[], object]]:
    """Steps of bf16 parameters."""
    value = torch.randn(config.numel)
    grad = torch.randn(config.numel).to(_BF16)
    remainder = torch.zeros(config.numel, dtype=torch.int16)
    return {
        "bf16, fp32 master and moments": Kernel(value.to(_BF16), grad, config, master=value.clone()).step,
        "bf16, 16-bit remainder, fp32 moments": Kernel(value.to(_BF16), grad, config, master=remainder).step,
        "bf16, 16-bit remainder, bf16 moments": Kernel(
            value.to(_BF16), grad, config, moments=_BF16, master=remainder.clone()
        ).step,
    }


def _deepspeed(param: torch.nn.Parameter) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: its CPU Adam is left out.\n")
        return {}
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    own = torch.nn.Parameter(param.detach().clone())
    own.grad = param.grad
    return {"step, DeepSpeed": DeepSpeedCPUAdam([own], lr=_SETTINGS["lr"], weight_decay=_SETTINGS["weight_decay"]).step}


def measured(variants: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each variant."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for repeat in range(repeats + 1):
        for name in order:
            begun = time.perf_counter()
            variants[name]()
            if repeat:
                samples[name].append(time.perf_counter() - begun)
        # Another one first, and each after another.
        order = order[1:] + order[:1] if repeat % 2 else order[::-1]
    return samples


def ratio(samples: dict[str, list[float]], mine: str, theirs: str) -> float:
    """How many times faster mine is."""
    return statistics.median(other / own for own, other in zip(samples[mine], samples[theirs], strict=True))


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=32 << 20, help="elements of the tensor")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of torch and of the kernel")
    parser.add_argument("--isa", default=available_isas()[-1], choices=available_isas(), help="level of the kernel")
    parser.add_argument("--repeats", type=int, default=15, help="counted runs of each variant")
    parser.add_argument("--picture", type=Path, help="file that gets a picture of the medians")
    parser.add_argument(
        "--out", type=Path, default=LOCAL_RESULTS / "host_kernel.jsonl", help="file that gets the results"
    )
    return parser.parse_args()


def main() -> int:
    """Measures, records and prints; the exit status."""
    arguments = read_arguments()
    config = Config(numel=arguments.numel, threads=arguments.threads, isa=arguments.isa, repeats=arguments.repeats)
    torch.set_num_threads(config.threads)
    samples: dict[str, list[float]] = {}
    # One after the other, for their memory.
    for group in (in_fp32, in_and_out_in_bf16, in_other_formats):
        found = measured(group(config), config.repeats)
        record(arguments.out, "host_kernel", {"group": group.__name__, **asdict(config)}, found)
        samples |= found
    load = conditions()["load"]
    print(
        f"{config.numel:,} elements, {config.threads} threads, {config.isa}, torch {torch.__version__}; load {load}\n"
    )
    rows = [
        [name, *(f"{1e3 * value:.1f}" for value in (statistics.median(times), min(times)))]
        for name, times in samples.items()
    ]
    print_table(["ms", "median", "least"], rows)
    if arguments.picture is not None:
        draw(samples, arguments.picture)
    return print_bars(
        [
            Bar(
                name=f"{mine}: times the speed of: {theirs}",
                value=ratio(samples, mine, theirs),
                limit=limit,
                at_least=True,
            )
            for mine, theirs, limit in _BARS
        ]
    )


def draw(samples: dict[str, list[float]], path: Path) -> None:
    """Medians as bars, the kernel's in another colour."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    theirs = {other for _, other, _ in _BARS}
    names = [name for name in samples if name in theirs or name in {mine for mine, _, _ in _BARS}]
    medians = [1e3 * statistics.median(samples[name]) for name in names]
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    bars = axes.barh(names, medians, color=["#9aa5b1" if name in theirs else "#1f6f8b" for name in names])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, median")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
