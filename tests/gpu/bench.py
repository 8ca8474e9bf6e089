"""The benchmark of SwapAdamW on a GPU, short: it runs, and what it found is among the figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.checks import Figure, check
from tests.gpu.target import Target

_SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "swap_gpu.py"
_TIMEOUT_S = 90


@check("benchmark: a short run of swap_gpu.py meets its bars", needs_gpu=True)
def short_run(target: Target) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "swap_gpu.jsonl"
        command = [sys.executable, str(_SCRIPT), "--mebi", "256", "--steps", "5", "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        found: Figure = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    return found
