"""``owner``: each parameter is updated whole, by the one rank that keeps its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shardopt.layouts.tracked import Keeping
from shardopt.presentation.shown import Shown
from shardopt.presentation.whole import WholePresentation

__all__ = ["OwnerPresentation"]


class OwnerPresentation(WholePresentation):
    """Shows a rank the parameters it owns, whole, and none of the others. Right for rules that update each alone."""

    name: ClassVar[str] = "owner"

    def targets(self, shown: Shown) -> Sequence[int]:
        """The owner."""
        return () if shown.owner is None else (shown.owner,)

    def keeping(self, shown: Shown) -> Keeping:
        """On the owner alone."""
        return Keeping.HERE if shown.owner == self._scope.index else Keeping.ELSEWHERE
