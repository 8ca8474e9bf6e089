"""The page of known faults is complete, and each of its checks notices what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.known_faults import IDS, PAGE, TESTS, functions, ids_in, problems, rows, verdicts, written

TEXT = PAGE.read_text(encoding="utf-8")
FOUND = list(functions(TESTS))
A1 = next(row for row in rows(TEXT) if row.id == "A1")

GONE = "`unit/test_naming.py::test_gone_A1`"
OTHER = "`unit/test_imports.py::test_no_function_imports_from_shardopt`"


def changed(*, cell: int, to: str) -> list[str]:
    """What is said of the page once a cell of A1's row has this content."""
    lines = TEXT.splitlines()
    cells = [*A1.cells]
    cells[cell] = to
    lines[A1.line - 1] = f"| {' | '.join(cells)} |"
    return problems("\n".join(lines), FOUND)


def test_the_page_is_complete() -> None:
    assert problems(TEXT, FOUND) == []
    assert [row.id for row in rows(TEXT)] == list(IDS)
    assert len(IDS) == 170
    assert len({test for row in rows(TEXT) for test in row.tests}) > 100


def test_ids_are_whole_words_of_names() -> None:
    assert ids_in("test_J7_C3_a_warm_load_A99_b1_XA1_F12") == ["J7", "C3", "F12"]


def test_this_function_is_among_those_found() -> None:
    assert "unit/test_known_faults.py::test_this_function_is_among_those_found" in FOUND


def test_a_report_without_a_row_is_noticed() -> None:
    assert problems(TEXT.replace("| A1 |", "| a1 |"), FOUND) == ["report A1 has no row"]


def test_a_second_row_and_an_unknown_report_are_noticed() -> None:
    row = TEXT.splitlines()[A1.line - 1]
    assert problems(f"{TEXT}{row}\n", FOUND) == [f"line {len(TEXT.splitlines()) + 1}: A1 has two rows"]
    (problem,) = problems(f"{TEXT}| Z9 | own finding | a | b | open: c |\n", FOUND)
    assert "Z9 is no report of the list" in problem


@pytest.mark.parametrize(
    ("cell", "to", "problem"),
    [
        (1, "somewhere", "names the report 'somewhere', expected OWNER/REPO#NUMBER"),
        (2, "word " * 12 + "more", "has a symptom of 13 words, at most 12"),
        (3, "", "has 4 filled cells, expected 5"),
        (4, f"{A1.cells[4]}<br>surely", "has the reason 'surely', expected one that starts with one of"),
        (4, f"{A1.cells[4]}<br>{GONE}", "which does not exist"),
        (
            4,
            f"{A1.cells[4]}<br>{OTHER}",
            "does not carry the id",
        ),
    ],
)
def test_a_wrong_cell_is_noticed(cell: int, to: str, problem: str) -> None:
    (found,) = changed(cell=cell, to=to)
    assert found.startswith(f"line {A1.line}: A1 ")
    assert problem in found


def test_a_test_that_is_not_listed_is_noticed() -> None:
    (found,) = changed(cell=4, to=A1.cells[4].replace(f"`{A1.tests[0]}`<br>", ""))
    assert found == f"line {A1.line}: A1 does not list the test {A1.tests[0]!r}, which carries the id; --write does"


def test_a_row_needs_a_test_or_a_reason() -> None:
    text = "| A1 | own finding | a | b | <br> |\n"
    assert "line 1: A1 has neither a test nor a reason" in problems(text, [])
    assert not [problem for problem in problems(text.replace("<br>", "open: not yet"), []) if "line 1:" in problem]


def test_write_puts_tests_in_and_keeps_reasons() -> None:
    table = "# Page\n\n| A1 | own finding | a | b | open: none |\n| A2 | own finding | a | b | GPU only: c |\n"
    tests = ["unit/test_x.py::test_one_A1_A2", "unit/test_x.py::test_two_A2"]
    one, two = (f"`{test}`" for test in tests)
    assert written(table, tests) == (
        f"# Page\n\n| A1 | own finding | a | b | {one} |\n"
        f"| A2 | own finding | a | b | {one}<br>{two}<br>GPU only: c |\n"
    )
    assert written(written(table, tests), []).endswith("| a | b | GPU only: c |\n")
    assert written(TEXT, FOUND) == TEXT


def test_what_did_not_pass_is_told(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c">'
        '<skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    assert verdicts(report) == ["a::c: skipped: no GPU"]
    report.write_text("<testsuites/>")
    assert verdicts(report) == ["no test ran"]
