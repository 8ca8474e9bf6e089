"""Links between docs/ and the rest of the project lead to the same files in the site."""

from __future__ import annotations

from scripts.site_links import PROJECT_PAGES, ROOT, linked, project_path, relinked, site_path


def test_the_projects_pages_are_there() -> None:
    assert [source for source in PROJECT_PAGES if not (ROOT / source).is_file()] == []


def test_links_are_those_of_the_pages_source() -> None:
    assert project_path("how-to/x.md", "../swap.md") == "docs/swap.md"
    assert project_path("swap.md", "../README.md") == "README.md"
    assert project_path("project/overview.md", "docs/swap.md") == "docs/swap.md"
    assert project_path("project/benchmarks.md", "catalogue/protocols.py") == "benchmarks/catalogue/protocols.py"


def test_where_files_are_in_the_site() -> None:
    assert site_path("docs/how-to/x.md") == "how-to/x.md"
    assert site_path("README.md") == "project/overview.md"
    assert site_path("examples/own_codec.py") == "project/examples/own_codec.py"


def test_a_page_is_relinked() -> None:
    text = "[a](docs/swap.md#state) [b](examples/own_codec.py) [c](https://x.y/z) [d](#here) [e](CONTRIBUTING.md)"
    assert relinked(text, "project/overview.md") == (
        "[a](../swap.md#state) [b](examples/own_codec.py) [c](https://x.y/z) [d](#here) [e](contributing.md)"
    )
    assert relinked("[up](../../README.md) [side](replace-adamw.md)", "how-to/x.md") == (
        "[up](../project/overview.md) [side](replace-adamw.md)"
    )


def test_a_link_to_nothing_stays_for_mkdocs_to_refuse() -> None:
    assert relinked("[a](../gone.md)", "swap.md") == "[a](../gone.md)"


def test_fences_are_left_alone() -> None:
    text = "```\n[a](../README.md)\n```\n[b](../README.md)\n"
    assert relinked(text, "swap.md") == "```\n[a](../README.md)\n```\n[b](project/overview.md)\n"
    assert list(linked(text)) == ["../README.md"]
