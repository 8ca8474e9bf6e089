"""Hooks of the documentation's site: pages and files of the project that lie outside docs/, and links to them.

README.md and its like are pages of the site without being copied into docs/, and a link from docs/ to any other file of
the project gets that file. A link that leads nowhere stays as it is, for mkdocs to refuse.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

# Where pages of the project are in the site. Not README.md: mkdocs takes that name for a folder's index.
PROJECT_PAGES = {
    "README.md": "project/overview.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
}

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the project's pages, and the files that pages link to."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for source, place in PROJECT_PAGES.items():
        texts[place] = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=texts[place]))
    for page, text in texts.items():
        for target in linked(text):
            path = project_path(page, target)
            if not path.startswith("docs/") and path not in PROJECT_PAGES and (ROOT / path).is_file():
                place = site_path(path)
                if files.get_file_from_path(place) is None:
                    files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with links that work in the site."""
    return relinked(markdown, page.file.src_uri)


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
