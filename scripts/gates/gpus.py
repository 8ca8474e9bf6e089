"""The gates of GPUs: refused where the GPUs are not there, else run under torchrun."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts.gates.catalogue import ROOT, Catalogue, CatalogueError, HardwareGate
from scripts.gates.environment import call
from scripts.gates.evidence import evidence_path, machine, versions, write
from scripts.gates.release import BUILD, check_unchanged, prepare
from scripts.gates.tree import GateError

__all__ = ["NUMBERS", "count_gpus", "judge_jobs", "refuse_without", "release_on_gpus"]

NUMBERS = (1, 2, 4)
# On one GPU two ranks share it, so that there is something to agree on.
_RANKS_ON_ONE = 2
_JOBS = "gpu_jobs.py"


def count_gpus() -> int:
    """How many GPUs the CUDA driver shows this process; 0 without a driver. Needs no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def refuse_without(gpus: int, found: int) -> None:
    """Refuses a number of GPUs that is not here.

    Raises:
        GateError: one sentence; no gate has passed, and none was skipped.
    """
    if gpus not in NUMBERS:
        raise GateError(f"GPUS={gpus}: the gates run on {', '.join(map(str, NUMBERS[:-1]))} or {NUMBERS[-1]} GPUs.")
    if found < gpus:
        raise GateError(
            f"make gate GPUS={gpus} needs {gpus} GPU{'s' * (gpus > 1)} and this machine shows {found}: nothing was run."
        )


def release_on_gpus(catalogue: Catalogue, gpus: int, only: Sequence[str], *, allow_dirty: bool) -> list[str]:
    """Runs the gates of so many GPUs from the installed wheel; returns what is wrong, a line each.

    One GPU is shared by two ranks over gloo; more have a rank each, with NCCL.

    Raises:
        GateError: the GPUs are not there, or something could not be made.
        CatalogueError: a gate is not known.
    """
    refuse_without(gpus, count_gpus())
    gates = [one for one in catalogue.hardware if gpus in one.gpus and (not only or one.id in only)]
    unknown = set(only) - {one.id for one in gates}
    if unknown or not gates:
        raise CatalogueError(f"no gate that runs on {gpus} GPUs is called {', '.join(sorted(unknown)) or 'anything'}")
    began = datetime.now(timezone.utc)
    prepared = prepare(allow_dirty=allow_dirty)
    workplace = prepared.place.workplace
    (workplace / _JOBS).write_bytes(Path(__file__).with_name(_JOBS).read_bytes())
    out = BUILD / "results" / f"gpus{gpus}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    ranks = gpus if gpus > 1 else _RANKS_ON_ONE
    jobs = list(dict.fromkeys(job for gate in gates for job in gate.jobs))
    command = [prepared.environment.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [_JOBS, "--device", "cuda", "--out", str(out), *jobs]
    failure = ""
    try:
        call(command, out.with_suffix(".log"), cwd=workplace)
    except GateError as error:
        failure = str(error)
    check_unchanged(prepared.tree)
    results = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    verdicts = {gate.id: judge_jobs(gate, results, ranks) for gate in gates}
    problems = [failure] * bool(failure)
    problems += [f"{name}: {problem}" for name, found in verdicts.items() for problem in found]
    evidence = {
        "format": 1,
        "commit": prepared.tree.commit,
        "dirty": bool(prepared.tree.changes),
        "allow_dirty": list(prepared.tree.changes),
        "verdict": "failed" if problems else "passed",
        "problems": problems,
        "gpus": gpus,
        "began": began.isoformat(timespec="seconds"),
        "wheel": {"name": prepared.wheel.path.name, "sha256": prepared.wheel.sha256},
        "versions": versions(prepared.environment),
        "machine": {**machine(), "gpu": results.get("gpu", "")},
        "gates": {gate.id: _described(gate, verdicts[gate.id], results, bool(failure)) for gate in gates},
    }
    path = evidence_path(BUILD if only else ROOT, evidence)
    write(path, evidence)
    print(f"evidence: {path}")
    return problems


def judge_jobs(gate: HardwareGate, results: dict[str, Any], ranks: int) -> list[str]:
    """Why a gate fails: a job that is not in the results, or has not ended well on every rank."""
    problems = []
    for job in gate.jobs:
        said = results.get("jobs", {}).get(job)
        if said is None:
            problems.append(f"{job}: did not run")
        elif len(said) != ranks:
            problems.append(f"{job}: {len(said)} ranks have answered, of {ranks}")
        problems += [f"{job}: rank {rank}: {text}" for rank, text in enumerate(said or []) if text != "ok"]
    return problems


def _described(gate: HardwareGate, problems: list[str], results: dict[str, Any], failed: bool) -> dict[str, Any]:
    return {
        "claim": gate.claim,
        "verdict": "failed" if problems or failed else "passed",
        "jobs": {job: results.get("jobs", {}).get(job) for job in gate.jobs},
        "digest": gate.digest,
        "problems": problems,
    }
