"""examples/under_a_trainer.py: each loop trains as an unsharded one, and resumes on other ranks where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.under_a_trainer import BATCH, LOOPS, STEPS, build

ROOT = Path(__file__).parents[2]
SAVE_AT = 3
# Weights and moments are float64 of size 1; sums over other numbers of ranks differ by some 1e-17.
TOLERANCE = 1e-12


def launched(folder: Path, loop: str, num_ranks: int, *options: str) -> dict[str, Any]:
    """What the example wrote."""
    out = folder / f"{num_ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["examples/under_a_trainer.py", loop, "--checkpoint", str(folder / "checkpoint")]
    command += ["--ranks", str(num_ranks), "--save-at", str(SAVE_AT), "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


def unsharded(*, accumulated: bool) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and weights of the same training in one process, without shardopt."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(STEPS):
        parts = (2 * step, 2 * step + 1) if accumulated else (step,)
        for part in parts:
            batch = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(part), dtype=torch.float64)
            loss = model(batch).square().mean()
            (loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def furthest(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """The largest difference of any number; of other keys, infinite."""
    if one.keys() != other.keys():
        return float("inf")
    return max(abs(a - b) for key in one for a, b in zip(one[key], other[key], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_unsharded_and_resumes_on_other_ranks(loop: str, tmp_path: Path) -> None:
    whole = launched(tmp_path, loop, 2)
    losses, weights = unsharded(accumulated=loop == "accelerate")
    assert [float(loss) for loss in whole["losses"].values()] == pytest.approx(losses, abs=TOLERANCE)
    end = whole["end"]
    assert furthest({key: end[key] for key in weights}, weights) < TOLERANCE
    resumed = launched(tmp_path, loop, 4, "--resume")
    assert [*resumed["losses"]] == [str(step) for step in range(SAVE_AT, STEPS)]
    assert [float(loss) for loss in resumed["losses"].values()] == pytest.approx(losses[SAVE_AT:], abs=TOLERANCE)
    assert furthest(resumed["end"], end) < TOLERANCE
    assert len(end) == len(weights) + 2 * len(weights)  # weights, and two moments of each
    assert furthest(whole["saved"], end) > 1e-4  # training went on after the save
