"""Errors of shardopt: one family, each naming what, where, got, expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

__all__ = [
    "FormatError",
    "LoadError",
    "NamingError",
    "PlacementError",
    "PresentationError",
    "RankFailureError",
    "ScopeError",
    "ShardoptError",
    "StaleLoadError",
]


class ShardoptError(Exception):
    """Base of every error shardopt raises about state, format, ranks or names."""


class NamingError(ShardoptError):
    """A parameter has no name, or two parameters have one."""


class PlacementError(ShardoptError):
    """A state entry has no known place in its parameter's global coordinates."""


class PresentationError(ShardoptError):
    """The optimizer's rule cannot be run in the asked (or any known) presentation."""


class ScopeError(ShardoptError):
    """The set of ranks that hold the optimizer's parameters cannot be made."""


class FormatError(ShardoptError):
    """Bytes that are not a shardopt checkpoint of a known format version."""


class StaleLoadError(ShardoptError):
    """The optimizer moved between ``prepare_load`` and ``commit``; nothing was changed."""


class LoadError(ShardoptError):
    """A load was refused before anything changed.

    Attributes:
        problems: every problem this rank found, one sentence each.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems)


class RankFailureError(ShardoptError):
    """Raised on every rank of a scope when any of them failed, is missing, or disagrees.

    Attributes:
        operation: what was being voted on, e.g. ``"step"``.
        failures: global rank -> short text of what went wrong there.
        missing: global ranks that did not arrive before the deadline.
        disagree: digest in hex -> the global ranks that hold it; empty when all agree.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str,
        failures: Mapping[int, str] | None = None,
        missing: Sequence[int] = (),
        disagree: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(message)
        self.operation: str = operation
        self.failures: dict[int, str] = dict(failures or {})
        self.missing: tuple[int, ...] = tuple(missing)
        self.disagree: dict[str, tuple[int, ...]] = {d: tuple(r) for d, r in (disagree or {}).items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """For launchers that send a worker's error to another process: exceptions are remade from ``args`` alone."""
        return partial(type(self), operation=self.operation), self.args, self.__dict__
