"""The page users look their optimizer up in, and the results it is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.catalogue.jobs import NUM_STEPS, SAVED_AFTER, Chosen
from benchmarks.catalogue.judging import BOUND, Verdict
from benchmarks.catalogue.standing import (
    Counts,
    bare_words,
    bit_equal,
    count,
    is_refused,
    resumed_words,
    worst,
    wrapped_words,
)
from benchmarks.catalogue.survey import Entry

__all__ = ["markdown", "read_results", "samples"]


def samples(entries: Sequence[Entry]) -> dict[str, Any]:
    """Entries by name, as JSON takes them."""
    return {entry.name: {key: value for key, value in asdict(entry).items() if key != "name"} for entry in entries}


def read_results(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """The last run in a file of results: its line, and its entries."""
    line: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return line, [_entry(name, values) for name, values in line["samples"].items()]


def _entry(name: str, values: Mapping[str, Any]) -> Entry:
    chosen = values["chosen"]
    return Entry(
        **{
            **values,
            "name": name,
            "chosen": None if chosen is None else Chosen(**chosen),
            "wrapped": {run: Verdict(**verdict) for run, verdict in values["wrapped"].items()},
            "bare": {run: Verdict(**verdict) for run, verdict in values["bare"].items()},
        }
    )


def markdown(entries: Sequence[Entry], line: Mapping[str, Any]) -> str:
    """The page.

    Args:
        entries: of all classes.
        line: what was recorded of the run: conditions and versions.
    """
    counts = count(entries)
    wrapped = [entry for entry in entries if not entry.unsharded and not is_refused(entry)]
    refused = [entry for entry in entries if is_refused(entry)]
    parts = [
        "# Optimizers",
        _introduction(counts, line),
        _legend(),
        _table(
            ["optimizer", "`compute`", "worst difference", "bits", "resumed on 2 / 4 / 1", "plain FSDP2"],
            [_row(entry) for entry in wrapped],
        ),
        _weakest(wrapped),
    ]
    if refused:
        parts += ["## Refused", _table(["optimizer", "why", "plain FSDP2"], [_refused_row(entry) for entry in refused])]
    left = [entry for entry in entries if entry.unsharded and not is_refused(entry)]
    if left:
        rows = [[_name(entry), _cell(entry.unsharded)] for entry in left]
        parts += [
            "## Not run",
            "These do not train the two models unsharded either.",
            _table(["optimizer", "why"], rows),
        ]
    return "\n\n".join(parts) + "\n"


def _introduction(counts: Counts, line: Mapping[str, Any]) -> str:
    wrapped = sum(counts.by_compute.values())
    by_compute = ", ".join(f"{number} `{compute}`" for compute, number in sorted(counts.by_compute.items()))
    bare = ", ".join(f"{number} {words}" for words, number in sorted(counts.bare_words.items()))
    passing = wrapped - len(counts.failing)
    return "\n".join(
        [
            f"`python benchmarks/catalog.py` wrote this page: torch {line['torch']}, pytorch_optimizer "
            f"{line['config']['pytorch_optimizer']}, gloo, commit {line['sha']}, {line['time'][:10]}.",
            "",
            f"* {counts.unsharded} classes of `torch.optim` and `pytorch_optimizer` run unsharded.",
            f"* Wrapped in `ShardedStateOptimizer`, {passing} of {wrapped} survive all that is tried here "
            f"({by_compute}); {len(counts.refused) + len(counts.refused_too)} are refused.",
            f"* With plain FSDP2, {counts.bare_ok} of {counts.unsharded} do{': ' + bare if bare else ''}.",
        ]
    )


def _legend() -> str:
    return "\n".join(
        [
            f"Each trains two models for {NUM_STEPS} steps on 2 ranks in float32, one with a matrix of 160 x 192 and a "
            "vector of 5,001 elements, one with a convolution, an embedding, a norm",
            f"and biases; it is saved after {SAVED_AFTER} steps with `dcp.save`, and resumed on 2, 4 and 1 ranks with "
            "`dcp.load` into a fresh model and a fresh optimizer. Gradients are",
            "the unsharded run's, bit for bit, at the same weights.",
            "",
            '* `compute`: what `compute="auto"` chose; or what has to be asked for, where that can try nothing.',
            "* worst difference: of any weight from the unsharded run's at the end, in any of the four runs, in parts "
            f"of the norm of its parameter's whole update; `ok` is at most {BOUND:.0e}.",
            "* bits: `same` where all four runs end with the unsharded run's bits; else only up to rounding.",
            "* plain FSDP2: the bare optimizer on DTensors in the same runs, its state through torch's "
            "`get_state_dict` and `set_state_dict`.",
        ]
    )


def _row(entry: Entry) -> list[str]:
    off = worst(entry)
    words = wrapped_words(entry)
    first = "" if words == "ok" or "resumed" in words or " on " in words else f" ({words})"
    return [
        _name(entry),
        _compute(entry),
        ("-" if off is None else "0" if off == 0 else f"{off:.0e}") + first,
        "same" if bit_equal(entry) else "rounding" if words == "ok" else "-",
        resumed_words(entry),
        bare_words(entry),
    ]


def _compute(entry: Entry) -> str:
    if entry.chosen is None:
        return "-"
    return entry.chosen.compute if entry.chosen.asked == "auto" else f"{entry.chosen.compute}, asked for"


def _refused_row(entry: Entry) -> list[str]:
    reason = entry.refused or (entry.chosen.reason if entry.chosen else "")
    return [_name(entry), _cell(reason), bare_words(entry) if entry.bare else "not run"]


def _weakest(wrapped: Sequence[Entry]) -> str:
    """The least that the table promises of a class that passes."""
    inexact = [entry for entry in wrapped if wrapped_words(entry) == "ok" and not bit_equal(entry)]
    if not inexact:
        return "Every class that passes ends with the unsharded run's bits."
    last = max(inexact, key=lambda entry: worst(entry) or 0.0)
    others = ", ".join(_name(entry) for entry in inexact)
    return (
        f"The weakest guarantee here is that of {_name(last)}: within {worst(last):.0e} of its update. Equal up to "
        f"rounding, not in bits: {others}."
    )


def _name(entry: Entry) -> str:
    library, _, name = entry.name.rpartition(".")
    return f"`{name}`" if library == "pytorch_optimizer" else f"`{entry.name}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
