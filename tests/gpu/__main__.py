"""Runs all checks and writes what they found.

    python -m tests.gpu [--out build/gpu_check.json] [--only WORD ...] [--dry]

Exits with 1 if one failed, and with 2 where there is no GPU. It has not run on one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tests.gpu import bench, engine, kernel, memory, ranks
from tests.gpu.checks import CHECKS, run_check
from tests.gpu.target import CudaTarget, Target

# Each puts its checks on the list.
_MODULES = (kernel, engine, memory, ranks, bench)
_ROOT = Path(__file__).resolve().parents[2]


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "build" / "gpu_check.json", help="file that gets the results"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="checks whose name has one of these")
    parser.add_argument("--dry", action="store_true", help="on a simulated device, to try the checks themselves")
    return parser.parse_args()


def conditions(target: Target) -> dict[str, Any]:
    """Where it ran."""
    versions = {}
    for name in ("torch", "triton", "numpy", "nanobind"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "device": target.name(),
        "simulated": target.is_dry,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def main() -> int:
    """Runs the checks; the exit status."""
    arguments = read_arguments()
    if not arguments.dry and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device, so nothing was checked.")
        return 2
    target = Target() if arguments.dry else CudaTarget()
    chosen = [
        one
        for one in CHECKS
        if not (one.needs_gpu and target.is_dry)
        and (not arguments.only or any(word in one.name for word in arguments.only))
    ]
    if not chosen:
        print(f"gpu_check: no check has {arguments.only} in its name; there are: {[one.name for one in CHECKS]}")
        return 1
    begun = time.perf_counter()
    outcomes = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for one in chosen:
        outcome = run_check(one, target)
        outcomes.append(outcome)
        print(f"{'passed' if outcome['passed'] else 'FAILED'} {outcome['seconds']:7.2f} s  {one.name}", flush=True)
        if outcome["error"]:
            print(outcome["error"], flush=True)
        # After each: whoever stops it has what was found until then.
        result = {**conditions(target), "seconds": round(time.perf_counter() - begun, 1), "checks": outcomes}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = sum(not outcome["passed"] for outcome in outcomes)
    where = f"{target.name()} ({'simulated' if target.is_dry else 'CUDA'})"
    print(f"{len(outcomes) - failed} checks passed, {failed} failed, on {where}; {arguments.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
