"""``RELEASE_GATES.md``: its table is made from the catalogue and the evidence that it names, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.gates.catalogue import ROOT, Catalogue, Gate, HardwareGate
from scripts.gates.evidence import read_all
from scripts.gates.tree import GateError

__all__ = ["PAGE", "check", "newest", "table", "update"]

PAGE = "RELEASE_GATES.md"
_BEGIN, _END = "<!-- table: python -m scripts.gates page -->", "<!-- end of the table -->"
_NAMED = "<!-- evidence: {} -->"
_TITLES = ("gate", "claim", "command", "threshold", "evidence", "runs on", "state")

Evidence = Mapping[str, Mapping[str, Any]]


def newest(evidence: Evidence) -> dict[str, Mapping[str, Any]]:
    """Of each number of GPUs, 0 included, the newest; given and returned by path, the oldest first."""
    last = {found["gpus"]: path for path, found in evidence.items()}
    return {path: found for path, found in evidence.items() if path in last.values()}


def table(catalogue: Catalogue, evidence: Evidence) -> str:
    """The table, with a line for each piece of evidence above it."""
    rows = [_row(gate, evidence) for gate in catalogue.gates]
    rows += [_hardware_row(gate, evidence) for gate in catalogue.hardware]
    lines = [_NAMED.format(path) for path in evidence]
    lines += ["", _line(_TITLES), _line("---" for _ in _TITLES), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _row(gate: Gate, evidence: Evidence) -> list[str]:
    path, found = next(((path, one) for path, one in evidence.items() if one["gpus"] == 0), ("", None))
    state = "not run" if found is None else _state(found, gate.id, gate.digest)
    ranks = " and ".join(map(str, gate.ranks))
    place = f"CPU, {ranks} ranks" if ranks else "CPU"
    link = _link(path) if "passed" in state or "failed" in state else "-"
    return [gate.id, gate.claim, f"`make gate ONLY={gate.id}`", gate.threshold, link, place, state]


def _hardware_row(gate: HardwareGate, evidence: Evidence) -> list[str]:
    by_gpus = {one["gpus"]: (path, one) for path, one in evidence.items()}
    links, states = [], []
    for gpus in gate.gpus:
        path, found = by_gpus.get(gpus, ("", {"gates": {}}))
        if gate.id in found["gates"]:
            links.append(_link(path))
            states.append(f"{gpus}: {_state(found, gate.id, gate.digest)}")
    place = f"{', '.join(map(str, gate.gpus))} GPUs"
    state = "; ".join(states) or "not run on hardware"
    command = f"`make gate GPUS={'`, `GPUS='.join(map(str, gate.gpus))}`"
    return [gate.id, gate.claim, command, gate.threshold, ", ".join(links) or "-", place, state]


def _state(found: Mapping[str, Any], name: str, digest: str) -> str:
    gate = found["gates"].get(name)
    if gate is None:
        return "not run since it was added"
    if gate["digest"] != digest:
        return "not run since it was changed"
    return f"{gate['verdict']} at `{found['commit'][:12]}`"


def _link(path: str) -> str:
    return f"[json]({path})"


def _split(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(_BEGIN)
    between, end, after = rest.partition(_END)
    if not begin or not end:
        raise GateError(f"{PAGE}: has no lines {_BEGIN!r} and {_END!r}, between which the table belongs")
    return before, between, after


def check(catalogue: Catalogue, root: Path = ROOT) -> None:
    """Refuses a page that says other things than the catalogue and the evidence it names.

    Raises:
        GateError: saying what to do.
    """
    text = (root / PAGE).read_text(encoding="utf-8")
    _, between, _ = _split(text)
    begin, end = _NAMED.split("{}")
    paths = [line[len(begin) : -len(end)] for line in between.splitlines() if line.startswith(begin)]
    lost = [path for path in paths if not (root / path).is_file()]
    if lost:
        raise GateError(f"{PAGE}: names evidence that is not there: {', '.join(lost)}")
    evidence = {path: json.loads((root / path).read_text(encoding="utf-8")) for path in paths}
    dirty = [path for path, found in evidence.items() if found["dirty"]]
    if dirty:
        raise GateError(f"{PAGE}: names evidence of trees that were no commit: {', '.join(dirty)}")
    if between.strip() != table(catalogue, evidence).strip():
        raise GateError(f"{PAGE}: its table is not what scripts/gates/gates.toml and its evidence say; make gate-page")


def update(catalogue: Catalogue, root: Path = ROOT) -> list[str]:
    """Writes the table anew from the newest evidence; returns the paths of that."""
    path = root / PAGE
    before, _, after = _split(path.read_text(encoding="utf-8"))
    evidence = newest(read_all(root))
    text = f"{before}{_BEGIN}\n{table(catalogue, evidence)}\n{_END}{after}"
    path.write_text(text, encoding="utf-8")
    return list(evidence)
