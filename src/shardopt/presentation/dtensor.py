"""``dtensor``: the inner optimizer sees the DTensors themselves, with torch's dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from shardopt.layouts.tracked import Tracked
from shardopt.presentation.presentation import Presentation, Ready

__all__ = ["DTensorPresentation"]


class DTensorPresentation(Presentation):
    """Shows the user's parameters as they are. Right for rules written for DTensors."""

    name: ClassVar[str] = "dtensor"

    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Nothing to check: the state is shown as it is."""

    def preflight(self) -> Ready:
        """Checks the groups only; torch's dispatch redistributes gradients itself."""
        self.check_groups()
        return Ready()

    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Runs the inner update on the DTensors."""
        return self._run(closure, amp)

    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """``local`` as a DTensor placed like the parameter."""
        return tracked.as_param(local)
