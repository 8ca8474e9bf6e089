"""Mutants: all votes are found, and the table notices some of them; ``python -m tests.faults.mutants`` tries all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults.expect import problems
from tests.faults.mutants import HARMLESS, survivors
from tests.faults.mutation import FILES, SOURCE, VOTES, discovered, fill_mutated
from tests.faults.table import Cell
from tests.support.ranks import RankPool

# What holds votes, whose own tests are in tests/unit/scope and tests/ranks; the last ones' in test_whole.py there.
VOTING = {"scope/ballot.py", "scope/exchange.py", "scope/meeting.py"}
VOTING |= {"portable/merging.py"}
VOTING |= {f"presentation/{name}.py" for name in ("ownership", "replicated", "stowage", "transport")}


def votes_in(path: Path) -> bool:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Attribute) and call.func.attr in VOTES for call in calls)


def test_every_file_that_votes_is_looked_at() -> None:
    voting = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if votes_in(path)}
    assert voting - {*FILES, *VOTING} == set()
    assert len(discovered()) > 80


def test_harmless_mutants_exist() -> None:
    assert HARMLESS.keys() <= {mutant.name for mutant in discovered()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "staging/stepping.py Stepping.unscale: guard",
        "staging/prepared.py PreparedLoad.commit: poison: self._committed(error)",
        "optimizer.py ShardedStateOptimizer._prepare: handler",
    ],
)
def test_the_table_notices_a_mutant(name: str) -> None:
    ((mutant, killer),) = survivors([one for one in discovered() if one.name.startswith(name)])
    assert killer, mutant


def test_a_process_is_itself_again_after_a_mutant(ranks: RankPool, tmp_path: Path) -> None:
    (mutant,) = [one for one in discovered() if one.name.startswith("staging/stepping.py Stepping.unscale: guard")]
    cell = Cell(operation="unscale", point="half", kind="raises", world_size=2, faulty=0)
    for used, wrong in ((mutant, True), (None, False)):
        directory = tmp_path / str(wrong)
        directory.mkdir()
        seen = [one for (one,) in ranks.run(2, fill_mutated, str(directory), used, [cell])]
        assert bool(problems(cell, seen)) == wrong
