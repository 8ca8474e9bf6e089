"""The ways in which a rank fails, and what the others are told of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["DIFFERS", "KILLED", "KINDS", "RAISED", "STOPPED", "LocalError", "make_error"]


class LocalError(Exception):
    """One that cannot be pickled (its attribute), nor made anew in another process (its arguments)."""

    def __init__(self, one: object, *, two: object) -> None:
        super().__init__(f"{one} {two}")
        self.callback = lambda: one


def _of_dcp() -> BaseException:
    """What DCP raises, which is no Exception."""
    return CheckpointException("of dcp", {})


_MADE: Mapping[str, tuple[Callable[[], BaseException], str]] = {
    "raises": (lambda: ValueError("on purpose"), "ValueError: on purpose"),
    "cannot be pickled": (lambda: LocalError("one", two="two"), "LocalError: one two"),
    "no Exception": (_of_dcp, "CheckpointException: CheckpointException ranks:dict_keys([])"),
    "interrupted": (KeyboardInterrupt, "KeyboardInterrupt"),
}

DIFFERS = "differs"
KILLED = "killed"
STOPPED = "stopped"

RAISED: Mapping[str, str] = {kind: text for kind, (_, text) in _MADE.items()}
"""Kinds that are exceptions -> what the other ranks are told."""

KINDS: Mapping[str, str] = {
    "raises": "an ordinary exception",
    "cannot be pickled": "an exception that can be neither pickled nor rebuilt",
    "no Exception": "`CheckpointException`, a `BaseException`",
    "interrupted": "`KeyboardInterrupt`, which its own rank raises at once",
    DIFFERS: "the rank is well, and does or holds something else than the others",
    KILLED: "SIGKILL",
    STOPPED: "SIGSTOP past the deadline of 2 s, then SIGCONT",
}
"""All kinds, with what they are."""


def make_error(kind: str) -> BaseException:
    """A new exception of a kind of ``RAISED``."""
    return _MADE[kind][0]()
