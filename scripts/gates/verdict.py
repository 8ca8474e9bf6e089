"""Judges gates by the record of a run: whatever is not a pass of every test on every number of ranks is a failure."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.gates.catalogue import Gate
from scripts.gates.recorder import matches

__all__ = ["Judged", "Record", "judge", "judge_figures", "read_record"]

_PHASES = ("setup", "call", "teardown")
_BAR = re.compile(
    r"^(?P<name>\S.*?)  +(?P<value>-?[\d.]+)(?P<unit>\D*?)  +[<>]= \S+ *\S*  +(?:PASS|FAIL)$", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A gate's verdict.

    Attributes:
        id: of the gate.
        digest: of what was judged.
        problems: why it fails; none if it passes.
        failed: tests that ran and failed, and figures above their limit: not what could not be run.
        tests: how many ran to their end.
        ranks: world sizes that were seen.
        figures: name -> number; in the gate's unit.
        seconds: that its tests or its command took.
    """

    id: str
    digest: str
    problems: tuple[str, ...]
    failed: tuple[str, ...] = ()
    tests: int = 0
    ranks: tuple[int, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(kw_only=True)
class Record:
    """What a run of pytest wrote down.

    Attributes:
        selected: node ids that were to run.
        missing: wanted names that no test has.
        deselected: node ids that an option took away.
        phases: node id -> phase -> the recorder's line.
        ranks: node id -> world sizes.
        problems: of the run as a whole.
    """

    selected: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    deselected: list[str] = field(default_factory=list)
    phases: dict[str, dict[str, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    ranks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    problems: list[str] = field(default_factory=list)


def read_record(path: Path, package: Path) -> Record:
    """Reads what the recorder wrote.

    Args:
        path: of the record.
        package: folder that shardopt has to have been imported from.
    """
    record = Record()
    if not path.is_file():
        record.problems.append("pytest wrote no record: it ended before it collected tests")
        return record
    last, finished = "", None
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        last = event.get("test", last)
        if event["event"] == "finished":
            finished = event
        else:
            _take(record, event)
    if finished is None:
        record.problems.append(f"the run ended in {last or 'its collection'} and not by itself")
    else:
        record.problems += _whose(finished, package)
        if finished["status"] not in (0, 1):
            record.problems.append(f"pytest ended with status {finished['status']}")
    return record


def _take(record: Record, event: dict[str, Any]) -> None:
    match event["event"]:
        case "selected":
            record.selected += event["tests"]
        case "missing":
            record.missing += event["tests"]
        case "deselected":
            record.deselected += event["tests"]
        case "collection":
            record.problems.append(f"{event['test']}: {event['outcome']} when collected: {event['text']}")
        case "ranks":
            record.ranks[event["test"]].add(event["ranks"])
        case "phase":
            # Subtests, and plugins that run a test again, report a phase more than once: none takes back another.
            first = record.phases[event["test"]].setdefault(event["phase"], event)
            if first["outcome"] == "passed" and not first["expected_to_fail"]:
                record.phases[event["test"]][event["phase"]] = event


def _whose(finished: dict[str, Any], package: Path) -> Iterable[str]:
    for what in ("package", "kernel"):
        place = finished[what]
        if place is None:
            yield f"no test imported shardopt's {what}"
        elif Path(place).parent.resolve() != package.resolve():
            yield f"shardopt's {what} was imported from {place}; the wheel is in {package}"


def judge(gate: Gate, record: Record) -> Judged:
    """The verdict on a gate of tests; problems of the run as a whole are not in it."""
    problems = [f"{name}: no such test" for name in gate.tests if name in record.missing]
    problems += [f"{name}: left out by an option of pytest" for name in record.deselected if _of(gate, name)]
    mine = [nodeid for nodeid in record.selected if _of(gate, nodeid)]
    failed = [text for nodeid in mine for text in _failures(nodeid, record)]
    problems += failed
    problems += [text for nodeid in mine for text in _no_passes(nodeid, record)]
    if not mine:
        problems.append("no test was selected")
    seen = {ranks for nodeid in mine for ranks in record.ranks[nodeid]}
    problems += [f"nothing ran on {ranks} ranks" for ranks in gate.ranks if ranks not in seen]
    done = [nodeid for nodeid in mine if set(record.phases[nodeid]) >= set(_PHASES)]
    seconds = sum(phase["seconds"] for nodeid in mine for phase in record.phases[nodeid].values())
    return Judged(
        id=gate.id,
        digest=gate.digest,
        problems=tuple(problems),
        failed=tuple(failed),
        tests=len(done),
        ranks=tuple(sorted(seen)),
        seconds=round(seconds, 2),
    )


def _of(gate: Gate, nodeid: str) -> bool:
    return any(matches(name, nodeid) for name in gate.tests)


def _failures(nodeid: str, record: Record) -> list[str]:
    phases = record.phases[nodeid].items()
    return [f"{nodeid}: {name}: {phase['text']}" for name, phase in phases if phase["outcome"] == "failed"]


def _no_passes(nodeid: str, record: Record) -> list[str]:
    phases = record.phases[nodeid]
    problems = []
    for name, phase in phases.items():
        if phase["expected_to_fail"]:
            problems.append(f"{nodeid}: {name}: is marked as expected to fail")
        elif phase["outcome"] == "skipped":
            problems.append(f"{nodeid}: was skipped: {phase['text']}")
    absent = [name for name in _PHASES if name not in phases]
    if absent and not problems and not _failures(nodeid, record):
        problems.append(f"{nodeid}: did not run to its end")
    return problems


def judge_figures(gate: Gate, status: int, output: str, seconds: float) -> Judged:
    """The verdict on a gate that is a command.

    Args:
        gate: has a figure.
        status: exit status of the command.
        output: its standard output, with a table of bars.
        seconds: that it took.
    """
    assert gate.figure is not None
    rows = [(row["name"], float(row["value"]), row["unit"].strip()) for row in _BAR.finditer(output)]
    figures = {name: value for name, value, _ in rows}
    figure = gate.figure
    problems = [f"{name}: in {unit!r} and not {figure.unit!r}" for name, _, unit in rows if unit != figure.unit]
    failed = [f"{name}: {value} is above {figure.at_most}" for name, value in figures.items() if value > figure.at_most]
    if len(figures) != figure.count:
        problems.append(f"measured {len(figures)} figures and not {figure.count}")
    if status != 0 and not failed:
        problems.append(f"the command ended with status {status}: {_tail(output.splitlines())}")
    return Judged(
        id=gate.id,
        digest=gate.digest,
        problems=(*problems, *failed),
        failed=tuple(failed),
        figures=figures,
        seconds=round(seconds, 2),
    )


def _tail(lines: Sequence[str]) -> str:
    return " | ".join(line.strip() for line in lines[-5:] if line.strip())[:500]
