"""No file grows past 400 lines and no function past 60: a reader holds one of them in mind at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "csrc", "tests", "benchmarks", "examples", "scripts")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources(*suffixes: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]
    return [path for path in found if "__pycache__" not in path.parts]


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or node.lineno) - first + 1


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Functions of clang-formatted code: they open at column 0 with `... {` and close with a `}` at column 0."""
    lines = text.splitlines()
    first = None
    for number, line in enumerate(lines):
        if first is None and re.match(r"(template|[\w:]+[\s*&<]).*[({,>]$", line) and not line.startswith("namespace"):
            first = number
        if line.startswith("}") or line.endswith(";"):
            if first is not None and line.startswith("}"):
                yield lines[first], number - first + 1
            first = None if line[0] != " " else first


def too_long(functions: Iterator[tuple[str, int]]) -> list[str]:
    return [f"{name}: {lines} lines" for name, lines in functions if lines >= MAX_FUNCTION_LINES]


def test_sources_are_found() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in sources(".py", ".cpp", ".h")}
    assert {"src/shardopt/errors.py", "csrc/dispatch.cpp", "csrc/step_body.h", "tests/unit/test_sizes.py"} <= found


@pytest.mark.parametrize(
    "path", sources(".py", ".pyi", ".cpp", ".h", ".sh"), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_file_is_short_enough(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_FILE_LINES
    if path.suffix in (".py", ".pyi"):
        assert not too_long(python_functions(text))
    elif path.suffix in (".cpp", ".h"):
        assert not too_long(cpp_functions(text))


def test_long_python_functions_are_seen() -> None:
    body = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES - 2))
    assert not too_long(python_functions(f"def f():\n{body}"))
    assert too_long(python_functions(f"@d\ndef f():\n{body}")) == ["f: 60 lines"]
    assert too_long(python_functions(f"class C:\n  async def f():\n{body}\n    y = 2")) == ["f: 60 lines"]


def test_cpp_functions_are_seen() -> None:
    found = dict(cpp_functions((ROOT / "csrc" / "dispatch.cpp").read_text(encoding="utf-8")))
    assert found["const Level &level_named(const std::string &isa) {"] > 10
    body = "\n".join("    x = 1;" for _ in range(MAX_FUNCTION_LINES - 2))
    assert too_long(cpp_functions(f"void f(int a,\n       int b) {{\n{body}\n}}\n")) == ["void f(int a,: 61 lines"]
