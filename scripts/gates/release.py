"""A run of the gates from end to end: wheel, environment, tests, evidence."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from scripts.gates.catalogue import ROOT, Catalogue, Gate
from scripts.gates.environment import (
    Environment,
    Wheel,
    build_twice,
    find_environment,
    make_environment,
    make_workplace,
)
from scripts.gates.evidence import describe, evidence_path, write
from scripts.gates.mutants import Noticed, noticed, summary
from scripts.gates.running import Place, Results, run_gates
from scripts.gates.tree import GateError, Tree, look_at

__all__ = ["BUILD", "Prepared", "break_gates", "check_unchanged", "failures", "prepare", "release"]

BUILD = ROOT / "build" / "gate"
_PACKAGE_SOURCES = ("src/**/*", "csrc/*", "pyproject.toml", "CMakeLists.txt")
_MOST_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that gates need.

    Attributes:
        tree: that the wheel was built from.
        wheel: installed in the environment.
        place: where to run.
        parts: seconds by what they were spent on; more are added.
    """

    tree: Tree
    wheel: Wheel
    place: Place
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def environment(self) -> Environment:
        """That the wheel is installed in."""
        return self.place.environment


@contextmanager
def _timed(parts: dict[str, float], name: str) -> Iterator[None]:
    print(f"{name} ...", end=" ", flush=True)
    began = time.monotonic()
    yield
    parts[name] = time.monotonic() - began
    print(f"{parts[name]:.0f} s", flush=True)


def prepare(*, allow_dirty: bool, build: Path = BUILD) -> Prepared:
    """Builds the wheel twice, installs it, and lays out the tests.

    Raises:
        GateError: if the tree is no commit, the wheels differ, or anything cannot be made.
    """
    tree = look_at(ROOT)
    tree.check_clean(allow_dirty=allow_dirty)
    build.mkdir(parents=True, exist_ok=True)
    parts: dict[str, float] = {}
    with _timed(parts, "two wheels"):
        wheel = build_twice(tree, build)
    with _timed(parts, "environment"):
        environment = make_environment(wheel, build / "venv")
    make_workplace(ROOT, build / "workplace")
    (build / "venv" / ".sources").write_text(_sources_digest(), encoding="utf-8")
    place = Place(environment=environment, workplace=build / "workplace", results=build / "results")
    return Prepared(tree=tree, wheel=wheel, place=place, parts=parts)


def release(catalogue: Catalogue, only: Sequence[str], *, allow_dirty: bool) -> list[str]:
    """Runs the gates on CPUs; returns what is wrong, a line each.

    Evidence goes to ``docs/gates`` if all gates were run, else into the build folder.
    """
    gates = catalogue.only(only)
    began = datetime.now(timezone.utc)
    prepared = prepare(allow_dirty=allow_dirty)
    with _timed(prepared.parts, f"{len(gates)} gates"):
        results = run_gates(gates, prepared.place)
    prepared.parts["all"] = sum(prepared.parts.values())
    check_unchanged(prepared.tree)
    evidence = describe(
        prepared.tree, prepared.wheel, prepared.environment, gates, results, began=began, parts=prepared.parts
    )
    path = evidence_path(BUILD if only else ROOT, evidence)
    write(path, evidence)
    _report(gates, results, path)
    return failures(results)


def check_unchanged(tree: Tree) -> None:
    """Refuses a tree that is not as it was when the wheel was built.

    Raises:
        GateError: it is another commit, or has other changes.
    """
    after = look_at(ROOT)
    if (after.commit, after.changes) != (tree.commit, tree.changes):
        raise GateError(
            "the tree was changed while the gates ran: nobody can say what they have tested; run them again"
        )


def _report(gates: Sequence[Gate], results: Results, path: Path) -> None:
    for gate, one in zip(gates, results.judged, strict=True):
        ranks = f", ranks {' '.join(map(str, one.ranks))}" if one.ranks else ""
        found = ", ".join(f"{name}: {value:g}" for name, value in one.figures.items()) or f"{one.tests} tests{ranks}"
        verdict = "FAIL" if one.problems or results.problems else "pass"
        print(f"{one.id}  {verdict}  {one.seconds:6.1f} s  {gate.claim[:70]}  [{found}]")
    print(f"evidence: {path}")


def failures(results: Results) -> list[str]:
    """What is wrong, a line each, not more than a screen holds."""
    lines = [*results.problems, *(f"{one.id}: {problem}" for one in results.judged for problem in one.problems)]
    if not results.judged:
        lines.append("no gate was run")
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]
    return lines


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _PACKAGE_SOURCES for path in ROOT.glob(pattern)):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _ready_place() -> Place:
    """The environment of the last run, if it was made of these sources; else a new one."""
    stamp = BUILD / "venv" / ".sources"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != _sources_digest():
        return prepare(allow_dirty=True).place
    make_workplace(ROOT, BUILD / "workplace")
    environment = find_environment(BUILD / "venv")
    return Place(environment=environment, workplace=BUILD / "workplace", results=BUILD / "results")


def break_gates(catalogue: Catalogue, only: Sequence[str]) -> list[str]:
    """Runs all gates as they are, then each on its mutant; returns what is wrong, a line each."""
    gates = catalogue.only(only)
    place = _ready_place()
    whole = run_gates(gates, place)
    if not whole.passed:
        return ["gates fail without a mutation, so a mutant's failure would say nothing:", *failures(whole)]
    found: list[Noticed] = []
    problems = []
    for gate in gates:
        try:
            one = noticed(gate, place, BUILD / "mutants" / gate.id)
        except GateError as error:
            one = Noticed(id=gate.id, by="", instead=str(error), seconds=0.0)
        found.append(one)
        text = one.by if one.dead else f"ALIVE {one.instead}"
        print(f"{one.id}  {one.seconds:6.1f} s  {text[:300]}", flush=True)
        if not one.dead:
            problems.append(f"{one.id}: with its feature broken it did not fail. {one.instead}".rstrip())
    print(summary(found))
    return problems
