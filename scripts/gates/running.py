"""Runs gates in an environment: one pytest for all that are tests, one process for each command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gates.catalogue import ROOT, Gate
from scripts.gates.environment import Environment, clean_variables
from scripts.gates.verdict import Judged, judge, judge_figures, read_record

__all__ = ["Place", "Results", "run_gates"]

_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where gates run.

    Attributes:
        environment: has the wheel.
        workplace: has the tests and no sources.
        results: folder for records and logs.
        package: the shardopt that has to be tested; None for the one that is installed.
        stop_at_first: do not go on after a failure.
    """

    environment: Environment
    workplace: Path
    results: Path
    package: Path | None = None
    stop_at_first: bool = False

    @property
    def expected(self) -> Path:
        """Folder that shardopt has to be imported from."""
        return self.package or self.environment.package

    @property
    def variables(self) -> dict[str, str]:
        """For the processes."""
        there = {} if self.package is None else {"PYTHONPATH": str(self.package.parent)}
        # Benchmarks note the commit, and the workplace is no repository.
        return clean_variables({"GIT_DIR": _git_dir(), "GIT_WORK_TREE": str(ROOT), **there})


@dataclass(frozen=True, kw_only=True)
class Results:
    """Verdicts of a run.

    Attributes:
        judged: one for each gate, in their order.
        problems: of the run as a whole.
    """

    judged: tuple[Judged, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are gates, and no problem anywhere."""
        return bool(self.judged) and not self.problems and not any(one.problems for one in self.judged)


def run_gates(gates: Sequence[Gate], place: Place) -> Results:
    """Runs the gates and judges them."""
    place.results.mkdir(parents=True, exist_ok=True)
    tested = [gate for gate in gates if gate.tests]
    judged: dict[str, Judged] = {}
    problems: list[str] = []
    if tested:
        verdicts, problems = _run_tests(tested, place)
        judged.update({one.id: one for one in verdicts})
    for gate in gates:
        if gate.command:
            judged[gate.id] = _run_command(gate, place)
    if not gates:
        problems.append("no gate was chosen")
    return Results(judged=tuple(judged[gate.id] for gate in gates), problems=tuple(problems))


def _run_tests(gates: Sequence[Gate], place: Place) -> tuple[list[Judged], list[str]]:
    request, record = place.results / "request.json", place.results / "record.jsonl"
    wanted = list(dict.fromkeys(test for gate in gates for test in gate.tests))
    request.write_text(json.dumps({"wanted": wanted, "record": str(record)}), encoding="utf-8")
    record.unlink(missing_ok=True)
    files = dict.fromkeys(file for gate in gates for file in gate.files)
    command = [str(place.environment.python), "-m", "pytest", "-q", "-p", "gate_recorder", "-p", "no:cacheprovider"]
    command += ["--exitfirst"] * place.stop_at_first + list(files)
    variables = {**place.variables, "SHARDOPT_GATE": str(request)}
    _, text, in_time = _run(command, place.workplace, variables, place.results / "pytest.log")
    found = read_record(record, place.expected)
    problems = list(found.problems)
    if not in_time:
        problems.append(f"pytest did not end within {_LIMIT_S:.0f} s")
    if problems:
        problems[-1] += f"; its last lines: {' | '.join(text.splitlines()[-3:])[:400]}"
    return [judge(gate, found) for gate in gates], problems


def _run_command(gate: Gate, place: Place) -> Judged:
    # PYTHONPATH comes before site-packages: a copy under test wins over what is installed.
    command = [str(place.environment.python), *gate.command]
    began = time.monotonic()
    log = place.results / f"{gate.id}.log"
    status, text, _ = _run(command, place.workplace, place.variables, log)
    return judge_figures(gate, status, text, time.monotonic() - began)


def _run(command: Sequence[str], cwd: Path, variables: Mapping[str, str], log: Path) -> tuple[int, str, bool]:
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        in_time = True
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace"), in_time


def _git_dir() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--absolute-git-dir"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
