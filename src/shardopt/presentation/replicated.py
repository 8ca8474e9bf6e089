"""``replicated``: every rank updates every parameter, whole, as an unsharded run does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shardopt.layouts.tracked import Keeping
from shardopt.presentation.whole import Shown, WholePresentation

__all__ = ["ReplicatedPresentation"]


class ReplicatedPresentation(WholePresentation):
    """Shows every rank all parameters. Right for rules that couple parameters, draw random numbers, or ask for more."""

    name: ClassVar[str] = "replicated"

    def targets(self, shown: Shown) -> Sequence[int]:
        """All ranks."""
        return () if shown.owner is None else range(self._scope.size)

    def keeping(self, shown: Shown) -> Keeping:
        """On every rank."""
        return Keeping.EVERYWHERE
