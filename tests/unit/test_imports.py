"""Importing shardopt has no side effect, and imports follow the layers where import-linter cannot look."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "shardopt"
MODULES = sorted(PACKAGE.rglob("*.py"))
CHECKPOINT = "torch.distributed.checkpoint"
KNOW_CHECKPOINT = {"portable", "checkpoint"}

# In a process of its own: this one has imported everything. Torch comes first, so only shardopt's own doing is seen.
PROBE = """
import importlib, json, logging, os, pkgutil, sys
import torch, torch.distributed.tensor, torch.distributed.checkpoint

read = []
class Environment(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] in ("os", "collections.abc"):
            frame = frame.f_back
        if frame.f_globals["__name__"].split(".")[0] == "shardopt":
            read.append(key)
        return super().__getitem__(key)

def settings():
    loggers = [logging.getLogger(name) for name in (None, *logging.Logger.manager.loggerDict)]
    configured = {log.name: (log.level, len(log.handlers)) for log in loggers if log.handlers or log.level}
    return configured, torch.get_num_threads(), torch.get_default_dtype(), torch.random.get_rng_state().tolist()

os.environ.__class__ = Environment
before = settings()
import shardopt
for module in pkgutil.walk_packages(shardopt.__path__, "shardopt."):
    # These import libraries, which print and read as they like; nothing imports one unless its optimizers are used, or
    # a GPU is to be stepped.
    if not module.name.startswith(("shardopt.layouts.adapters.", "shardopt.swap.triton_body")):
        importlib.import_module(module.name)
names = [name for name in sys.modules if name.startswith("shardopt.")]
assert "triton" not in sys.modules
print(json.dumps({"changed": before != settings(), "read": read, "cuda": torch.cuda.is_initialized(), "names": names}))
"""


def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement with the absolute names it may import; relative ones are not used here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def test_importing_every_module_has_no_side_effect() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert {"shardopt._host", "shardopt.errors", "shardopt.swap.host_kernel"} <= set(report.pop("names"))
    assert report == {"changed": False, "read": [], "cuda": False}


def test_no_function_imports_from_shardopt() -> None:
    deferred = [
        f"{path.name}:{node.lineno} {name}"
        for path in MODULES
        for function in ast.walk(parse(path))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node, name in imports(function)
        if name.split(".")[0] == "shardopt"
    ]
    assert not deferred, "move the type down a layer instead of deferring its import"


def test_only_portable_and_checkpoint_import_torch_distributed_checkpoint() -> None:
    # import-linter sees no further than the root of an external package.
    knowing = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in MODULES
        for _, name in imports(parse(path))
        if f"{name}.".startswith(f"{CHECKPOINT}.")
    }
    assert "portable" in knowing
    assert knowing <= KNOW_CHECKPOINT
