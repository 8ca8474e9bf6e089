"""Holds docs/known-faults.md to be complete.

    python scripts/known_faults.py            checks; exits with 1 and all problems
    python scripts/known_faults.py --write    puts the tests that carry each id into its row, then checks
    python scripts/known_faults.py --run      checks, and runs the named tests: all must pass, none may be skipped

A test answers a report by carrying its id as a word of its name: test_..._A1_A2.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "known-faults.md"
TESTS = ROOT / "tests"

# How many reports each section of the list has; their ids are numbered from 1.
SECTIONS = {"T": 9, "A": 19, "B": 23, "C": 15, "D": 10, "K": 8, "E": 12, "F": 17, "G": 21, "H": 24, "J": 9, "S": 3}
IDS = tuple(f"{section}{number + 1}" for section, count in SECTIONS.items() for number in range(count))

REASONS = ("GPU only: ", "planned: ", "not applicable: ", "open: ")
MAX_SYMPTOM_WORDS = 12
_COLUMNS = ("id", "report", "symptom", "what shardopt does", "test")
_REPORT = re.compile(r"own finding|[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,})(, [\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,}))*")
_TEST = re.compile(r"`([\w/]+\.py::\w+)`")
_BREAK = "<br>"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        line: its line in the page, from 1.
        cells: one for each column.
    """

    line: int
    cells: tuple[str, ...]

    @property
    def id(self) -> str:
        """The report's id, e.g. ``"A1"``."""
        return self.cells[0]

    @property
    def tests(self) -> list[str]:
        """Names of tests, ``file::function`` with the file below tests/."""
        return _TEST.findall(self.cells[-1])

    @property
    def reason(self) -> str:
        """What the last cell says beside the tests."""
        return _BREAK.join(part for part in self.cells[-1].split(_BREAK) if part and not _TEST.fullmatch(part))


def ids_in(name: str) -> list[str]:
    """The ids that a test's name carries."""
    return [word for word in name.split("_") if word in IDS]


def functions(folder: Path) -> Iterator[str]:
    """Every test function below the folder, as ``file::function``."""
    for path in sorted(folder.rglob("test_*.py")):
        # Parsed and not collected: that takes half a minute, for it imports torch and every optimizer.
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(folder).as_posix()}::{node.name}"


def carriers(tests: Sequence[str]) -> dict[str, list[str]]:
    """The tests that carry each id, of the ids that any carries."""
    found: dict[str, list[str]] = {}
    for test in tests:
        for one in ids_in(test.rpartition("::")[2]):
            found.setdefault(one, []).append(test)
    return found


def rows(text: str) -> list[Row]:
    """The rows of the page's tables, those whose first cell looks like an id."""
    found = []
    for line, content in enumerate(text.splitlines(), 1):
        if re.match(r"\| [A-Z]\d+ \|", content):
            found.append(Row(line, tuple(cell.strip() for cell in content.strip().strip("|").split(" | "))))
    return found


def problems(text: str, tests: Sequence[str]) -> list[str]:
    """All that is wrong with the page, given every test there is."""
    found = rows(text)
    missing = [one for one in IDS if one not in {row.id for row in found}]
    result = [f"report {one} has no row" for one in missing]
    seen: set[str] = set()
    carry, there = carriers(tests), set(tests)
    for row in found:
        where = f"line {row.line}: {row.id}"
        if row.id not in IDS:
            result.append(f"{where} is no report of the list, which has {SECTIONS}")
        if row.id in seen:
            result.append(f"{where} has two rows")
        seen.add(row.id)
        result += [f"{where} {problem}" for problem in _row_problems(row, carry, there)]
    return result


def _row_problems(row: Row, carry: Mapping[str, Sequence[str]], there: set[str]) -> Iterator[str]:
    if len(row.cells) != len(_COLUMNS) or not all(row.cells):
        yield f"has {len([cell for cell in row.cells if cell])} filled cells, expected {len(_COLUMNS)}: {_COLUMNS}"
        return
    if not _REPORT.fullmatch(row.cells[1]):
        yield f"names the report {row.cells[1]!r}, expected OWNER/REPO#NUMBER or OWNER/REPO@COMMIT, or 'own finding'"
    words = len(row.cells[2].split())
    if words > MAX_SYMPTOM_WORDS:
        yield f"has a symptom of {words} words, at most {MAX_SYMPTOM_WORDS}"
    yield from _test_problems(row, carry.get(row.id, ()), there)
    if row.reason and not row.reason.startswith(REASONS):
        yield f"has the reason {row.reason!r}, expected one that starts with one of {REASONS}"
    if not row.tests and not row.reason:
        yield "has neither a test nor a reason"


def _test_problems(row: Row, carry: Sequence[str], there: set[str]) -> Iterator[str]:
    for test in row.tests:
        if test not in there:
            yield f"names the test {test!r}, which does not exist"
        elif row.id not in ids_in(test.rpartition("::")[2]):
            yield f"names the test {test!r}, whose name does not carry the id"
    for test in carry:
        if test not in row.tests:
            yield f"does not list the test {test!r}, which carries the id; --write does"


def written(text: str, tests: Sequence[str]) -> str:
    """The page with each row's tests as they are.

    A reason beside them stays, unless it says that the test is open or planned.
    """
    carry, lines = carriers(tests), text.splitlines()
    for row in rows(text):
        names = [f"`{test}`" for test in carry.get(row.id, ())]
        reason = "" if names and row.reason.startswith(("open: ", "planned: ")) else row.reason
        cell = _BREAK.join([*names, *([reason] if reason else [])])
        lines[row.line - 1] = f"| {' | '.join([*row.cells[:-1], cell])} |"
    return "\n".join(lines) + "\n"


def verdicts(report: Path) -> list[str]:
    """The tests of a JUnit report that did not pass, with why."""
    cases = list(ET.parse(report).iter("testcase"))
    if not cases:
        return ["no test ran"]
    bad = [(case, part) for case in cases for part in case if part.tag in ("failure", "error", "skipped")]
    return [f"{case.get('classname')}::{case.get('name')}: {part.tag}: {part.get('message')}" for case, part in bad]


def run(tests: Sequence[str]) -> list[str]:
    """Runs tests in one pytest process, for those of several ranks share workers; what did not pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *(f"tests/{test}" for test in tests)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not report.exists():
            return [f"pytest ended with {status} and wrote no report"]
        return verdicts(report) or ([f"pytest ended with {status}"] if status else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, after writing or before running; prints one line or all problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args(arguments)
    tests = list(functions(TESTS))
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), tests), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    found = problems(text, tests)
    named = sorted({test for row in rows(text) for test in row.tests})
    if options.run and not found:
        found = run(named)
    for problem in found:
        print(f"{PAGE.relative_to(ROOT)}: {problem}", file=sys.stderr)
    if not found and options.run:
        print(f"{len(IDS)} reports, {len(named)} tests, all passed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
