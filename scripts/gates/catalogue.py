"""The gates as data: reads ``gates.toml`` and refuses entries that could not fail or could not be found."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it for Python 3.10

__all__ = ["CATALOGUE", "ROOT", "Catalogue", "CatalogueError", "Figure", "Gate", "HardwareGate", "Mutation", "read"]

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).resolve().parent / "gates.toml"
_GATE = {"id", "claim", "threshold", "tests", "ranks", "command", "figure", "mutation"}
_HARDWARE = {"id", "claim", "threshold", "jobs", "gpus"}


class CatalogueError(Exception):
    """``gates.toml`` does not describe gates; the message lists every problem."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """How a gate's feature is broken on purpose.

    Attributes:
        file: of the package, relative to its folder.
        old: exact text, which is there once.
        new: what takes its place.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a gate's command must measure.

    Attributes:
        count: how many numbers the command prints, each as a row of a table of bars.
        at_most: none of them may be above it.
        unit: of all of them, as printed.
    """

    count: int
    at_most: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One claim and what shows it, on CPUs.

    Attributes:
        id: R01, R02, ...
        claim: one sentence.
        threshold: what has to be found, in words.
        tests: node ids of pytest; one without parameters stands for all of that test's.
        ranks: world sizes on which these tests have to be seen to run.
        command: a script and its arguments, for Python; empty where tests show the claim.
        figure: of the command.
        mutation: breaks the feature; the gate must then fail.
    """

    id: str
    claim: str
    threshold: str
    tests: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    figure: Figure | None = None
    mutation: Mutation | None = None

    @property
    def digest(self) -> str:
        """Of what is claimed and what decides it: what passed under another digest was another gate."""
        measured = self.figure and vars(self.figure)
        judged = [self.id, self.claim, self.threshold, self.tests, self.ranks, self.command, measured]
        return hashlib.sha256(json.dumps(judged).encode()).hexdigest()[:16]

    @property
    def files(self) -> list[str]:
        """Test files, each once, in order."""
        return list(dict.fromkeys(test.partition("::")[0] for test in self.tests))


@dataclass(frozen=True, kw_only=True)
class HardwareGate:
    """One claim about GPUs.

    Attributes:
        id: G01, G02, ...
        claim: one sentence.
        threshold: what has to be found, in words.
        jobs: names of functions of ``gpu_jobs``.
        gpus: numbers of GPUs it is run with.
    """

    id: str
    claim: str
    threshold: str
    jobs: tuple[str, ...]
    gpus: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Of what is claimed and what decides it."""
        return hashlib.sha256(
            json.dumps([self.id, self.claim, self.threshold, self.jobs, self.gpus]).encode()
        ).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All gates, in the order of the file."""

    gates: tuple[Gate, ...]
    hardware: tuple[HardwareGate, ...] = field(default=())

    def only(self, names: Iterable[str]) -> list[Gate]:
        """The named gates, or all if none is named.

        Raises:
            CatalogueError: for names of no gate.
        """
        wanted = list(names)
        unknown = [name for name in wanted if name not in {gate.id for gate in self.gates}]
        if unknown:
            raise CatalogueError(f"no gate is called {', '.join(unknown)}; see RELEASE_GATES.md")
        return [gate for gate in self.gates if not wanted or gate.id in wanted]


def read(path: Path = CATALOGUE, root: Path = ROOT) -> Catalogue:
    """Reads the file.

    Args:
        path: of the file.
        root: of the repository that the tests are in.

    Raises:
        CatalogueError: with all problems.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    problems = [f"{key}: not known" for key in entries.keys() - {"gate", "hardware"}]
    gates = [_gate(entry, problems) for entry in entries.get("gate", [])]
    hardware = [_hardware(entry, problems) for entry in entries.get("hardware", [])]
    names = [gate.id for gate in (*gates, *hardware)]
    problems += [f"{name}: is there {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1]
    for gate in gates:
        problems += [f"{gate.id}: {problem}" for problem in _problems(gate, root)]
    if not gates:
        problems.append("there is no gate")
    if problems:
        raise CatalogueError(f"{path}:\n" + "\n".join(problems))
    return Catalogue(gates=tuple(gates), hardware=tuple(hardware))


def _gate(entry: Mapping[str, Any], problems: list[str]) -> Gate:
    values = _known(entry, _GATE, problems)
    for name, make in (("figure", Figure), ("mutation", Mutation)):
        if name in values:
            values[name] = make(**values[name])
    return Gate(**values)


def _hardware(entry: Mapping[str, Any], problems: list[str]) -> HardwareGate:
    values = _known(entry, _HARDWARE, problems)
    if not values.get("jobs") or not values.get("gpus"):
        problems.append(f"{values.get('id')}: needs numbers of GPUs, and jobs")
    return HardwareGate(**{"jobs": (), "gpus": (), **values})


def _known(entry: Mapping[str, Any], names: set[str], problems: list[str]) -> dict[str, Any]:
    name = entry.get("id", "an entry without id")
    problems += [f"{name}: {key}: not known" for key in sorted(entry.keys() - names)]
    missing = [key for key in ("id", "claim", "threshold") if not entry.get(key)]
    problems += [f"{name}: {key}: missing" for key in missing]
    values = {"id": "", "claim": "", "threshold": "", **{key: entry[key] for key in entry.keys() & names}}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _problems(gate: Gate, root: Path) -> list[str]:
    problems = [problem for file in gate.files for problem in _missing(gate, file, root)]
    if bool(gate.tests) == bool(gate.command):
        problems.append("needs tests or a command, and not both")
    if bool(gate.command) != (gate.figure is not None):
        problems.append("a command needs a figure, and a figure a command")
    if gate.mutation is None:
        problems.append("has no mutation: nobody knows whether it can fail")
    elif gate.mutation.old == gate.mutation.new:
        problems.append("its mutation changes nothing")
    return problems


def _missing(gate: Gate, file: str, root: Path) -> list[str]:
    if not (root / file).is_file():
        return [f"{file}: no such file"]
    # Parsed, not collected: a name that has changed is to be seen without a minute of imports.
    body = ast.parse((root / file).read_text(encoding="utf-8")).body
    there = {f"{file}::{node.name}" for node in body if isinstance(node, ast.FunctionDef)}
    wanted = [test.partition("[")[0] for test in gate.tests if test.startswith(f"{file}::")]
    return [f"{test}: no such test" for test in dict.fromkeys(wanted) if test not in there]
