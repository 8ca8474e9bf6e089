"""What a load found: problems that refuse it, and notes on what it will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Report", "say_names"]

_MOST_SHOWN = 20
_EXAMPLES = 3
_OPTIONS = ("strict", "fresh", "hyperparameters", "dtype", "finite")


@dataclass(slots=True)
class Report:
    """Findings of one rank.

    Attributes:
        problems: each refuses the load.
        notes: differences that are handled, one sentence each.
        restored: keys of the entries that will be put in place.
        missing: FQNs of this optimizer that the checkpoint does not have; they keep the state they have.
        unused: FQNs of the checkpoint that this optimizer does not have; their state is not loaded.
        fresh: FQNs that start anew.
        requantised: parameters whose quantised state comes as exact values and is quantised once more, by why.
        converted: parameters whose state is kept as plain numbers here and was not when it was saved, by what it was.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    requantised: dict[str, list[str]] = field(default_factory=dict)
    converted: dict[str, list[str]] = field(default_factory=dict)

    def requantise(self, fqn: str, entry: str, why: str) -> None:
        """Notes an entry whose codes are not those that were saved."""
        self.requantised.setdefault(f"{entry!r} {why}", []).append(fqn)

    def convert(self, fqn: str, entry: str, what: str) -> None:
        """Notes an entry that is kept as numbers of another kind than it was saved as."""
        self.converted.setdefault(f"{entry!r} {what}", []).append(fqn)

    def summary(self) -> str:
        """All problems in one text, long lists cut with their count."""
        shown = self.problems[:_MOST_SHOWN]
        more = len(self.problems) - len(shown)
        lines = [f"  - {problem}" for problem in shown] + ([f"  - and {more} more"] if more else [])
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        if any(f"{option}=" in problem for problem in self.problems for option in _OPTIONS):
            lines.append("Options are those of optimizer.prepare_load(path, ...).commit(); dcp.load has none.")
        return f"the optimizer's state cannot be loaded ({count}); the optimizer was not changed:\n" + "\n".join(lines)

    def __str__(self) -> str:
        if self.problems:
            return self.summary()
        lines = [f"{len(self.restored)} entries to restore on this rank"]
        lines += [
            f"{what} ({len(fqns)}): {say_names(fqns)}"
            for fqns, what in (
                (self.missing, "not in the checkpoint, keeping the state they have"),
                (self.unused, "in the checkpoint, and not in this optimizer"),
                (self.fresh, "starting anew"),
            )
            if fqns
        ]
        lines += [
            f"state {why}, so that it is quantised anew from its exact values ({len(fqns)}): {say_names(fqns)}"
            for why, fqns in self.requantised.items()
        ]
        lines += [f"state {what} ({len(fqns)}): {say_names(fqns)}" for what, fqns in self.converted.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def say_names(names: Sequence[str]) -> str:
    """Names for a sentence; more than 20 are grouped by pattern, each with its count and three examples."""
    if len(names) <= _MOST_SHOWN:
        return ", ".join(names)
    groups: dict[str, list[str]] = {}
    for name in names:
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        groups.setdefault(pattern, []).append(name)
    said = [
        members[0]
        if len(members) == 1
        else f"{pattern} ({len(members)}: {', '.join(members[:_EXAMPLES])}{', ...' * (len(members) > _EXAMPLES)})"
        for pattern, members in groups.items()
    ]
    more = len(said) - _MOST_SHOWN
    return "; ".join(said[:_MOST_SHOWN] + ([f"and {more} more patterns"] if more > 0 else []))
