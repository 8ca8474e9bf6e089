"""Each benchmark runs, in its smallest configuration; what they share tells passed from failed and counts memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.bars import Bar, print_bars
from benchmarks.harness.memory import measure

# Processes that import torch: slow on a busy machine, and only a hang is a failure.
pytestmark = pytest.mark.timeout(560)

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def run_benchmark(script: str, *arguments: str, out: Path) -> tuple[str, list[dict[str, Any]]]:
    command = [sys.executable, "-W", "error", f"benchmarks/{script}", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    # So small, it may miss its bars; then it has to say so.
    assert done.returncode == ("FAIL" in done.stdout), done.stdout
    return done.stdout, [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def check_conditions(line: dict[str, Any]) -> None:
    assert len(line["sha"]) == 12
    assert line["cpu"]
    assert line["torch"]
    assert len(line["load"]) == 3


@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    sizes = ("--tensors", "3", "--rows", "5", "--columns", "2", "--steps", "3", "--block", "2")
    # 5 columns: on 4 ranks the last holds nothing of the matrix of 5 rows.
    sizes_of_muon = ("--muon-width", "5", "--muon-layers", "1", "--muon-steps", "2")
    output, lines = run_benchmark("step.py", *sizes, *sizes_of_muon, out=tmp_path / "step.jsonl")
    found = [(line["config"]["ranks"], line["config"].get("kernel")) for line in lines]
    assert found == [(1, "fused"), (1, "foreach"), (2, "fused"), (2, "foreach"), (2, None), (4, None)]
    for line in lines[:4]:
        check_conditions(line)
        assert set(line["samples"]) == {"bare", "wrapped", "no vote", "plain", "vote"}
        assert all(len(times) == 3 and min(times) > 0 for times in line["samples"].values())
    for line in lines[4:]:
        check_conditions(line)
        assert set(line["samples"]) == {"bare", "owner", "replicated"}
        assert all(len(times) == 2 and min(times) > 0 for times in line["samples"].values())
    assert output.count("bare / wrapped") == 4
    assert output.count("bare / owner") == 2


def test_host_kernel(tmp_path: Path) -> None:
    arguments = ("--numel", "1003", "--repeats", "2", "--threads", "1")
    output, lines = run_benchmark("host_kernel.py", *arguments, out=tmp_path / "host_kernel.jsonl")
    assert [line["config"]["group"] for line in lines] == ["in_fp32", "in_and_out_in_bf16", "in_other_formats"]
    for line in lines:
        check_conditions(line)
        assert all(len(times) == 2 and min(times) > 0 for times in line["samples"].values())
    assert {"step, torch fused", "step", "probe", "clip + step, torch", "clip + step"} <= set(lines[0]["samples"])
    assert output.count("times the speed of") == 5


@pytest.mark.slow
def test_swap(tmp_path: Path) -> None:
    sizes = ("--tensors", "3", "--rows", "5", "--columns", "2", "--steps", "3", "--block", "2")
    output, lines = run_benchmark("swap.py", *sizes, out=tmp_path / "swap.jsonl")
    assert [line["config"]["ranks"] for line in lines] == [1, 2]
    for line in lines:
        check_conditions(line)
        assert set(line["samples"]) == {"fused", "swap", "wrapped", "clip + fused", "clip + swap"}
        assert all(len(times) == 3 and min(times) > 0 for times in line["samples"].values())
        assert line["config"]["slab per moments"] == 1
    assert output.count("fused / swap") == output.count("slab / moments") == 2


def test_consensus(tmp_path: Path) -> None:
    sizes = ("--tensors", "3", "--rows", "5", "--columns", "2", "--steps", "3", "--block", "2")
    output, lines = run_benchmark("consensus.py", *sizes, out=tmp_path / "consensus.jsonl")
    assert [line["config"]["ranks"] for line in lines] == [2, 4]
    for line in lines:
        check_conditions(line)
        assert set(line["samples"]) == {"checked", "off", "waiting", "vote", "all_gather"}
        assert all(len(times) == 3 and min(times) > 0 for times in line["samples"].values())
    assert output.count("checked - off") == output.count("checked - waiting") == 2


@pytest.mark.slow
def test_checkpoint(tmp_path: Path) -> None:
    sizes = ("--parameters", "2", "--rows", "4", "--columns", "2", "--rounds", "2")
    memory = ("--big-parameters", "2", "--moment-side", "8", "--directory", str(tmp_path))
    output, (time, weight) = run_benchmark("checkpoint.py", "--ranks", "1", *sizes, *memory, out=tmp_path / "out.jsonl")
    check_conditions(time)
    assert set(time["samples"]) == {"wrapped save", "bare save", "wrapped load", "bare load"}
    assert all(len(times) == 2 and min(times) > 0 for times in time["samples"].values())
    assert weight["config"]["state"] == [2 * 2 * 8 * 8 * 4]
    assert set(weight["samples"]) == {"wrapped save", "bare save", "fresh load", "warm load", "bare load"}
    for (footprint,) in weight["samples"].values():
        assert 0 < footprint["before"] <= footprint["peak"] >= footprint["after"]
    assert output.count("wrapped / bare") == 2
    assert output.count("over needed") == 6


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    sizes = ("--vocabulary", "7", "--width", "4", "--layers", "1")
    output, lines = run_benchmark("memory.py", *sizes, "--rules", "SGD", "AdamW", out=tmp_path / "memory.jsonl")
    assert [line["config"]["rule"] for line in lines] == ["SGD", "AdamW"]
    for line in lines:
        check_conditions(line)
        first, later = line["samples"]["first step"], line["samples"]["later step"]
        # Float32 of 7x4, 12x4, 4x4, 16x4 and 4x16, each on one rank.
        assert sum(rank["owned"] for rank in first) == sum(rank["owned"] for rank in later) == 4 * 4 * (7 + 12 + 4 + 32)
        assert all(rank["state"] > 0 for rank in first)
        assert all(rank["state"] == 0 for rank in later)
    assert output.count("step: over") == 4


@pytest.mark.parametrize(("value", "at_least", "passed"), [(1.2, True, True), (1.19, True, False), (1.3, False, False)])
def test_one_missed_bar_fails_all(
    value: float, at_least: bool, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = [
        Bar(name="one", value=value, limit=1.2, at_least=at_least),
        Bar(name="two", value=3, limit=3, at_least=False),
    ]
    assert print_bars(bars) == (0 if passed else 1)
    assert ("FAIL" in capsys.readouterr().out) is not passed


def test_memory_that_comes_and_goes_is_in_the_peak_alone() -> None:
    kept: list[bytearray] = []

    def operation() -> None:
        bytearray(b"\1") * (96 * MIB)
        kept.append(bytearray(b"\1") * (32 * MIB))

    footprint = measure(operation)
    assert footprint.peak - footprint.before >= 90 * MIB
    assert 30 * MIB <= footprint.after - footprint.before <= 60 * MIB
    # The last peak is forgotten.
    assert measure(lambda: None).peak - footprint.after <= 8 * MIB
