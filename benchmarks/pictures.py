"""Draws the benchmarks' results: one SVG a question, for the documentation.

    python benchmarks/pictures.py                                  # of results/local, which `make bench` fills
    python benchmarks/pictures.py --results benchmarks/results     # of those that are kept

Reads curves.jsonl and checkpoint.jsonl and takes of each kind of measurement the latest run. A picture whose numbers
are missing is an error, with the command that measures them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")  # a machine without a display can draw too
from harness.results import LOCAL_RESULTS
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_MIB = 1 << 20
_COLOURS = ("#9aa5b1", "#1f6f8b", "#d1794a", "#5b8c5a")
Line = Mapping[str, Any]


class MissingError(Exception):
    """There is nothing to draw; the message is the whole explanation."""


def read(directory: Path, file: str, kind: str, command: str) -> list[Line]:
    """The lines of a kind, the latest of each configuration, in the order of the latest run."""
    path = directory / file
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    found: dict[str, Line] = {}
    for line in lines:
        if line["benchmark"] == kind:
            key = json.dumps(line["config"], sort_keys=True)
            found.pop(key, None)
            found[key] = line
    if not found:
        raise MissingError(f"{path} has no {kind!r}; run python benchmarks/{command} --out {path}")
    return [*found.values()]


def _medians(lines: Iterable[Line], name: str) -> list[float]:
    return [statistics.median(line["samples"][name]) for line in lines]


def _curves(axes: Axes, sizes: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    for (name, values), colour in zip(curves.items(), _COLOURS, strict=False):
        axes.plot(sizes, values, marker="o", markersize=4, color=colour, label=name)
    axes.set_xscale("log")
    axes.legend(frameon=False)


def step_time(axes: Axes, directory: Path) -> None:
    """By the number of tensors."""
    lines = read(directory, "curves.jsonl", "curve: step", "curves.py step")
    sizes = [line["config"]["tensors"] for line in lines]
    names = {"bare": "AdamW(fused) on DTensors", "wrapped": "wrapped", "no vote": 'wrapped, consensus="off"'}
    _curves(axes, sizes, {label: _medians(lines, name) for name, label in names.items()})
    axes.set_yscale("log")
    axes.set(xlabel="tensors of 16 x 16, 2 ranks", ylabel="milliseconds a step, median")


def checkpoint_time(axes: Axes, directory: Path) -> None:
    """By the number of parameters."""
    lines = read(directory, "curves.jsonl", "curve: checkpoint", "curves.py checkpoint")
    sizes = [line["config"]["parameters"] for line in lines]
    names = ("bare save", "wrapped save", "bare load", "wrapped load")
    _curves(axes, sizes, {name: _medians(lines, name) for name in names})
    axes.set_yscale("log")
    axes.set(xlabel="parameters of 64 x 64, AdamW, 2 ranks", ylabel="seconds, median")


def state_bytes(axes: Axes, directory: Path) -> None:
    """By optimizer."""
    (*_, line) = read(directory, "curves.jsonl", "curve: bytes", "curves.py bytes")
    samples = line["samples"]
    bars = axes.barh(list(samples), list(samples.values()), color=_COLOURS[1])
    axes.margins(x=0.1)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="bytes of state for each element of a 512 x 512 parameter")


def checkpoint_memory(axes: Axes, directory: Path) -> None:
    """At the peak and afterwards, over what was there before, on the rank that takes most."""
    lines = read(directory, "checkpoint.jsonl", "checkpoint memory", "checkpoint.py memory")
    line = max(lines, key=lambda one: one["config"]["ranks"])
    names = ["wrapped save", "fresh load", "warm load"]
    worst = [max(line["samples"][name], key=lambda one: one["peak"] - one["before"]) for name in names]
    places = range(len(names))
    for shift, what, colour in ((-0.2, "peak", _COLOURS[2]), (0.2, "after", _COLOURS[1])):
        values = [(one[what] - one["before"]) / _MIB for one in worst]
        bars = axes.barh([place + shift for place in places], values, height=0.36, color=colour, label=what)
        axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.axvline(max(line["config"]["state"]) / _MIB, color=_COLOURS[0], linestyle="--", label="state of a rank")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.legend(frameon=False)
    axes.set(xlabel=f"resident MiB over those before, {line['config']['ranks']} ranks")


def host_kernel(axes: Axes, directory: Path) -> None:
    """Against what memory allows."""
    lines = read(directory, "curves.jsonl", "curve: kernel", "curves.py kernel")
    sizes = [line["config"]["numel"] for line in lines]
    moved = [line["config"]["numel"] * line["config"]["bytes of step"] / 1e9 for line in lines]
    names = {"torch fused": "torch, fused", "kernel": "host kernel", "memory": "the same bytes, no arithmetic"}
    curves = {
        label: [bytes_ / seconds for bytes_, seconds in zip(moved, _medians(lines, name), strict=True)]
        for name, label in names.items()
    }
    _curves(axes, sizes, curves)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=f"elements, fp32, {lines[0]['config']['threads']} threads", ylabel="GB/s, median")


def vote_time(axes: Axes, directory: Path) -> None:
    """By the number of ranks."""
    (*_, line) = read(directory, "curves.jsonl", "curve: vote", "curves.py vote")
    for what, colour in (("processes", _COLOURS[1]), ("threads", _COLOURS[2])):
        found = {int(name.split()[0]): times for name, times in line["samples"].items() if name.endswith(what)}
        label = f"ranks as {what} of one machine"
        axes.plot(list(found), [statistics.median(t) for t in found.values()], "o-", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    axes.set(xlabel="ranks", ylabel="milliseconds a vote, median")


PICTURES: Mapping[str, Callable[[Axes, Path], None]] = {
    "step-time": step_time,
    "checkpoint-time": checkpoint_time,
    "state-bytes": state_bytes,
    "checkpoint-memory": checkpoint_memory,
    "host-kernel": host_kernel,
    "vote-time": vote_time,
}
"""Name of the file -> what draws it."""


def draw(results: Path, pictures: Path) -> list[Path]:
    """Draws all of them.

    Raises:
        MissingError: what one of them shows was not measured.
    """
    pictures.mkdir(parents=True, exist_ok=True)
    # Text stays text, and equal numbers give equal files.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "shardopt", "font.size": 9})
    made: list[Path] = []
    for name, paint in PICTURES.items():
        figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
        paint(axes, results)
        axes.spines[["top", "right"]].set_visible(False)
        made.append(pictures / f"{name}.svg")
        figure.savefig(made[-1], metadata={"Date": None})
        plt.close(figure)
    return made


def main() -> int:
    """Draws; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=LOCAL_RESULTS, help="folder of the JSON lines")
    parser.add_argument("--pictures", type=Path, default=_PICTURES, help="folder of the pictures")
    arguments = parser.parse_args()
    try:
        made = draw(arguments.results, arguments.pictures)
    except MissingError as error:
        print(error, file=sys.stderr)
        return 1
    for path in made:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
