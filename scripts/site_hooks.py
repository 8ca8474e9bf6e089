"""Hooks of the documentation's site: pages and files of the project that lie outside docs/, and links to them.

README.md and its like are pages of the site without being copied into docs/, and a link from docs/ to any other file of
the project gets that file. A link that leads nowhere stays as it is, for mkdocs to refuse.
"""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_links import PROJECT_PAGES, ROOT, linked, project_path, relinked, site_path


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
