"""Where files of the project are in the documentation's site, and links to them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Where pages of the project are in the site. Not README.md: mkdocs takes that name for a folder's index.
PROJECT_PAGES = {
    "README.md": "project/overview.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "RELEASE_GATES.md": "project/release-gates.md",
}

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def project_path(page: str, target: str) -> str:
    """What a link names: a path from the project's root.

    Args:
        page: the page's path in the site, e.g. ``"how-to/muon.md"``.
        target: the link's, relative to where the page's source is in the project.
    """
    source = next((source for source, place in PROJECT_PAGES.items() if place == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def site_path(path: str) -> str:
    """Where a file of the project is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else PROJECT_PAGES.get(path, f"project/{path}")


def relinked(text: str, page: str) -> str:
    """The text of a page of the site with relative links to where their targets are in the site."""

    def link(match: re.Match[str]) -> str:
        path = project_path(page, match[1])
        if not (ROOT / path).is_file():
            return match[0]
        return posixpath.relpath(site_path(path), posixpath.dirname(page) or ".") + (match[2] or "")

    return _outside_fences(text, lambda part: _LINK.sub(link, part))


def linked(text: str) -> Iterator[str]:
    """Targets of the relative links of a text, without their anchors."""
    parts: list[str] = []
    _outside_fences(text, lambda part: parts.append(part) or part)
    for part in parts:
        yield from (match[1] for match in _LINK.finditer(part))


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    result, end = "", 0
    for fence in _FENCE.finditer(text):
        result += change(text[end : fence.start()]) + fence[0]
        end = fence.end()
    return result + change(text[end:])
