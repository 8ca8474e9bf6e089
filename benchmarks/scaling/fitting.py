"""Linear models of measured numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Fit", "fitted"]

Point = tuple[tuple[float, ...], float | list[float]]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A sum of terms.

    Attributes:
        name: of what was measured.
        weights: of each term.
        off: the largest distance from a measured number, in parts of it.
    """

    name: str
    weights: tuple[float, ...]
    off: float

    def at(self, *terms: float) -> float:
        """The model's value."""
        return sum(weight * term for weight, term in zip(self.weights, terms, strict=True))

    @property
    def said(self) -> str:
        """The weights, in the order of the terms."""
        return " + ".join(f"{weight:.3g} {name}" for weight, name in zip(self.weights, self._names, strict=True))

    @property
    def _names(self) -> list[str]:
        return ["per item"] if len(self.weights) == 1 else ["", "a term", "a second term"][: len(self.weights)]


def fitted(name: str, points: Sequence[Point]) -> Fit:
    """The least squares of relative distances: small numbers count as much as large ones. Of samples, their median."""
    terms = np.array([one for one, _ in points])
    values = np.array([statistics.median(value) if isinstance(value, list) else value for _, value in points])
    weights, *_ = np.linalg.lstsq(terms / values[:, None], np.ones(len(values)), rcond=None)
    off = float(np.abs(terms @ weights / values - 1).max())
    return Fit(name=name, weights=tuple(map(float, weights)), off=off)
