"""Every Python block of the documentation says how it is run, or why it is not."""

from __future__ import annotations

import pytest

from tests.support.docs_blocks import PAGES, ROOT, Block, blocks, problems, sessions


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_says_how_it_is_run(path: object) -> None:
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert list(problems(text)) == []
    assert len(blocks(text)) == text.count("```python\n"), "a block is not found: indented, or without an end"


def test_blocks_without_a_mark_or_with_a_wrong_one_are_named() -> None:
    for mark in ("", "<!-- test: 5 ranks -->\n", "<!-- test: none -->\n", "<!-- test: 2 processes -->\n"):
        (problem,) = problems(f"text\n\n{mark}```python\nx = 1\n```\n")
        assert problem.startswith(f"line {4 + bool(mark)}: the Python block has ")
    for mark in ("1 rank", "4 ranks, unsharded", "1 process", "none, a fragment"):
        assert list(problems(f"<!-- test: {mark} -->\n```python\nx = 1\n```\n")) == []


def test_neighbours_with_one_mark_share_a_session() -> None:
    marks = ["2 ranks", "2 ranks", "none, not run", "4 ranks", "2 ranks", "2 ranks, unsharded", "2 ranks, unsharded"]
    text = "\n".join(f"<!-- test: {mark} -->\n```python\nx{index}\n```" for index, mark in enumerate(marks))
    found = sessions("page", text)
    assert [(one.num_ranks, one.sharded, len(one.blocks)) for one in found] == [
        (2, True, 2),
        (4, True, 1),
        (2, True, 1),
        (2, False, 1),
        (2, False, 1),
    ]
    assert found[0].blocks[0] == Block(3, "x0\n", "2 ranks")
    (alone,) = sessions("page", "<!-- test: 1 process -->\n```python\nx\n```\n")
    assert (alone.process_group, alone.sharded) == (False, False)


def test_most_how_tos_run() -> None:
    how_tos = [path for path in PAGES if path.parent.name == "how-to"]
    run = [path for path in how_tos if sessions(path.name, path.read_text(encoding="utf-8"))]
    assert len(run) >= 8
