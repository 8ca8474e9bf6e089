"""Trains on 2 ranks, saves half way, resumes on 2, 4 and 1, and shows that all four runs are the same.

    python scripts/demo.py

Runs examples/train_fsdp2.py with torchrun, prints one table, and writes demo/loss.png and demo/results.json. Exits
with 1 and a sentence if a run fails, if the optimizer state that a run resumes from is not, byte for byte, the state
that was saved, or if a printed loss differs from the uninterrupted run's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a machine without a display can write the picture too
from matplotlib import pyplot as plt

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "examples" / "train_fsdp2.py"
STEPS = 80
SAVE_AT = 40
RESUMED_RANKS = (2, 4, 1)
SHOWN_STEPS = (41, 42, 43, 44, 45, 50, 55, 60, 65, 70, 75, 80)
# The mean over a batch is summed in another order on another number of ranks. In float64 that moves a loss of 3 by
# some 1e-15, far below the printed digits, so a digit that differs is an error in the state and not rounding.
LOSS_DIGITS = {"float64": 6, "float32": 3}
RUN_TIMEOUT_S = 600
TAIL_LINES = 30


class DemoError(Exception):
    """The demo did not show what it should; the message is the whole explanation."""


def count_ranks(ranks: int) -> str:
    """1 rank, 2 ranks."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of the training script reported."""

    ranks: int
    resumed: bool
    wall_s: float
    events: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """How tables and messages call this run."""
        return f"{'resumed' if self.resumed else 'uninterrupted'} on {count_ranks(self.ranks)}"

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {event["step"]: event["loss"] for event in self.events if event["event"] == "trained"}

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(event["seconds"] for event in self.events if event["event"] == "trained")

    @property
    def checkpoint_event(self) -> dict[str, Any]:
        """The event that tells of this run's one save or resume."""
        wanted = "resumed" if self.resumed else "saved"
        found = [event for event in self.events if event["event"] == wanted]
        if len(found) != 1:
            raise DemoError(f"{self.title}: reported {wanted!r} {len(found)} times instead of once.")
        return found[0]


def failure_text(output: str) -> str:
    """The last lines of a failed run that are its own: torchrun's account of the exit comes after them."""
    lines = output.splitlines()
    account = next((index for index, line in enumerate(lines) if "torch/distributed/elastic/" in line), len(lines))
    return "\n".join((lines[:account] or lines)[-TAIL_LINES:])


def run_to_end(command: Sequence[str], log: Path) -> None:
    """Runs the command with its output in `log`; DemoError with its last lines if it fails or takes too long."""
    with log.open("w", encoding="utf-8") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            status: int | None = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers when it is told to end
                process.wait()
    if status != 0:
        what = f"did not end within {RUN_TIMEOUT_S} s" if status is None else f"ended with status {status}"
        text = failure_text(log.read_text(encoding="utf-8", errors="replace"))
        raise DemoError(f"{' '.join(command)}\n{what}. Its last lines ({log} has all):\n\n{text}")


def train(ranks: int, *, resume: bool, options: argparse.Namespace) -> Run:
    """Runs the training script on so many ranks; the run that does not resume is the one that saves."""
    out: Path = options.out
    name = f"{'resumed' if resume else 'uninterrupted'}-{ranks}"
    events = out / f"{name}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    command += ["--checkpoint", str(out / "checkpoint"), "--events", str(events), "--steps", str(STEPS)]
    command += ["--dtype", options.dtype, "--device", options.device]
    command += ["--resume"] if resume else ["--save-at", str(SAVE_AT)]
    print(f"{'Resuming' if resume else 'Training and saving'} on {count_ranks(ranks)} ...", end=" ", flush=True)
    began = time.perf_counter()
    run_to_end(command, out / f"{name}.txt")
    wall_s = time.perf_counter() - began
    print(f"{wall_s:.0f} s", flush=True)
    lines = events.read_text(encoding="utf-8").splitlines()
    return Run(ranks=ranks, resumed=resume, wall_s=wall_s, events=[json.loads(line) for line in lines])


def differences(run: Run, reference: Run) -> dict[int, float]:
    """By step after the save: the run's loss minus the uninterrupted run's."""
    missing = [step for step in range(SAVE_AT + 1, STEPS + 1) if step not in run.losses]
    if missing:
        raise DemoError(f"{run.title} reported no loss for steps {missing}.")
    return {step: run.losses[step] - reference.losses[step] for step in range(SAVE_AT + 1, STEPS + 1)}


def problems(resumed: Sequence[Run], reference: Run, digits: int) -> list[str]:
    """One sentence for everything in which a resumed run differs visibly from the uninterrupted one."""
    found = []
    saved = reference.checkpoint_event["digest"]
    for run in resumed:
        restored = run.checkpoint_event["digest"]
        if restored != saved:
            found.append(f"{run.title}: the optimizer state after the load is {restored}, but {saved} was saved.")
        different = [
            f"step {step}: {run.losses[step]:.{digits}f} for {reference.losses[step]:.{digits}f}"
            for step in differences(run, reference)
            if f"{run.losses[step]:.{digits}f}" != f"{reference.losses[step]:.{digits}f}"
        ]
        if different:
            found.append(f"{run.title}: {len(different)} of its losses differ, the first at {different[0]}.")
    return found


def table(runs: Sequence[Run], checkpoint_bytes: int, digits: int) -> str:
    """All runs side by side, the uninterrupted one first."""
    reference, *resumed = runs
    largest = [max(abs(value) for value in differences(run, reference).values()) for run in resumed]
    hashes = [run.checkpoint_event["digest"][:12] for run in runs]
    times = [f"{run.checkpoint_event['seconds']:.2f} s" for run in runs]
    blank = [""] * len(resumed)
    rows = [
        ["", *("resumed" if run.resumed else "uninterrupted" for run in runs)],
        ["", *(count_ranks(run.ranks) for run in runs)],
        *([f"loss, step {step}", *(f"{run.losses[step]:.{digits}f}" for run in runs)] for step in SHOWN_STEPS),
        [f"largest difference, {SAVE_AT + 1}-{STEPS}", "", *(f"{value:.1e}" if value else "0" for value in largest)],
        ["optimizer state as saved", hashes[0], *blank],
        ["optimizer state as loaded", "", *hashes[1:]],
        ["dcp.save", times[0], *blank],
        ["dcp.load", "", *times[1:]],
        ["checkpoint", f"{checkpoint_bytes / 1e6:.2f} MB", *blank],
        ["one step, median", *(f"{run.step_s * 1e3:.0f} ms" for run in runs)],
        ["whole run", *(f"{run.wall_s:.1f} s" for run in runs)],
    ]
    label_width = max(len(row[0]) for row in rows)
    lines = ["  ".join([row[0].ljust(label_width), *(cell.rjust(13) for cell in row[1:])]).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([*lines[:2], rule, *lines[2:], rule])


def plot(runs: Sequence[Run], path: Path) -> None:
    """The uninterrupted loss curve with the resumed runs as markers on it; below, how far they are from it."""
    reference, *resumed = runs
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"})
    figure, (losses, errors) = plt.subplots(
        2, 1, figsize=(8.5, 5.6), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    steps, values = zip(*reference.losses.items(), strict=True)
    losses.plot(steps, values, color="0.45", linewidth=1.3, label=reference.title)
    styles = (("o", "#0072b2"), ("s", "#d55e00"), ("^", "#009e73"))  # told apart by colour-blind readers too
    for order, (run, (marker, color)) in enumerate(zip(resumed, styles, strict=True)):
        # every run marks steps of its own, so that equal losses do not hide each other
        shown = range(SAVE_AT + 1 + order, STEPS + 1, len(resumed))
        look = {"linestyle": "none", "marker": marker, "color": color}
        losses.plot(shown, [run.losses[step] for step in shown], markersize=5, label=run.title, **look)
        steps, values = zip(*differences(run, reference).items(), strict=True)
        errors.plot(steps, values, markersize=3, **look)
    for axes in (losses, errors):
        axes.axvline(SAVE_AT + 0.5, color="0.2", linewidth=1, linestyle=(0, (4, 3)))
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    losses.text(SAVE_AT, 0.97, "saved", transform=losses.get_xaxis_transform(), ha="right", va="top")
    losses.set(title="Saved on 2 ranks, resumed on 2, 4 and 1", ylabel="training loss")
    losses.legend(frameon=False, loc="upper right")
    errors.set(xlabel="step", ylabel="difference", xlim=(0, STEPS + 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_results(runs: Sequence[Run], checkpoint_bytes: int, found: Sequence[str], path: Path) -> None:
    """Everything the table is made of, with every loss in full."""
    results = {
        "problems": list(found),
        "checkpoint_bytes": checkpoint_bytes,
        "runs": [{"title": run.title, "wall_s": run.wall_s, "events": run.events} for run in runs],
    }
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "demo", help="folder for results (default: demo)")
    parser.add_argument("--dtype", choices=sorted(LOSS_DIGITS), default="float64", help="default: %(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs 4 GPUs; default: cpu")
    return parser.parse_args()


def prepare(out: Path) -> None:
    """Removes what an earlier demo left, so that nothing stale can pass for a result."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    for pattern in ("loss.png", "results.json", "uninterrupted-*.*", "resumed-*.*"):
        for file in out.glob(pattern):
            file.unlink()


def demonstrate(options: argparse.Namespace) -> None:
    """Runs everything, prints the table, writes the files; DemoError if the runs are not the same."""
    prepare(options.out)
    digits = LOSS_DIGITS[options.dtype]
    reference = train(2, resume=False, options=options)
    checkpoint_bytes = sum(file.stat().st_size for file in (options.out / "checkpoint").iterdir())
    resumed = [train(ranks, resume=True, options=options) for ranks in RESUMED_RANKS]
    runs = [reference, *resumed]
    found = problems(resumed, reference, digits)
    started = reference.events[0]
    print(
        f"\nA transformer of {started['parameters']:,} parameters in {started['dtype']} under fully_shard, AdamW, on"
        f" {started['device']};\nthe text is the source of Python {sys.version.split()[0]}'s standard library.\n"
    )
    print(table(runs, checkpoint_bytes, digits))
    plot(runs, options.out / "loss.png")
    write_results(runs, checkpoint_bytes, found, options.out / "results.json")
    if found:
        raise DemoError("\n".join(found))
    print(
        "\nOn 2, 4 and 1 ranks the optimizer state is the saved one, byte for byte (SHA-256 of the gathered tensors),"
        f"\nand all {STEPS - SAVE_AT} losses after the save equal the uninterrupted run's in all {digits} decimals."
        f"\nWritten: {options.out / 'loss.png'}, {options.out / 'results.json'}"
    )


def main() -> int:
    """Returns the exit status: 1 if the demo failed, with the reason on standard error."""
    try:
        demonstrate(parse_options())
    except DemoError as error:
        print(f"\nThe demo failed.\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
