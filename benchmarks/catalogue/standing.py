"""Where a class stands: the words and counts that the summary and the page are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.catalogue.judging import Verdict
from benchmarks.catalogue.survey import RESUMED_ON, Entry

__all__ = ["Counts", "bare_words", "bit_equal", "count", "is_refused", "resumed_words", "worst", "wrapped_words"]

_RUNS = ("run", *(f"resume {num_ranks}" for num_ranks in RESUMED_ON))
_EXACT = ("owner", "replicated")


def is_refused(entry: Entry) -> bool:
    """Whether the wrapper refused the class."""
    return entry.chosen is not None and entry.chosen.compute == "refused"


def worst(entry: Entry) -> float | None:
    """The largest difference of all wrapped runs, relative to a parameter's update; None if none could be compared."""
    found = [verdict.worst for verdict in entry.wrapped.values() if verdict.worst is not None]
    return max(found, default=None)


def bit_equal(entry: Entry) -> bool:
    """Whether all wrapped runs, resumed ones too, have the bits of the unsharded one."""
    return _passes(entry.wrapped) and all(verdict.same_bits for verdict in entry.wrapped.values())


def wrapped_words(entry: Entry) -> str:
    """What became of the wrapped runs: ``"ok"``, or the first that went wrong."""
    if is_refused(entry):
        return "refused"
    return _words(entry.wrapped)


def resumed_words(entry: Entry) -> str:
    """What became of the runs that were resumed, on 2, 4 and 1."""
    verdicts = [entry.wrapped.get(run) for run in _RUNS[1:]]
    return " / ".join("-" if verdict is None else verdict.kind for verdict in verdicts)


def bare_words(entry: Entry) -> str:
    """What became of the bare optimizer: ``"ok"``, or the first thing that went wrong."""
    return _words(entry.bare)


def _passes(verdicts: dict[str, Verdict]) -> bool:
    return verdicts.keys() == set(_RUNS) and all(verdict.kind == "ok" for verdict in verdicts.values())


def _words(verdicts: dict[str, Verdict]) -> str:
    for run in _RUNS:
        verdict = verdicts.get(run)
        if verdict is None:
            return "not run"
        if verdict.kind == "ok":
            continue
        where = "" if run == "run" else f" when resumed on {run.removeprefix('resume ')}"
        if verdict.kind == "cannot be loaded":
            where = where.replace("when resumed on", "on")
        size = f" by {verdict.worst:.0e}" if verdict.kind == "differs" and verdict.worst is not None else ""
        return f"{verdict.kind}{size}{where}"
    return "ok"


@dataclass(kw_only=True)
class Counts:
    """The catalogue in numbers; the lists are names.

    Attributes:
        unsharded: classes that run unsharded.
        not_unsharded: classes that do not.
        by_compute: of those that are wrapped, how many have which presentation.
        refused: classes that the wrapper refuses and the table of protocols says it has to.
        refused_too: classes that it refuses all the same.
        not_refused: classes that it should refuse and does not.
        failing: wrapped classes of which a run is not within the bound of the unsharded one.
        inexact: of ``owner`` and ``replicated`` those whose bits differ from the unsharded run's.
        resumed_otherwise: classes whose run resumed on 2 ranks ended with other bits than the one that went on.
        bare_ok: classes that survive all of it without the wrapper.
        bare_words: what became of the others, by its first word.
    """

    unsharded: int = 0
    not_unsharded: list[str] = field(default_factory=list)
    by_compute: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    refused_too: list[str] = field(default_factory=list)
    not_refused: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    resumed_otherwise: list[str] = field(default_factory=list)
    bare_ok: int = 0
    bare_words: Counter[str] = field(default_factory=Counter)


def count(entries: Sequence[Entry]) -> Counts:
    """Counts the entries."""
    counts = Counts()
    for entry in entries:
        if entry.unsharded:
            counts.not_unsharded.append(entry.name)
        else:
            counts.unsharded += 1
            words = bare_words(entry)
            counts.bare_ok += words == "ok"
            if entry.bare and words != "ok":
                counts.bare_words[words.partition(" by ")[0].partition(" when ")[0].partition(" on ")[0]] += 1
        _count_wrapped(entry, counts)
    return counts


def _count_wrapped(entry: Entry, counts: Counts) -> None:
    if entry.refused:
        (counts.refused if is_refused(entry) else counts.not_refused).append(entry.name)
    elif is_refused(entry):
        counts.refused_too.append(entry.name)
    elif not entry.unsharded:
        compute = entry.chosen.compute if entry.chosen else "not wrapped"
        counts.by_compute[compute] += 1
        if not _passes(entry.wrapped):
            counts.failing.append(entry.name)
        elif not entry.resumed_bits:
            counts.resumed_otherwise.append(entry.name)
        if compute in _EXACT and not bit_equal(entry):
            counts.inexact.append(entry.name)
