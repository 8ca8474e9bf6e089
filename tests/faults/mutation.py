"""Votes and guards of shardopt: finding them in its source, and disabling one in a running process.

The rules, each of which makes a mutant of every place it fits:

* vote: a call of ``vote``, ``gather``, ``scatter`` or ``exchange`` asks nobody; each rank goes on for itself;
* problem, digest, facts: a vote is held without what the rank has to say;
* guard: a call that stands alone and whose name begins with ``check`` or ``refuse`` is not made;
* poison: the note that state is half written is not made;
* handler: ``except BaseException`` is ``except Exception``, past which go ``CheckpointException`` and interrupts;
* cleanup: a handler that raises again does nothing else.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType

import shardopt
from tests.faults.cells import Seen, fill
from tests.faults.table import Cell

__all__ = ["FILES", "SOURCE", "VOTES", "Mutant", "discovered", "fill_mutated", "mutated"]

_TIMEOUT_S = 3.0

SOURCE = Path(shardopt.__file__).parent
FILES = (
    *(
        f"staging/{name}.py"
        for name in ("stepping", "construction", "consensus", "poison", "presence", "prepared", "offer")
    ),
    *(f"checkpoint/{name}.py" for name in ("agreement", "contents", "loading", "saving", "wrapped")),
    "optimizer.py",
    "portable/agreement.py",
    "scope/differences.py",
    "scope/scope.py",
)
VOTES = ("vote", "gather", "scatter", "exchange")
_SAID = ("problem", "digest", "facts")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One place and one rule.

    Attributes:
        path: of the file, below the package.
        function: the function or method at the top of the module or class it is in.
        line: where it is, from 1.
        column: where it is, from 0.
        rule: which one.
        text: the source there, its beginning.
    """

    path: str
    function: str
    line: int
    column: int
    rule: str
    text: str

    @property
    def name(self) -> str:
        """Stays the same when lines move."""
        return f"{self.path} {self.function}: {self.rule}: {self.text}"


def discovered() -> list[Mutant]:
    """All of them, in the order of the source. Names are unique: of places that read alike the later have a number."""
    found: dict[str, Mutant] = {}
    for mutant in (mutant for path in FILES for mutant in _in_file(path)):
        alike = sum(one.rpartition(" #")[0] == mutant.name or one == mutant.name for one in found)
        numbered = replace(mutant, text=f"{mutant.text} #{alike + 1}") if alike else mutant
        found[numbered.name] = numbered
    return [*found.values()]


def _in_file(path: str) -> Iterator[Mutant]:
    source = (SOURCE / path).read_text(encoding="utf-8")
    for function, definition in _functions(ast.parse(source)):
        for node in ast.walk(definition):
            for rule in _rules(node):
                text = _text(source, node)
                line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
                yield Mutant(path=path, function=function, line=line, column=column, rule=rule, text=text)


def _text(source: str, node: ast.AST) -> str:
    if isinstance(node, ast.ExceptHandler):
        node = node.body[0]
    return " ".join((ast.get_source_segment(source, node) or "").split())[:70]


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{one.name}", one) for one in node.body if isinstance(one, ast.FunctionDef))


def _rules(node: ast.AST) -> Iterator[str]:
    """The rules that fit a node."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VOTES:
        yield "vote"
        yield from (keyword.arg for keyword in node.keywords if keyword.arg in _SAID)
        # Consensus.vote has it second.
        yield from ["problem"] if node.func.attr == "vote" and len(node.args) == 2 else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = ast.unparse(node.value.func)
        name = called.rpartition(".")[2].lstrip("_")
        if name.startswith(("check", "refuse")):
            yield "guard"
        if name in ("poison", "committed", "loaded") or called.endswith("_poison.set"):
            yield "poison"
    if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "BaseException":
        raises = isinstance(node.body[-1], ast.Raise)
        yield "cleanup" if raises and len(node.body) > 1 else "handler"


class _Disable(ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.done = 0

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", -1))
        if place != (self.mutant.line, self.mutant.column) or self.mutant.rule not in _rules(node):
            return node
        self.done += 1
        return ast.copy_location(_disabled(node, self.mutant.rule), node)


def _disabled(node: ast.AST, rule: str) -> ast.AST:
    if rule in ("guard", "poison"):
        return ast.Pass()
    if isinstance(node, ast.ExceptHandler):
        if rule == "cleanup":
            node.body = [ast.Raise()]
        else:
            node.type = ast.Name("Exception", ast.Load())
        return node
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    if rule == "vote":
        imported = ast.parse('__import__("tests.faults.alone", fromlist=["alone"]).alone', mode="eval").body
        node.args = [ast.Constant(node.func.attr), node.func.value, *node.args]
        node.func = imported
        return node
    node.keywords = [keyword for keyword in node.keywords if keyword.arg != rule]
    if rule == "problem" and len(node.args) == 2:
        node.args[1] = ast.Constant(None)
    return node


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """In this process, shardopt is the mutant; its functions are changed where they are, whoever has imported them."""
    path = SOURCE / mutant.path
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = compile(tree, str(path), "exec")
    disable = _Disable(mutant)
    changed = ast.fix_missing_locations(disable.visit(tree))
    assert disable.done == 1, mutant
    names = mutant.function.split(".")
    old, new = _code(whole, names), _code(compile(changed, str(path), "exec"), names)
    functions = [one for one in gc.get_objects() if type(one) is FunctionType and _is(one.__code__, old)]
    assert functions, mutant
    before = [one.__code__ for one in functions]
    for one in functions:
        one.__code__ = new
    try:
        yield
    finally:
        for one, code in zip(functions, before, strict=True):
            one.__code__ = code


def fill_mutated(directory: str, mutant: Mutant | None, cells: Sequence[Cell]) -> list[Seen]:
    """The job: fills cells with shardopt mutated in this process, if there is a mutant."""
    with nullcontext() if mutant is None else mutated(mutant):
        return fill(directory, cells, _TIMEOUT_S)


def _code(code: CodeType, names: list[str]) -> CodeType:
    for name in names:
        code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
    return code


def _is(code: CodeType, other: CodeType) -> bool:
    here = (code.co_name, code.co_firstlineno)
    return here == (other.co_name, other.co_firstlineno) and Path(code.co_filename) == Path(other.co_filename)
