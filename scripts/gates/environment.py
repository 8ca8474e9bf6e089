"""The wheel, built twice and compared; a clean environment with it; and a folder that has the tests and no sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.gates.tree import GateError, Tree, copy_files

__all__ = ["TORCH", "Environment", "Wheel", "build_twice", "call", "check_equal", "make_environment", "make_workplace"]

TORCH = "2.13.0"
_TESTS = ("tests", "examples", "benchmarks", "pyproject.toml")
_TAIL_LINES = 15
# These would let a user's settings choose other tests, other warnings, or another shardopt.
_NOT_PASSED_ON = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONPATH", "PYTHONWARNINGS", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel.

    Attributes:
        path: of the file.
        sha256: of its bytes.
    """

    path: Path
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment with the wheel in it.

    Attributes:
        python: its interpreter.
        package: the folder of the installed shardopt.
    """

    python: Path
    package: Path


def clean_variables(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this process, less those that could change what is tested; one thread each, as in tests."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    return {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}


def call(command: Sequence[str | Path], log: Path, *, cwd: Path, extra: Mapping[str, str] | None = None) -> str:
    """Runs the command with its output in a file; returns that.

    Raises:
        GateError: with its last lines, if it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env=clean_variables(extra),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = log.read_text(encoding="utf-8", errors="replace")
    if done.returncode != 0:
        tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
        raise GateError(f"{' '.join(map(str, command))}\nended with status {done.returncode}; from {log}:\n{tail}")
    return text


def build_twice(tree: Tree, folder: Path) -> Wheel:
    """Builds the wheel in two folders, each from its own copy of the tree, with the commit's time as the time.

    Raises:
        GateError: if a build fails, or the wheels differ in a byte.
    """
    with ThreadPoolExecutor(2) as builders:
        wheels = list(builders.map(lambda name: _build(tree, folder / name), ("first", "second")))
    check_equal(wheels)
    return wheels[0]


def _build(tree: Tree, folder: Path) -> Wheel:
    source, out = folder / "source", folder / "wheel"
    copy_files(tree.root, source)
    for old in out.glob("*"):
        old.unlink()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--disable-pip-version-check",
        "--no-deps",
        "--wheel-dir",
        out,
        ".",
    ]
    call(command, folder / "build.log", cwd=source, extra={"SOURCE_DATE_EPOCH": str(tree.commit_time)})
    built = sorted(out.glob("*.whl"))
    if len(built) != 1:
        raise GateError(f"{folder}: built {len(built)} wheels and not one: {[path.name for path in built]}")
    return Wheel(path=built[0], sha256=hashlib.sha256(built[0].read_bytes()).hexdigest())


def check_equal(wheels: Sequence[Wheel]) -> None:
    """Refuses wheels that are not the same file.

    Raises:
        GateError: naming both.
    """
    first, *others = wheels
    if not others:
        raise GateError(f"{first.path}: was built once; nothing to compare it with")
    for other in others:
        if (other.sha256, other.path.name) != (first.sha256, first.path.name):
            both = "\n".join(f"  {wheel.sha256}  {wheel.path}" for wheel in (first, other))
            raise GateError(f"one commit gave two wheels, so nobody can check what a wheel was built from:\n{both}")


def make_environment(wheel: Wheel, folder: Path) -> Environment:
    """Makes the environment anew: the pinned torch, the wheel, and what its tests need.

    Raises:
        GateError: if anything cannot be installed, or is not where it should be.
    """
    log = folder.parent / f"{folder.name}.log"
    call([sys.executable, "-m", "venv", "--clear", folder], log, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    call([*pip, f"torch=={TORCH}", f"shardopt[test] @ file://{wheel.path}"], log, cwd=folder.parent)
    return find_environment(folder)


def find_environment(folder: Path) -> Environment:
    """The environment that was made there.

    Raises:
        GateError: if shardopt is not in its site-packages.
    """
    python = folder / "bin" / "python"
    asked = "import shardopt, sysconfig; print(shardopt.__file__); print(sysconfig.get_path('platlib'))"
    # -I: neither this folder nor variables of the user's have a say in what is imported
    place, site = call([python, "-I", "-c", asked], folder.parent / "import.log", cwd=folder.parent).split()
    check_place(Path(place), Path(site))
    return Environment(python=python, package=Path(place).parent)


def check_place(imported: Path, site_packages: Path) -> None:
    """Refuses a shardopt that was not imported from the environment's site-packages.

    Raises:
        GateError: naming both.
    """
    if imported.resolve().parent != (site_packages / "shardopt").resolve():
        raise GateError(f"shardopt is imported from {imported} and not from {site_packages}: that is not the wheel")


def make_workplace(root: Path, folder: Path) -> None:
    """Copies the tests and what they run, without the sources, and gives them the recorder.

    Raises:
        GateError: if there are sources of the package in it.
    """
    copy_files(root, folder, _TESTS)
    recorder = Path(__file__).with_name("recorder.py")
    (folder / "gate_recorder.py").write_bytes(recorder.read_bytes())
    sources = [path for path in folder.rglob("shardopt") if path.is_dir()] + list(folder.glob("src"))
    if sources:
        raise GateError(f"{sources[0]}: the tests have to find the installed shardopt, and would find this one")
