"""Breaks the feature of each gate in a copy of the installed package; the gate must then fail."""

from __future__ import annotations

import ast
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.gates.catalogue import Gate, Mutation
from scripts.gates.running import Place, Results, run_gates
from scripts.gates.tree import GateError

__all__ = ["Noticed", "judge_mutant", "mutate", "noticed", "summary"]


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """What a gate said of its mutant.

    Attributes:
        id: of the gate.
        by: the first thing that failed; empty if the mutant lives.
        instead: why the run says nothing, if it does not; then the mutant counts as alive.
        seconds: it took.
    """

    id: str
    by: str
    instead: str
    seconds: float

    @property
    def dead(self) -> bool:
        """Whether the gate has noticed."""
        return bool(self.by) and not self.instead


def mutate(mutation: Mutation, package: Path, folder: Path) -> Path:
    """Copies the package and breaks the copy.

    Args:
        mutation: of a gate.
        package: the installed one; is not touched.
        folder: gets the copy; is removed first.

    Returns:
        The broken package's folder.

    Raises:
        GateError: if the text is not there exactly once, or the outcome is no Python.
    """
    broken = folder / package.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(package, broken, ignore=shutil.ignore_patterns("__pycache__"))
    path = broken / mutation.file
    if not path.is_file():
        raise GateError(f"{mutation.file}: the package has no such file to break")
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise GateError(f"{mutation.file}: has this {text.count(mutation.old)} times and not once:\n{mutation.old}")
    text = text.replace(mutation.old, mutation.new)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise GateError(f"{mutation.file}: the mutation makes no Python of it: {error}") from error
    path.write_text(text, encoding="utf-8")
    return broken


def judge_mutant(gate: Gate, results: Results, seconds: float) -> Noticed:
    """Whether the gate failed as it should: by a test that ran and failed or a figure, not by a run that went wrong."""
    (judged,) = results.judged
    instead = [*results.problems, *(problem for problem in judged.problems if "no such test" in problem)]
    return Noticed(
        id=gate.id,
        by=judged.failed[0] if judged.failed else "",
        instead="; ".join(instead),
        seconds=seconds,
    )


def noticed(gate: Gate, place: Place, folder: Path) -> Noticed:
    """Runs the gate alone on its mutant.

    Args:
        gate: has a mutation.
        place: where gates run.
        folder: for the broken package and what the run leaves.

    Raises:
        GateError: if the mutation does not fit the package.
    """
    assert gate.mutation is not None
    began = time.monotonic()
    broken = mutate(gate.mutation, place.environment.package, folder / "broken")
    there = replace(place, package=broken, results=folder, stop_at_first=True)
    return judge_mutant(gate, run_gates([gate], there), time.monotonic() - began)


def summary(all_noticed: Sequence[Noticed]) -> str:
    """Gates n of n."""
    dead = sum(one.dead for one in all_noticed)
    return f"gates {dead} of {len(all_noticed)}"
