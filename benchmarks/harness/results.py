"""Results: one line of JSON for each thing measured, with all that is needed to judge it later."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

__all__ = ["LOCAL_RESULTS", "conditions", "record"]

_BENCHMARKS = Path(__file__).resolve().parent.parent

# From the root of the repository, wherever git is called; results change with each run.
_CODE = (":/src", ":/csrc", ":/benchmarks", ":(top,exclude)benchmarks/results")

# Not in git. Results to be kept are written to the folder above it, by --out.
LOCAL_RESULTS = _BENCHMARKS / "results" / "local"


def conditions() -> dict[str, Any]:
    """Under what circumstances this process measures: code, machine, torch, and how busy the machine is."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "sha": _git("rev-parse", "--short=12", "HEAD"),
        "modified": _git("status", "--porcelain", "--untracked-files=no", "--", *_CODE) != "",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "nice": os.nice(0),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def record(path: Path, benchmark: str, config: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
    """Adds one line to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"benchmark": benchmark, **conditions(), "config": dict(config), "samples": dict(samples)}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_BENCHMARKS, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
