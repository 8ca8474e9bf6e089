"""The runner of release gates: what is not a pass of everything that was asked for is a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.gates import gpus as gpu_gates
from scripts.gates.__main__ import main
from scripts.gates.catalogue import ROOT, Figure, Gate, HardwareGate, Mutation
from scripts.gates.environment import Environment, Wheel, check_equal, check_place, clean_variables, make_workplace
from scripts.gates.gpus import judge_jobs, refuse_without
from scripts.gates.mutants import judge_mutant, mutate, summary
from scripts.gates.recorder import matches
from scripts.gates.running import Place, Results, run_gates
from scripts.gates.tree import GateError, look_at
from scripts.gates.verdict import Judged, Record, judge, judge_figures, read_record

PACKAGE = Path("/env/site-packages/shardopt")
TEST = "tests/test_a.py::test_one"
PHASES = ("setup", "call", "teardown")


def gate(*tests: str, ranks: tuple[int, ...] = (), **values: Any) -> Gate:
    return Gate(id="R01", claim="It works.", threshold="0 bits differ", tests=tests, ranks=ranks, **values)


def phase(test: str, name: str, outcome: str = "passed", *, expected_to_fail: bool = False) -> dict[str, Any]:
    flags = {"outcome": outcome, "expected_to_fail": expected_to_fail, "seconds": 0.5, "text": "why"}
    return {"event": "phase", "test": test, "phase": name, **flags}


def passed(test: str) -> list[dict[str, Any]]:
    return [phase(test, name) for name in PHASES]


def finished(status: int = 0, package: str | None = None) -> dict[str, Any]:
    place = package or str(PACKAGE)
    return {"event": "finished", "status": status, "package": f"{place}/__init__.py", "kernel": f"{place}/_host.so"}


def record_of(tmp_path: Path, *events: dict[str, Any]) -> Record:
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return read_record(path, PACKAGE)


def selected(*tests: str) -> dict[str, Any]:
    return {"event": "selected", "tests": list(tests)}


def test_a_gate_passes_when_all_of_its_tests_pass_on_all_of_its_ranks(tmp_path: Path) -> None:
    ranks = [{"event": "ranks", "test": f"{TEST}[a]", "ranks": number} for number in (2, 4)]
    both = [f"{TEST}[a]", f"{TEST}[b]"]
    found = record_of(tmp_path, selected(*both), *ranks, *passed(both[0]), *passed(both[1]), finished())
    judged = judge(gate(TEST, ranks=(2, 4)), found)
    assert found.problems == []
    assert judged.problems == ()
    assert (judged.tests, judged.ranks, judged.seconds) == (2, (2, 4), 3.0)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([phase(TEST, "setup", "skipped"), phase(TEST, "teardown")], "was skipped: why"),
        ([phase(TEST, "setup"), phase(TEST, "call", "skipped"), phase(TEST, "teardown")], "was skipped: why"),
        (
            [phase(TEST, "setup"), phase(TEST, "call", "skipped", expected_to_fail=True), phase(TEST, "teardown")],
            "call: is marked as expected to fail",
        ),
        (
            [phase(TEST, "setup"), phase(TEST, "call", expected_to_fail=True), phase(TEST, "teardown")],
            "call: is marked as expected to fail",
        ),
        ([phase(TEST, "setup"), phase(TEST, "call", "failed"), phase(TEST, "teardown")], "call: why"),
        ([phase(TEST, "setup"), phase(TEST, "call"), phase(TEST, "teardown", "failed")], "teardown: why"),
        ([phase(TEST, "setup"), phase(TEST, "call", "skipped"), *passed(TEST)[1:]], "was skipped: why"),
        ([phase(TEST, "setup"), phase(TEST, "call", "failed"), *passed(TEST)], "call: why"),
        ([phase(TEST, "setup"), phase(TEST, "call")], "did not run to its end"),
        ([], "did not run to its end"),
    ],
    ids=[
        "skip",
        "skip inside",
        "xfail",
        "xpass",
        "failure",
        "failure afterwards",
        "subtest skipped",
        "run again",
        "cut short",
        "never begun",
    ],
)
def test_what_is_no_pass_fails(tmp_path: Path, events: list[dict[str, Any]], problem: str) -> None:
    judged = judge(gate(TEST), record_of(tmp_path, selected(TEST), *events, finished()))
    assert judged.problems == (f"{TEST}: {problem}",)


def test_tests_that_are_missing_or_left_out_fail_and_so_does_a_gate_without_tests(tmp_path: Path) -> None:
    gone = {"event": "missing", "tests": [TEST]}
    left_out = {"event": "deselected", "tests": [f"{TEST}[a]"]}
    judged = judge(gate(TEST), record_of(tmp_path, gone, left_out, selected(), finished(5)))
    assert judged.problems == (
        f"{TEST}: no such test",
        f"{TEST}[a]: left out by an option of pytest",
        "no test was selected",
    )


def test_a_number_of_ranks_that_was_never_seen_fails(tmp_path: Path) -> None:
    seen = {"event": "ranks", "test": TEST, "ranks": 2}
    judged = judge(gate(TEST, ranks=(2, 4)), record_of(tmp_path, selected(TEST), seen, *passed(TEST), finished()))
    assert judged.problems == ("nothing ran on 4 ranks",)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([selected(TEST), *passed(TEST)], f"the run ended in {TEST} and not by itself"),
        ([finished(3)], "pytest ended with status 3"),
        (
            [finished(package="/work/src/shardopt")],
            f"shardopt's package was imported from /work/src/shardopt/__init__.py; the wheel is in {PACKAGE}",
        ),
        (
            [{**finished(), "kernel": None}],
            "no test imported shardopt's kernel",
        ),
        (
            [{"event": "collection", "test": "tests/test_a.py", "outcome": "skipped", "text": "why"}, finished()],
            "tests/test_a.py: skipped when collected: why",
        ),
    ],
    ids=["killed", "status", "another package", "no kernel", "module skipped"],
)
def test_a_run_that_went_wrong_fails_as_a_whole(tmp_path: Path, events: list[dict[str, Any]], problem: str) -> None:
    assert problem in record_of(tmp_path, *events).problems


def test_without_a_record_or_without_gates_nothing_has_passed(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none", PACKAGE).problems
    assert not Results(judged=(), problems=()).passed
    good = Judged(id="R01", digest="", problems=())
    assert Results(judged=(good,), problems=()).passed
    assert not Results(judged=(good,), problems=("a run that went wrong",)).passed
    assert not Results(judged=(good, Judged(id="R02", digest="", problems=("why",))), problems=()).passed


ROW = "2 ranks: {}, peak over needed memory    {}%   <= 2%  PASS\n"


@pytest.mark.parametrize(
    ("output", "status", "problems"),
    [
        (ROW.format("save", "0.20") + ROW.format("load", "1.00"), 0, 0),
        (ROW.format("save", "0.20") + ROW.format("load", "4.10"), 0, 1),
        (ROW.format("save", "0.20"), 0, 1),
        ("", 0, 1),
        (ROW.format("save", "0.20") + ROW.format("load", "1.00"), 1, 1),
        (ROW.format("save", "0.20").replace("%", " MiB") + ROW.format("load", "1.00"), 0, 1),
    ],
    ids=["good", "too much", "one missing", "none", "status", "unit"],
)
def test_figures(output: str, status: int, problems: int) -> None:
    measured = gate(command=("x.py",), figure=Figure(count=2, at_most=4.0, unit="%"))
    judged = judge_figures(measured, status, output, 1.0)
    assert len(judged.problems) == problems, judged.problems
    assert bool(judged.failed) == ("4.10" in output)


@pytest.mark.parametrize("file", ["changed", "new"])
def test_a_dirty_tree_is_refused_unless_allowed_and_evidence_does_not_count(tmp_path: Path, file: str) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "changed").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "docs" / "gates").mkdir(parents=True)
    (tmp_path / "docs" / "gates" / "evidence.json").write_text("{}")
    clean = look_at(tmp_path)
    assert clean.changes == ()
    clean.check_clean(allow_dirty=False)
    (tmp_path / file).write_text("2")
    dirty = look_at(tmp_path)
    with pytest.raises(GateError, match=f"{file}; commit first, or say ALLOW_DIRTY=1"):
        dirty.check_clean(allow_dirty=False)
    dirty.check_clean(allow_dirty=True)
    assert len(dirty.changes) == 1


def test_wheels_that_differ_are_refused() -> None:
    first, same = (Wheel(path=Path(f"/{n}/a.whl"), sha256="1") for n in (1, 2))
    check_equal([first, same])
    for other in (Wheel(path=Path("/2/a.whl"), sha256="2"), Wheel(path=Path("/2/b.whl"), sha256="1")):
        with pytest.raises(GateError, match="one commit gave two wheels"):
            check_equal([first, other])
    with pytest.raises(GateError, match="nothing to compare it with"):
        check_equal([first])


def test_a_package_from_elsewhere_is_refused(tmp_path: Path) -> None:
    check_place(tmp_path / "shardopt" / "__init__.py", tmp_path)
    with pytest.raises(GateError, match="that is not the wheel"):
        check_place(tmp_path / "src" / "shardopt" / "__init__.py", tmp_path)


def test_the_workplace_has_tests_and_no_sources(tmp_path: Path) -> None:
    make_workplace(ROOT, tmp_path / "workplace")
    there = {path.name for path in (tmp_path / "workplace").iterdir()}
    assert {"tests", "pyproject.toml", "gate_recorder.py"} <= there
    assert not {"src", "scripts", "csrc"} & there


def test_settings_of_the_user_do_not_reach_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_ADDOPTS", "PYTHONPATH", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "x")
    assert not {"PYTEST_ADDOPTS", "PYTHONPATH", "PYTHONWARNINGS"} & clean_variables().keys()
    assert clean_variables({"PYTHONPATH": "y"})["PYTHONPATH"] == "y"


def test_names_stand_for_their_parameters_and_for_no_other_test() -> None:
    assert matches(TEST, TEST)
    assert matches(TEST, f"{TEST}[a-b]")
    assert not matches(TEST, f"{TEST}_more")
    assert not matches(f"{TEST}[a]", f"{TEST}[ab]")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "installed" / "shardopt"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("x = 1\ny = 1\n")
    return folder


def test_a_mutant_is_a_copy(package: Path, tmp_path: Path) -> None:
    broken = mutate(Mutation(file="a.py", old="x = 1", new="x = 2"), package, tmp_path / "mutant")
    assert (broken / "a.py").read_text() == "x = 2\ny = 1\n"
    assert (package / "a.py").read_text() == "x = 1\ny = 1\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("a.py", "z", "", "has this 0 times"),
        ("a.py", "= 1", "= 2", "has this 2 times"),
        ("b.py", "x", "", "no such file"),
        ("a.py", "x = 1", "x = ", "no Python"),
    ],
)
def test_a_mutation_that_does_not_hit_is_an_error(
    package: Path, tmp_path: Path, file: str, old: str, new: str, problem: str
) -> None:
    with pytest.raises(GateError, match=problem):
        mutate(Mutation(file=file, old=old, new=new), package, tmp_path / "mutant")


def test_a_mutant_is_dead_by_a_test_that_failed_and_by_nothing_else() -> None:
    def noticed(*, failed: tuple[str, ...] = (), problems: tuple[str, ...] = (), run: tuple[str, ...] = ()) -> bool:
        judged = Judged(id="R01", digest="", problems=(*failed, *problems), failed=failed)
        return judge_mutant(gate(TEST), Results(judged=(judged,), problems=run), 1.0).dead

    assert noticed(failed=("call: why",))
    assert noticed(failed=("call: why",), problems=(f"{TEST}[b]: did not run to its end",))
    assert not noticed()
    assert not noticed(problems=("was skipped",))
    assert not noticed(failed=("call: why",), run=("pytest ended with status 4",))
    assert not noticed(failed=("call: why",), problems=(f"{TEST}: no such test",))
    good = Judged(id="R01", digest="", problems=("a",), failed=("a",))
    dead = judge_mutant(gate(TEST), Results(judged=(good,), problems=()), 1.0)
    alive = judge_mutant(gate(TEST), Results(judged=(Judged(id="R", digest="", problems=()),), problems=()), 1.0)
    assert summary([dead, alive]) == "gates 1 of 2"


def test_gpus_that_are_not_there_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_without(2, 2)
    with pytest.raises(GateError, match=r"^make gate GPUS=2 needs 2 GPUs and this machine shows 1: nothing was run.$"):
        refuse_without(2, 1)
    with pytest.raises(GateError, match="1, 2 or 4"):
        refuse_without(3, 8)
    monkeypatch.setattr(gpu_gates, "count_gpus", lambda: 0)
    assert main(["run", "--gpus", "4", "--allow-dirty"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == ("make gate GPUS=4 needs 4 GPUs and this machine shows 0: nothing was run.")


def test_jobs_of_gpus_have_to_be_well_on_every_rank() -> None:
    one = HardwareGate(id="G01", claim="", threshold="", jobs=("a", "b"), gpus=(2,))
    well = {"jobs": {"a": ["ok", "ok"], "b": ["ok", "ok"]}}
    assert judge_jobs(one, well, 2) == []
    assert judge_jobs(one, {"jobs": {"a": ["ok", "ValueError: x"]}}, 2) == [
        "a: rank 1: ValueError: x",
        "b: did not run",
    ]
    assert judge_jobs(one, well, 4) == ["a: 2 ranks have answered, of 4", "b: 2 ranks have answered, of 4"]


PROBE = """
import pytest

def test_good(): pass

@pytest.mark.parametrize("n", [1, 2])
def test_both(n): assert n == 1

@pytest.mark.skip(reason="no")
def test_skipped(): pass
"""
SUPPORT = "class RankPool:\n    def outcomes(self, world_size): return world_size\n"


def test_the_recorder_tells_what_became_of_each_wanted_test(tmp_path: Path) -> None:
    (tmp_path / "tests" / "support").mkdir(parents=True)
    (tmp_path / "tests" / "support" / "ranks.py").write_text(SUPPORT)
    (tmp_path / "tests" / "test_probe.py").write_text(PROBE)
    (tmp_path / "gate_recorder.py").write_bytes((ROOT / "scripts/gates/recorder.py").read_bytes())
    request = tmp_path / "request.json"
    wanted = [f"tests/test_probe.py::{name}" for name in ("test_both", "test_skipped", "test_gone")]
    request.write_text(json.dumps({"wanted": wanted, "record": str(tmp_path / "record.jsonl")}))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gate_recorder", "-c", os.devnull, "--rootdir", "."]
    variables = clean_variables({"SHARDOPT_GATE": str(request)})
    subprocess.run([*command, "tests/test_probe.py"], cwd=tmp_path, env=variables, check=False, capture_output=True)
    judged = judge(gate(*wanted), read_record(tmp_path / "record.jsonl", PACKAGE))
    assert judged.tests == 2
    assert len(judged.failed) == 1
    assert sorted(problem.partition("::")[2].partition(":")[0] for problem in judged.problems) == [
        "test_both[2]",
        "test_gone",
        "test_skipped",
    ]


def test_a_command_is_run_on_the_package_that_is_to_be_tested(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name / "shardopt").mkdir(parents=True)
        (tmp_path / name / "shardopt" / "__init__.py").touch()
    (tmp_path / "measure.py").write_text(f"print({ROW.format('save', '0.20')!r})")
    measured = gate(command=("measure.py",), figure=Figure(count=1, at_most=4.0, unit="%"))
    # Not this environment's: an editable shardopt comes before PYTHONPATH.
    python = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))
    environment = Environment(python=python, package=tmp_path / "wrong" / "shardopt")
    place = Place(
        environment=environment,
        workplace=tmp_path,
        results=tmp_path / "results",
        package=tmp_path / "right" / "shardopt",
    )
    assert run_gates([measured], place).passed
    elsewhere = replace(place, package=tmp_path / "none" / "shardopt")
    (judged,) = run_gates([measured], elsewhere).judged
    assert "the one to test is in" in judged.problems[0]
    assert not run_gates([], place).passed
