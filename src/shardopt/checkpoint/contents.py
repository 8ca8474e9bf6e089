"""What a dict for a checkpoint holds: states asked for in one order on all ranks, flattened as DCP does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from shardopt.checkpoint.participants import ranks_holding
from shardopt.errors import RankFailureError
from shardopt.optimizer import ShardedStateOptimizer
from shardopt.scope import Scope

__all__ = ["check_state", "checked_path", "collect", "kinds_of", "usable"]

# How long ranks wait for one whose own time-out is no number of seconds.
_DEFAULT_TIMEOUT_S = 600.0


def check_state(state: object) -> None:
    """Checks what a save or load was given.

    Raises:
        TypeError: it is no dict, or a key is no string, or an optimizer of sharded parameters is not wrapped.
        ValueError: something that has a state is in it twice.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state is a {type(state).__name__}; expected the dict of dcp.save, {{'model': model, ...}}.")
    wrong = [key for key in state if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"keys of the dict must be strings, not {wrong[:5]!r}.")
    key_of: dict[int, str] = {}
    for key, value in state.items():
        if _has_state(value) and key_of.setdefault(id(value), key) != key:
            raise ValueError(
                f"{key_of[id(value)]!r} and {key!r} are the same {type(value).__name__}; keep one of them."
            )
        if _is_bare_and_sharded(value):
            raise TypeError(
                f"{key!r} is a {type(value).__name__} of sharded parameters, without its wrapper. Torch saves its "
                "state by position, and a new one has no state to load into. Put the ShardedStateOptimizer around it "
                "into the dict."
            )


def kinds_of(state: Mapping[str, Any], scope: Scope) -> dict[str, str]:
    """What must be the same on all ranks of the dict, in words: its keys, and the classes of what has a state.

    Not keys whose tensors are on some of the ranks only: the others need not have them.
    """
    return {
        f"key {key!r}": type(value).__qualname__ if _has_state(value) else "a value"
        for key, value in state.items()
        if set(ranks_holding(value)) in (set(), set(scope.ranks))
    }


def _has_state(value: object) -> bool:
    return isinstance(value, Stateful)


def _is_bare_and_sharded(value: object) -> bool:
    while isinstance(value, torch.optim.Optimizer) and not isinstance(value, ShardedStateOptimizer):
        # Trainers have optimizers of their own, which hand on to the one that they were given.
        within = getattr(value, "optimizer", None)
        if not isinstance(within, torch.optim.Optimizer):
            return any(isinstance(param, DTensor) for group in value.param_groups for param in group["params"])
        value = within
    return False


def checked_path(path: str | os.PathLike[str], timeout_s: float) -> str:
    """The path as text.

    Raises:
        TypeError, ValueError: it is no path of a file system, or the time is not positive.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path {path!r} must be a str or a Path.")
    if "://" in text:
        raise ValueError(f"path {text!r} is not in a file system; only directories are supported.")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s!r} must be a positive number of seconds.")
    return text


def usable(timeout_s: float) -> float:
    """The time, or another where ``checked_path`` refuses it: its rank has to tell the others."""
    return timeout_s if isinstance(timeout_s, (int, float)) and timeout_s > 0 else _DEFAULT_TIMEOUT_S


def collect(state: Mapping[str, Any], ask: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Asks for every state, in the order of sorted keys: asking may be collective.

    One that raises does not end it, or this rank would keep the others waiting in the next one. Of several exceptions
    an interrupt is raised, else a verdict that has waited for ranks in vain, else the first.

    Args:
        state: the dict.
        ask: gives the state of what has one; called with the key and the object.
    """
    found: dict[str, Any] = {}
    failures: list[BaseException] = []
    for key in sorted(state):
        value = state[key]
        try:
            found[key] = ask(key, value) if _has_state(value) else value
        except BaseException as error:
            failures.append(error)
            if isinstance(error, RankFailureError) and error.missing:
                break
    if failures:
        raise min(failures, key=_urgency)
    return found


def _urgency(failure: BaseException) -> int:
    if isinstance(failure, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return 0
    return 1 if isinstance(failure, RankFailureError) and failure.missing else 2
