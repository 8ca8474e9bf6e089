"""What a load found: problems that refuse it, and notes on what it will do."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Report"]

_MOST_SHOWN = 20


@dataclass(slots=True)
class Report:
    """Findings of one rank.

    Attributes:
        problems: each refuses the load.
        notes: differences that are handled, one sentence each.
        restored: keys of the entries that will be put in place.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """All problems in one text, long lists cut with their count."""
        shown = self.problems[:_MOST_SHOWN]
        more = len(self.problems) - len(shown)
        lines = [f"  - {problem}" for problem in shown] + ([f"  - and {more} more"] if more else [])
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        return f"the optimizer's state cannot be loaded ({count}); nothing was changed:\n" + "\n".join(lines)

    def __str__(self) -> str:
        if self.problems:
            return self.summary()
        return "\n".join([f"{len(self.restored)} entries to restore", *(f"note: {note}" for note in self.notes)])
