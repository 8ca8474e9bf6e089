"""The Python blocks of the documentation, and what a comment above each says of how it is run.

``<!-- test: 2 ranks -->``: on 2 ranks, ``model`` under ``fully_shard``; ``<!-- test: 2 ranks, unsharded -->``: not yet;
``<!-- test: 1 process -->``: without a process group; ``<!-- test: none, REASON -->``: not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "Session", "blocks", "problems", "sessions"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^(?:<!-- test: (?P<mark>.*?) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"(?P<ranks>[1-4]) (?:ranks?(?P<plain>, unsharded)?|(?P<alone>process))")
_NONE = re.compile(r"none, .{5,}")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of Python in a page.

    Attributes:
        line: of its first line of code, from 1.
        code: its text.
        mark: what the comment above it says after ``test:``; empty without one.
    """

    line: int
    code: str
    mark: str


@dataclass(frozen=True, slots=True)
class Session:
    """Blocks of one page that run one after the other in one namespace.

    Attributes:
        page: the page's path, for tracebacks.
        blocks: the blocks.
        num_ranks: on how many ranks.
        sharded: whether the model is sharded when they begin.
        process_group: whether there is one.
    """

    page: str
    blocks: tuple[Block, ...]
    num_ranks: int
    sharded: bool
    process_group: bool


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page's text."""
    return [
        Block(text.count("\n", 0, found.start("code")) + 1, found["code"], found["mark"] or "")
        for found in _BLOCK.finditer(text)
    ]


def problems(text: str) -> Iterator[str]:
    """Blocks that do not say how they are run."""
    for block in blocks(text):
        if not _RUN.fullmatch(block.mark) and not _NONE.fullmatch(block.mark):
            got = f"<!-- test: {block.mark} -->" if block.mark else "nothing"
            yield (
                f"line {block.line}: the Python block has {got} above it, expected '<!-- test: 2 ranks -->', "
                "'<!-- test: 2 ranks, unsharded -->', '<!-- test: 1 process -->' or '<!-- test: none, REASON -->'"
            )


def sessions(page: str, text: str) -> list[Session]:
    """What is to be run of a page: neighbours with equal marks share a session, unless each shards the model itself."""
    found = [(block, _RUN.fullmatch(block.mark)) for block in blocks(text)]
    runs = [(block, match) for block, match in found if match]
    result: list[Session] = []
    for (mark, _), group in groupby(runs, key=lambda run: (run[0].mark, run[0].line * ("unsharded" in run[0].mark))):
        members: Sequence[Block] = tuple(block for block, _ in group)
        match = _RUN.fullmatch(mark)
        assert match
        alone = match["alone"] is not None
        result.append(Session(page, tuple(members), int(match["ranks"]), not match["plain"] and not alone, not alone))
    return result
