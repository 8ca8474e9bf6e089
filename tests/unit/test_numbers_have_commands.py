"""Measured numbers of the documentation come with their command, and what is not measured is let through."""

from __future__ import annotations

import pytest

from scripts.numbers_have_commands import PAGES, ROOT, measured, problems, sections


def test_the_documentation_passes() -> None:
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    assert len(pages) > 20
    assert {str(path): found for path in pages if (found := list(problems(path.read_text(encoding="utf-8"))))} == {}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("takes 0.31 ms, 1,200us or 5 ns", ["0.31 ms", "1,200us", "5 ns"]),
        ("2.3x faster, 4x, 0.8 % more, 12 GiB/s", ["2.3x", "4x", "0.8 %", "12 GiB/s"]),
        ("64x64 tensors, `5 ms`, version 2.13.0, 3 minutes, sec. 4, 64 MiB, 600 s", []),
        ("| 64 MiB | 0.11 s | 2.04 B |", ["64 MiB", "0.11 s", "2.04 B"]),
        ("```\n5 ms\n```", []),
    ],
)
def test_what_is_measured(text: str, numbers: list[str]) -> None:
    assert measured(text) == numbers


def test_a_number_without_a_command_is_named() -> None:
    text = "# Page\n\n`python benchmarks/step.py`\n\n## Other\n\n| step | 5 ms |\n"
    (problem,) = problems(text)
    assert problem.startswith("line 5: the section 'Other' has 5 ms, and names no command")
    for mend in ("`python benchmarks/step.py`", "`make bench`", "<!-- numbers: a limit in the code -->"):
        assert list(problems(f"{text}\n{mend}\n")) == []


def test_headings_in_fences_are_none() -> None:
    text = "# Page\n\n```bash\n# no heading\nmake bench\n```\n\n5 ms\n"
    assert [line for line, _ in sections(text)] == [1, 1]
    assert list(problems(text)) == []


def test_commands_that_are_gone_are_named() -> None:
    there = "`make bench`, python -m tests.faults.page"
    text = f"`python benchmarks/gone.py` and\n`make gone`, python -m tests.faults.gone, {there}"
    assert list(problems(text)) == [
        "line 1: the command 'python benchmarks/gone.py' names benchmarks/gone.py, which is not there",
        "line 2: the command 'python -m tests.faults.gone' names tests/faults/gone, which is not there",
        "line 2: the command 'make gone' names a target that the Makefile does not have",
    ]
