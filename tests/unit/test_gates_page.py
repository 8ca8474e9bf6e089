"""The catalogue of release gates, and the page that is made from it: neither says what is not so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.gates.catalogue import ROOT, Catalogue, CatalogueError, Gate, HardwareGate, read
from scripts.gates.page import PAGE, check, update
from scripts.gates.tree import GateError

ONE = Gate(id="R01", claim="It works.", threshold="0 bits differ", tests=("tests/test_a.py::test_one",), ranks=(2,))


def test_the_catalogue_is_right_and_its_page_says_the_same() -> None:
    catalogue = read()
    assert len(catalogue.gates) >= 32
    assert all(one.mutation for one in catalogue.gates)
    check(catalogue)
    package_sources = ROOT / "src" / "shardopt"
    for one in catalogue.gates:
        assert one.mutation is not None
        assert (package_sources / one.mutation.file).read_text(encoding="utf-8").count(one.mutation.old) == 1, one.id


ENTRY = """
[[gate]]
id = "R01"
claim = "It works."
threshold = "0"
"""
THIS = Path(__file__).relative_to(ROOT).as_posix()
MUTATION = '[gate.mutation]\nfile = "a.py"\nold = "a"\nnew = "b"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no gate"),
        (ENTRY + MUTATION, "needs tests or a command"),
        (ENTRY + 'tests = ["tests/none.py::test"]\n' + MUTATION, "tests/none.py: no such file"),
        (ENTRY + f'tests = ["{THIS}::test"]\n', "has no mutation"),
        (ENTRY + f'tests = ["{THIS}::test_renamed[2]"]\n' + MUTATION, r"::test_renamed: no such test"),
        (ENTRY + 'comand = ["x"]\n' + MUTATION, "comand: not known"),
        (ENTRY + 'command = ["x"]\n' + MUTATION, "a command needs a figure"),
        (ENTRY * 2, "is there 2 times"),
        ('[[gate]]\nid = "R01"\n', "claim: missing"),
    ],
)
def test_entries_that_could_not_fail_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "gates.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CatalogueError, match=problem):
        read(path)


PAGE_BEFORE = "# Gates\n\n<!-- table: python -m scripts.gates page -->\n<!-- end of the table -->\nmore\n"


def evidence_of(commit: str, verdict: str, digest: str, *, dirty: bool = False, gpus: int = 0) -> dict[str, Any]:
    gates = {"R01": {"verdict": verdict, "digest": digest}, "G01": {"verdict": verdict, "digest": digest}}
    began = f"2026-01-0{len(commit)}T00:00:00+00:00"
    return {"commit": commit, "dirty": dirty, "gpus": gpus, "began": began, "gates": gates}


def test_the_page_says_what_the_newest_evidence_of_a_commit_says(tmp_path: Path) -> None:
    hardware = HardwareGate(id="G01", claim="", threshold="", jobs=("a",), gpus=(1, 2))
    catalogue = Catalogue(gates=(ONE,), hardware=(hardware,))
    page, folder = tmp_path / PAGE, tmp_path / "docs" / "gates"
    page.write_text(PAGE_BEFORE, encoding="utf-8")
    folder.mkdir(parents=True)

    def row(name: str) -> str:
        update(catalogue, tmp_path)
        check(catalogue, tmp_path)
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# Gates\n")
        assert text.endswith("\nmore\n")
        return next(line for line in text.splitlines() if line.startswith(f"| {name} |"))

    def note(name: str, **found: Any) -> None:
        (folder / name).write_text(json.dumps(evidence_of(**found)), encoding="utf-8")

    assert row("R01").endswith("| - | CPU, 2 ranks | not run |")
    assert row("G01").endswith("| not run on hardware |")
    note("a.json", commit="a", verdict="passed", digest=ONE.digest)
    assert row("R01").endswith("| [json](docs/gates/a.json) | CPU, 2 ranks | passed at `a` |")
    note("bb.json", commit="bb", verdict="failed", digest=ONE.digest)
    assert row("R01").endswith("| failed at `bb` |")
    note("ccc.json", commit="ccc", verdict="passed", digest=ONE.digest, dirty=True)
    assert row("R01").endswith("| failed at `bb` |")
    note("dddd.json", commit="dddd", verdict="passed", digest="another")
    assert row("R01").endswith("| not run since it was changed |")
    note("a-gpus2.json", commit="a", verdict="passed", digest=hardware.digest, gpus=2)
    assert row("G01").endswith("| 2: passed at `a` |")
    assert row("R01").endswith("| not run since it was changed |")


def test_a_page_that_says_other_things_is_refused(tmp_path: Path) -> None:
    catalogue = Catalogue(gates=(ONE,))
    page, file = tmp_path / PAGE, tmp_path / "docs" / "gates" / "a.json"
    file.parent.mkdir(parents=True)
    page.write_text(PAGE_BEFORE, encoding="utf-8")
    with pytest.raises(GateError, match="its table is not what"):
        check(catalogue, tmp_path)
    file.write_text(json.dumps(evidence_of("a", "failed", ONE.digest)), encoding="utf-8")
    update(catalogue, tmp_path)
    good = page.read_text(encoding="utf-8")
    page.write_text(good.replace("failed at", "passed at"), encoding="utf-8")
    with pytest.raises(GateError, match="its table is not what"):
        check(catalogue, tmp_path)
    page.write_text(good, encoding="utf-8")
    file.unlink()
    with pytest.raises(GateError, match="names evidence that is not there"):
        check(catalogue, tmp_path)
    file.write_text(json.dumps(evidence_of("a", "failed", ONE.digest, dirty=True)), encoding="utf-8")
    with pytest.raises(GateError, match="of trees that were no commit"):
        check(catalogue, tmp_path)
    page.write_text("# Gates\n", encoding="utf-8")
    with pytest.raises(GateError, match="has no lines"):
        check(catalogue, tmp_path)
