"""The rows of the fault table: operations, and where each of them can fail on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults.kinds import DIFFERS, KILLED, KINDS, STOPPED

__all__ = ["POINTS", "Point"]

_NOT_COMPARED = "nothing that ranks compare is known there"
_OWN_VALUE = "a value of the caller's, which raises one thing"
_TORCHS = "torch's own code: its ranks wait for ever, or see a closed socket (`failure-model.md`)"
_AFTER = "what follows is no part of the operation: state is complete on all ranks, and only this rank raises"
_ONE_RANK = "one rank's work; the others have nothing to differ in"


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where an operation fails.

    Attributes:
        operation: which one.
        name: of the point.
        fails: what fails there, for the page.
        voted_as: what the error calls the operation.
        own: what the rank itself raises: the verdict, with the original exception as its ``cause``, that exception
            ``itself``, or one of a class; ``torch`` where all ranks raise torch's own, ``skip`` and ``agree`` where
            none raises.
        half_written: whether it comes after the operation's first write.
        votes_after: whether such a failure is voted on too, so that all ranks hear of it at once.
        first_only: whether only the first rank gets there.
        same_wait: the point of the same operation at which ranks are killed and stopped in its place: the others wait
            in the same vote.
        absent: kind -> why there is no such cell.
    """

    operation: str
    name: str
    fails: str
    voted_as: str
    own: str = "cause"
    half_written: bool = False
    votes_after: bool = False
    first_only: bool = False
    same_wait: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)


def _only(*kinds: str, why: str) -> Mapping[str, str]:
    """No other kinds than these."""
    return {kind: why for kind in KINDS if kind not in kinds}


_FAILS = {DIFFERS: _NOT_COMPARED}
_VALUE = _only("raises", why=_OWN_VALUE)
_VALUES = _only("raises", DIFFERS, why=_OWN_VALUE)
_ALL: Mapping[str, str] = {}
_DIFFERENCE = _only(DIFFERS, why="it is a difference, not a failure")
_ONE = {DIFFERS: _ONE_RANK}
_AS_STEP = {kind: "the others wait as in `step`" for kind in (KILLED, STOPPED)}
_AS_SAVE = {kind: "the others wait as in `save`" for kind in (KILLED, STOPPED)}
_SIGNALS = {kind: "the others wait as in `prepare_load`" for kind in (KILLED, STOPPED)}


def _at(
    operation: str, name: str, voted_as: str, absent: Mapping[str, str], fails: str, wait: str = "", **more: Any
) -> Point:
    return Point(operation=operation, name=name, voted_as=voted_as, absent=absent, fails=fails, same_wait=wait, **more)


POINTS: tuple[Point, ...] = (
    _at(
        "construct",
        "options",
        "construct",
        _VALUES,
        "`vote_timeout=-1`, on one rank; or another `consensus=`",
        own="ValueError",
    ),
    _at("construct", "naming", "construct", _FAILS, "the model's `named_modules()`", own="itself"),
    _at(
        "construct",
        "state",
        "construct",
        _VALUE,
        "state the optimizer has already, and which has no known place",
        own="PlacementError",
    ),
    _at("construct", "check", "construct", _FAILS, "the check of what is wrapped together", "naming", own="itself"),
    _at(
        "add_param_group",
        "naming",
        "add_param_group",
        _ALL,
        "the model's `named_modules()`; or another parameter is added",
    ),
    _at(
        "add_param_group",
        "inner",
        "add_param_group",
        _FAILS,
        "the wrapped optimizer's `add_param_group`, when the group is in",
        "naming",
    ),
    _at("add_param_group", "state", "add_param_group", _VALUE, "state that is there already, and has no known place"),
    _at("step", "wrapper's pre-hook", "step", _FAILS, "`register_step_pre_hook` of the wrapper", "closure"),
    _at("step", "inner pre-hook", "step", _FAILS, "`register_step_pre_hook` of the wrapped optimizer", "closure"),
    _at("step", "closure", "step", _FAILS, "the closure"),
    _at("step", "gradients", "step", _VALUES, "a gradient that is no DTensor; or one that is placed otherwise"),
    _at("step", "preflight", "step", _FAILS, "the checks of groups, parameters and gradients", "closure"),
    _at("step", "half", "step", _VALUE, "a float16 gradient under GradScaler"),
    _at(
        "step",
        "overflow",
        "step",
        _DIFFERENCE,
        "`found_inf` of torch's own GradScaler",
    ),
    _at("step", "update", "step", _FAILS, "the wrapped optimizer, between two groups", own="itself", half_written=True),
    _at("step", "post-hook", "step", _FAILS, "a hook after the update", "update", own="itself", half_written=True),
    _at(
        "first step",
        "presence",
        "gradients",
        _only(KILLED, STOPPED, why="no code of a user's runs there"),
        "the rank, between the vote and the comparison of gradients",
    ),
    _at("first step", "missing", "", _DIFFERENCE, "a gradient that is missing", own="agree"),
    _at("unscale", "gradients", "unscale", _FAILS, "looking through the gradients"),
    _at("unscale", "half", "unscale", _VALUE, "a float16 gradient"),
    _at("scaled step", "pre-hook", "step", _FAILS | _AS_STEP, "a hook of the wrapped optimizer, on unscaled gradients"),
    _at("scaled step", "overflow", "", _DIFFERENCE, "a gradient that has overflowed", own="skip"),
    _at("state_dict", "pre-hook", "state_dict", _ALL, "`register_state_dict_pre_hook`; or a group has another value"),
    _at("state_dict", "export", "state_dict", _FAILS, "describing the state", "pre-hook"),
    _at("state_dict", "post-hook", "state_dict", _FAILS, "`register_state_dict_post_hook`", "pre-hook"),
    _at("prepare_load", "options", "prepare_load", _VALUES, "`finite='never'`; or another `strict=`"),
    _at("prepare_load", "reading", "prepare_load", _FAILS, "reading the checkpoint"),
    _at(
        "prepare_load",
        "no directory",
        "prepare_load",
        _VALUE,
        "the checkpoint is not there, for one rank",
        own="LoadError",
    ),
    _at("prepare_load", "another", "prepare_load", _DIFFERENCE, "one rank reads another save of the same state"),
    _at("prepare_load", "checking", "prepare_load", _FAILS, "checking what was read", "reading"),
    _at("prepare_load of a dict", "checking", "prepare_load", _FAILS | _SIGNALS, "checking what is in the dict"),
    _at("commit", "check", "commit", _FAILS, "the look whether the optimizer has moved", own="itself"),
    _at("commit", "moved", "commit", _VALUE, "the optimizer has moved since, on one rank", own="StaleLoadError"),
    _at("commit", "copy", "step", _FAILS, "copying, when some of it is in place", own="itself", half_written=True),
    _at("save", "arguments", "save: keys", _VALUES, "a key that is no string; or another path", own="TypeError"),
    _at("save", "path", "save: keys", _FAILS, "the path's `__fspath__()`", own="itself"),
    _at("save", "collect", "save: collect", _FAILS, "a user's `state_dict()`", "optimizer"),
    _at(
        "save",
        "optimizer",
        "state_dict",
        _ALL,
        "a hook of the optimizer's `state_dict()`; or a group has another value",
    ),
    _at("save", "local plan", "save: collect", _FAILS, "`create_local_plan`"),
    _at("save", "value", "save: collect", _VALUE, "a value that no load could put back"),
    _at("save", "plan", "save: plan", _ONE, "`create_global_plan`", first_only=True),
    _at("save", "write", "save: write", _FAILS, "`write_data`"),
    _at("save", "finish", "save: finish", _ONE, "publishing the metadata", first_only=True),
    _at("load", "arguments", "load: keys", _VALUES, "`finite='never'`; or another `strict=`", own="ValueError"),
    _at("load", "path", "load: keys", _FAILS | _AS_SAVE, "the path's `__fspath__()`", own="itself"),
    _at("load", "dict", "load: keys", _VALUE, "a key that is no string", own="TypeError"),
    _at("load", "plan", "load: plan", _ALL, "a user's `state_dict()`; or the rank sees another checkpoint"),
    _at("load", "open", "load: plan", _FAILS, "`read_metadata`", "plan", own="LoadError or cause"),
    _at("load", "read", "load: read", _FAILS, "reading and checking"),
    _at("load", "optimizer", "load: read", _FAILS, "preparing the optimizer's part: a hook before its load", "read"),
    _at(
        "load",
        "commit",
        "load: commit",
        _FAILS,
        "a user's `load_state_dict()`, when some of it is in place",
        half_written=True,
        votes_after=True,
    ),
    _at("dcp.save", "optimizer", "state_dict", _FAILS, "a hook of the optimizer's `state_dict()`"),
    _at("dcp.save", "write", "torch", _only("raises", why=_TORCHS), "torch's writer", own="torch"),
    _at("dcp.load", "optimizer", "state_dict", _FAILS, "a hook of the optimizer's `state_dict()`", "load hook"),
    _at("dcp.load", "read", "torch", _only("raises", why=_TORCHS), "torch's reader", own="torch"),
    _at("dcp.load", "load hook", "prepare_load", _FAILS, "a hook before the optimizer's `load_state_dict()`"),
    _at("dcp.load", "load post-hook", "", _only(why=_AFTER), "a hook after it"),
)
