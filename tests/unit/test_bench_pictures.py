"""What is measured for pictures and for ranks on paper runs in its smallest form; pictures show all of it or refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scaling.fitting import fitted
from benchmarks.scaling.parts import owner_loads, plan_sizes, vote_ms
from tests.unit.test_benchmarks import ROOT, check_conditions, run_benchmark

pytestmark = pytest.mark.timeout(560)

NAMES = ["step-time", "checkpoint-time", "state-bytes", "checkpoint-memory", "host-kernel", "vote-time"]
SIZES = (
    *("--tensors", "2", "3", "--steps", "2", "--parameters", "2", "3", "--rounds", "2"),
    *("--threads", "3", "--votes", "6", "--elements", "64", "128"),
)


def draw(results: Path, pictures: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/pictures.py", "--results", str(results), "--pictures", str(pictures)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_curves_are_measured_and_all_pictures_drawn(tmp_path: Path) -> None:
    _, lines = run_benchmark("curves.py", *SIZES, out=tmp_path / "curves.jsonl")
    kinds = [line["benchmark"] for line in lines]
    assert kinds == [
        *["curve: step"] * 2,
        *["curve: checkpoint"] * 2,
        *["curve: bytes", "curve: vote"],
        *["curve: kernel"] * 2,
    ]
    for line in lines:
        check_conditions(line)
    assert lines[4]["samples"]["AdamW"] == 8.0
    assert lines[4]["samples"]["SwapAdamW, bf16, remainders"] == 6.0
    assert set(lines[5]["samples"]) == {"2 processes", "4 processes", "3 threads"}
    memory = ("memory", "--ranks", "2", "--big-parameters", "2", "--moment-side", "8")
    run_benchmark("checkpoint.py", *memory, out=tmp_path / "checkpoint.jsonl")
    for _ in range(2):
        done = draw(tmp_path, tmp_path / "pictures")
        assert done.returncode == 0, done.stderr
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "pictures").iterdir()}
    assert sorted(drawn) == sorted(NAMES)
    assert "bitsandbytes AdamW8bit" in drawn["state-bytes"]
    assert all(len(text) < 100_000 for text in drawn.values())


def test_a_picture_without_numbers_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "curves.jsonl").write_text(json.dumps({"benchmark": "curve: vote", "config": {}, "samples": {}}))
    done = draw(tmp_path, tmp_path / "pictures")
    assert done.returncode == 1
    assert "has no 'curve: step'; run python benchmarks/curves.py step" in done.stderr


@pytest.mark.slow
def test_scale(tmp_path: Path) -> None:
    sizes = ("--vote-ranks", "2", "3", "--votes", "5", "--parameters", "2", "4", "--plan-ranks", "2", "4")
    output, lines = run_benchmark("scale.py", *sizes, "--ranks", "8", "4096", out=tmp_path / "scale.jsonl")
    assert [line["benchmark"].removeprefix("scale: ") for line in lines] == [
        "vote",
        "plan",
        "manifest",
        "exchange",
        "table",
    ]
    assert output.count("model off by") == 6
    assert output.count("sent / worked out") == 4
    assert "4,096 ranks" in output


def test_a_fit_finds_its_weights_and_says_how_far_off_it_is() -> None:
    line = fitted("line", [((1.0, float(n)), 3.0 + 2.0 * n) for n in (1, 10, 100)])
    assert line.at(1.0, 1000.0) == pytest.approx(2003.0)
    assert line.off < 1e-6
    assert fitted("curve", [((1.0, float(n)), float(n * n)) for n in (1, 10, 100)]).off > 0.5


def test_threads_vote_and_all_get_a_verdict() -> None:
    times = vote_ms(3, 4)
    assert len(times) == 4
    assert min(times) > 0


def test_plans_of_simulated_ranks_grow_with_ranks_and_parameters() -> None:
    small, more_ranks, more_params = plan_sizes(2, 2), plan_sizes(2, 6), plan_sizes(6, 2)
    assert small.plan_bytes == more_ranks.plan_bytes < more_params.plan_bytes
    assert small.metadata_bytes < more_ranks.metadata_bytes


def test_owners_beyond_the_number_of_parameters_own_nothing() -> None:
    assert sorted(owner_loads([5, 3, 2], 5)) == [0, 0, 2, 3, 5]
    assert sorted(owner_loads([5, 3, 2], 2)) == [5, 5]
