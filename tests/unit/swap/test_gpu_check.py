"""The checks for a GPU run on a simulated device, notice what is wrong there, and say so where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardopt.swap.simulated_launch import HostLaunch
from tests.gpu import bench, engine, kernel, memory, ranks
from tests.gpu.checks import CHECKS, Check, run_check
from tests.gpu.target import Target

ROOT = Path(__file__).parents[3]
MODULES = (bench, engine, kernel, memory, ranks)

pytestmark = pytest.mark.timeout(560)

IN_ONE_PROCESS = [one for one in CHECKS if not one.needs_gpu and not one.name.startswith("ranks")]


def test_there_are_checks_and_each_is_of_a_module_that_is_run() -> None:
    assert len(CHECKS) > 15
    assert {one.run.__module__ for one in CHECKS} == {module.__name__ for module in MODULES}
    assert len({one.name for one in CHECKS}) == len(CHECKS)
    for row in ("F1", "F2", "F4", "F5", "F6", "F8", "F9", "F11", "F12"):
        assert any(row in one.name.replace("(", " ").replace(")", " ").replace(",", " ").split() for one in CHECKS), row


@pytest.mark.parametrize("one", IN_ONE_PROCESS, ids=lambda one: one.name.split(" (")[0])
def test_a_check_passes_on_a_simulated_device(one: Check) -> None:
    outcome = run_check(one, Target())
    assert outcome["passed"], outcome["error"]


@pytest.mark.parametrize("one", [engine.every_kind, engine.scaler, kernel.large_chunk], ids=lambda run: run.__name__)
def test_a_check_fails_where_a_launch_does_nothing(one: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostLaunch, "run", lambda launch: None)
    outcome = run_check(next(check for check in CHECKS if check.run is one), Target())
    assert not outcome["passed"]
    assert "AssertionError" in outcome["error"]


@pytest.mark.slow
def test_the_whole_program_on_a_simulated_device(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    command = [sys.executable, "-W", "error", "-m", "tests.gpu", "--dry", "--only", "ranks", "clip", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["simulated"]
    assert [one["passed"] for one in found["checks"]] == [True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which it would run")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    for command in (
        ["scripts/gpu_check.sh", str(out)],
        [sys.executable, "-m", "tests.gpu", "--out", str(out)],
    ):
        environment = {**os.environ, "PYTHON": sys.executable}
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, env=environment
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr == ""
        assert len(done.stdout.splitlines()) == 1
        assert "nothing was checked" in done.stdout
    assert not out.exists()
