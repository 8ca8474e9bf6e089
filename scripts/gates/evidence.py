"""What a run of gates leaves behind: one file of JSON with everything that is needed to believe or to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts.gates.catalogue import Gate
from scripts.gates.environment import Environment, Wheel, clean_variables
from scripts.gates.running import Results
from scripts.gates.tree import EVIDENCE, Tree

__all__ = ["describe", "evidence_path", "machine", "read_all", "versions", "write"]

FORMAT = 1
_PACKAGES = ("shardopt", "torch", "numpy", "bitsandbytes", "torchao", "pytorch-optimizer", "pytest", "hypothesis")


def describe(
    tree: Tree,
    wheel: Wheel,
    environment: Environment,
    gates: Sequence[Gate],
    results: Results,
    *,
    began: datetime,
    parts: Mapping[str, float],
    gpus: int = 0,
) -> dict[str, Any]:
    """Everything about a run that has ended.

    Args:
        tree: that was looked at before the run.
        wheel: that was installed.
        environment: that it was installed into.
        gates: that were run.
        results: their verdicts, in the same order.
        began: when.
        parts: name of a part of the run -> seconds.
        gpus: that the run had; 0 for a run on CPUs.
    """
    claims = {gate.id: gate.claim for gate in gates}
    return {
        "format": FORMAT,
        "commit": tree.commit,
        "dirty": bool(tree.changes),
        "allow_dirty": list(tree.changes),
        "verdict": "passed" if results.passed else "failed",
        "problems": list(results.problems),
        "gpus": gpus,
        "began": began.astimezone(timezone.utc).isoformat(timespec="seconds"),
        "seconds": {name: round(value, 1) for name, value in parts.items()},
        "wheel": {"name": wheel.path.name, "sha256": wheel.sha256, "source_date_epoch": tree.commit_time},
        "versions": versions(environment),
        "machine": machine(),
        "gates": {
            one.id: {
                "claim": claims[one.id],
                "verdict": "failed" if one.problems or results.problems else "passed",
                "tests": one.tests,
                "ranks": list(one.ranks),
                "figures": one.figures,
                "seconds": one.seconds,
                "digest": one.digest,
                "problems": list(one.problems),
            }
            for one in results.judged
        },
    }


def versions(environment: Environment) -> dict[str, str]:
    """Of Python, and of the packages in the environment that matter."""
    asked = (
        "import json, platform, importlib.metadata as m;"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: m.version(n) for n in {_PACKAGES!r}}}}}))"
    )
    command = [str(environment.python), "-I", "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_variables())
    found: dict[str, str] = json.loads(done.stdout)
    return found


def machine() -> dict[str, Any]:
    """The computer, as far as it bears on numbers."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def evidence_path(root: Path, evidence: Mapping[str, Any]) -> Path:
    """Where it belongs; what was found in a tree with changes never takes the place of what was found in a commit."""
    kind = f"-gpus{evidence['gpus']}" if evidence["gpus"] else ""
    return root / EVIDENCE / f"{evidence['commit']}{kind}{'-dirty' if evidence['dirty'] else ''}.json"


def write(path: Path, evidence: Mapping[str, Any]) -> None:
    """Writes the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")


def read_all(root: Path) -> dict[str, dict[str, Any]]:
    """Evidence of commits by path below the root, the oldest first; that of trees with changes is none."""
    found = {}
    for path in (root / EVIDENCE).glob("*.json"):
        evidence = json.loads(path.read_text(encoding="utf-8"))
        if not evidence["dirty"]:
            found[path.relative_to(root).as_posix()] = evidence
    return dict(sorted(found.items(), key=lambda item: item[1]["began"]))
