"""Bars: a measured number, the threshold it must meet, and the table that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bar", "print_bars", "print_table"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One number that has to be at least, or at most, another.

    Attributes:
        name: what was measured.
        value: the measured number, in ``unit``.
        limit: the threshold, in ``unit``.
        at_least: whether ``value`` must not be below ``limit``; otherwise it must not be above it.
        unit: printed after both numbers.
    """

    name: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def passed(self) -> bool:
        """Whether the threshold is met."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def print_bars(bars: Sequence[Bar]) -> int:
    """Prints the table; returns the exit status: 0 when all bars pass, else 1."""
    rows = [
        [
            bar.name,
            f"{bar.value:.2f}{bar.unit}",
            f"{'>=' if bar.at_least else '<='} {bar.limit:g}{bar.unit}",
            "PASS" if bar.passed else "FAIL",
        ]
        for bar in bars
    ]
    print_table(["bar", "measured", "required", ""], rows)
    return 0 if all(bar.passed for bar in bars) else 1


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, its first column flush left and the others flush right."""
    widths = [max(len(line[column]) for line in [titles, *rows]) for column in range(len(titles))]
    rule = ["-" * width for width in widths]
    for line in [titles, rule, *rows]:
        first, *others = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join([first, *others]).rstrip())
    print(flush=True)
