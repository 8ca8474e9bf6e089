"""What is to be released: the commit, whether the tree is that commit, and a copy of it without what git ignores."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EVIDENCE", "GateError", "Tree", "copy_files", "look_at"]

EVIDENCE = "docs/gates"


class GateError(Exception):
    """A gate, or what it needs, failed; the message is the whole explanation."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A working tree.

    Attributes:
        root: its folder.
        commit: the hash of HEAD.
        commit_time: of that commit, in seconds since 1970.
        changes: lines of ``git status``; evidence does not count.
    """

    root: Path
    commit: str
    commit_time: int
    changes: tuple[str, ...]

    def check_clean(self, *, allow_dirty: bool) -> None:
        """Refuses a tree that is not its commit, unless that is allowed.

        Raises:
            GateError: naming up to five changed files.
        """
        if self.changes and not allow_dirty:
            more = f" and {len(self.changes) - 5} more" if len(self.changes) > 5 else ""
            raise GateError(
                f"the tree is not commit {self.commit[:12]}: {', '.join(self.changes[:5])}{more}; commit first,"
                " or say ALLOW_DIRTY=1, which the evidence will say too"
            )


def look_at(root: Path) -> Tree:
    """The tree as it is now."""
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", f":(top,exclude){EVIDENCE}")
    return Tree(
        root=root,
        commit=_git(root, "rev-parse", "HEAD").strip(),
        commit_time=int(_git(root, "show", "-s", "--format=%ct", "HEAD")),
        changes=tuple(line.strip() for line in status.splitlines()),
    )


def copy_files(root: Path, target: Path, parts: Sequence[str] = (".",)) -> None:
    """Copies what git tracks or would track, into a new folder.

    Args:
        root: of the repository.
        target: is removed first.
        parts: files and folders; the others stay behind.
    """
    shutil.rmtree(target, ignore_errors=True)
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *parts)
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GateError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
