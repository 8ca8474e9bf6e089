"""The jobs of the GPU gates, on CPU meshes: what they check can be met, and is missed when it is not so."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.gates import gpu_jobs
from scripts.gates.catalogue import read
from scripts.gates.gpu_jobs import JOBS, Place
from tests.support.ranks import RankPool


def as_rank(name: str, folder: str) -> str:
    place = Place(device="cpu", folder=folder, words=dist.new_group(backend="gloo"))
    out = Path(folder) / "out.json"
    passed = gpu_jobs.run([name], place, out)
    dist.barrier()
    said: dict[str, Any] = json.loads(out.read_text())
    assert passed == (set(said["jobs"][name]) == {"ok"})
    return said["jobs"][name][dist.get_rank()]


def as_rank_that_loses_bits(name: str, folder: str) -> str:
    """Whatever the last rank looks at, it sees something else each time."""
    looks = itertools.count()

    def wrong(value: torch.Tensor) -> torch.Tensor:
        return genuine(value) + next(looks) * dist.get_rank()

    genuine = gpu_jobs._whole
    gpu_jobs._whole = wrong
    try:
        return as_rank(name, folder)
    finally:
        gpu_jobs._whole = genuine


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", JOBS)
def test_jobs_pass_on_the_cpu(ranks: RankPool, tmp_path: Path, name: str, world_size: int) -> None:
    assert ranks.run(world_size, as_rank, name, str(tmp_path), deadline_s=90.0) == ["ok"] * world_size


@pytest.mark.parametrize("name", ["resume", "presentations", "zero_size"])
def test_a_difference_on_one_rank_is_told(ranks: RankPool, tmp_path: Path, name: str) -> None:
    said = ranks.run(2, as_rank_that_loses_bits, name, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith("AssertionError: rank 1: ")
    assert "differ" in said[0]


def test_every_gate_names_jobs_that_there_are() -> None:
    named = {job for gate in read().hardware for job in gate.jobs}
    assert named == JOBS.keys()
