"""Every measured number in the documentation stands in a section that says which command measures it.

    python scripts/numbers_have_commands.py       exits with 1 and all sections that do not

What counts as measured: a number of ms, us or ns, a percentage, a factor (2.3x), a rate; and in tables bytes and
seconds too. A section runs from one heading to the next. A number that is a limit set in the code, and no measurement,
needs a comment in its section: <!-- numbers: where they come from -->. Commands that are named must be there: scripts,
modules and targets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", *(f"docs/{x}" for x in ("*.md", "*/*.md"))]

_NUMBER = r"(?<![\w.,])\d[\d,]*(?:\.\d+)?"
_ANYWHERE = re.compile(_NUMBER + r"(?: ?(?:ms|us|µs|ns|%|[KMG]i?B/s)(?!\w)|x(?![\w]))")
_IN_TABLES = re.compile(_NUMBER + r" ?(?:s|B|[kKMG]i?B)(?!\w)")
_COMMAND = re.compile(
    r"`(?:\.venv/bin/)?(?:python|make|torchrun|pytest) [^`]+`|^ *(?:\.venv/bin/)?(?:python|make|torchrun) ", re.M
)
_SCRIPT = re.compile(r"\bpython (?:(?P<path>[\w./-]+\.py)|-m (?P<module>(?:tests|benchmarks|scripts)[\w.]*))")
_MAKE = re.compile(r"`make ([\w-]+)")
_REASON = re.compile(r"<!-- numbers: .{8,} -->")
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"#{1,6} ")


def sections(text: str) -> Iterator[tuple[int, str]]:
    """First line and text of each section; headings inside of fences are none."""
    start, lines, fenced = 1, [], False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and _HEADING.match(line):
            yield start, "\n".join(lines)
            start, lines = number, []
        lines.append(line)
    yield start, "\n".join(lines)


def measured(section: str) -> list[str]:
    """The measured numbers of a section, outside of code."""
    prose = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)
    prose = _CODE.sub("", prose)
    table = "\n".join(line for line in prose.splitlines() if line.startswith("|"))
    return [*(found[0] for found in _ANYWHERE.finditer(prose)), *(found[0] for found in _IN_TABLES.finditer(table))]


def problems(text: str) -> Iterator[str]:
    """Sections with measured numbers and neither a command nor a source, and commands that are not there."""
    for line, section in sections(text):
        found = measured(section)
        if found and not _COMMAND.search(section) and not _REASON.search(section):
            title = section.splitlines()[0].lstrip("# ")
            yield (
                f"line {line}: the section {title!r} has {', '.join(found[:5])}, and names no command that measures "
                "it; name one in backticks, or say <!-- numbers: where they come from -->"
            )
    for number, content in enumerate(text.splitlines(), 1):
        yield from (f"line {number}: {problem}" for problem in _gone(content))


def _gone(line: str) -> Iterator[str]:
    """Commands in a line that name a script, a module or a target that does not exist."""
    for found in _SCRIPT.finditer(line):
        path = found["module"].replace(".", "/") if found["module"] else found["path"]
        if not any((ROOT / f"{path}{end}").exists() for end in ("", ".py")):
            yield f"the command {found[0]!r} names {path}, which is not there"
    for found in _MAKE.finditer(line):
        if not re.search(rf"^{re.escape(found[1])}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE):
            yield f"the command {found[0].strip('`')!r} names a target that the Makefile does not have"


def main() -> int:
    """Checks all pages."""
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for pattern in PAGES
        for path in sorted(ROOT.glob(pattern))
        for problem in problems(path.read_text(encoding="utf-8"))
    ]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
