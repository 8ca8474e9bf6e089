"""Every public name is on the page of all public names, and its docstring in the reference."""

from __future__ import annotations

from pathlib import Path

import shardopt

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")


def test_every_public_name_is_on_the_page() -> None:
    assert [name for name in shardopt.__all__ if f"`{name}" not in PAGE] == []


def test_the_docstring_of_every_public_name_is_in_the_reference() -> None:
    shown = [line.removeprefix("::: shardopt.") for line in REFERENCE.splitlines() if line.startswith("::: ")]
    assert sorted(shown) == sorted(
        [*(name for name in shardopt.__all__ if name != "__version__"), "testing.check_codec"]
    )
    assert [name for name in shown if "." not in name and not getattr(shardopt, name).__doc__] == []


def test_every_method_of_the_wrapper_is_on_the_page() -> None:
    own = [
        name
        for name in vars(shardopt.ShardedStateOptimizer)
        if not name.startswith("_") and callable(getattr(shardopt.ShardedStateOptimizer, name))
    ]
    assert len(own) > 8
    assert [name for name in own if f"`.{name}" not in PAGE] == []


def test_every_field_of_a_report_is_on_the_page() -> None:
    assert [name for name in shardopt.Report.__dataclass_fields__ if f"`.{name}`" not in PAGE] == []
