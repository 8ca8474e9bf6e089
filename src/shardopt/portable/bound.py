"""What a handle holds and must not take along when it is copied or pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Lease", "ThisProcessOnly"]


class ThisProcessOnly:
    """Holds an object that stagers must neither copy nor send to another process."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> ThisProcessOnly:
        return ThisProcessOnly()

    def __reduce__(self) -> tuple[type[ThisProcessOnly], tuple[Any, ...]]:
        return (ThisProcessOnly, ())


class Lease(ThisProcessOnly):
    """Holds a function that tells whether lent memory has changed since; a copy holds the answer of its own moment.

    A copy made in time is a snapshot for good; one made too late mixes values of two moments for good.
    """

    __slots__ = ("_over",)

    def __init__(self, changed: Callable[[], bool] | None = None, over: bool = False) -> None:
        super().__init__(changed)
        self._over = over

    def over(self) -> bool:
        """Whether the memory has changed since it was lent, or had when this copy was made."""
        return self._over or (self.value is not None and self.value())

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        return Lease(over=self.over())

    def __reduce__(self) -> tuple[type[ThisProcessOnly], tuple[Any, ...]]:
        return (Lease, (None, self.over()))
