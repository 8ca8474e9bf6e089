"""How an operation is broken on one rank: through what a user's code may do, else at a seam of torch or shardopt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import shardopt
from benchmarks.soaking.episode import Fault
from shardopt.checkpoint.files import Writer
from shardopt.checkpoint.target import Targets
from tests.faults.breaking import replaced
from tests.faults.kinds import make_error

if TYPE_CHECKING:
    from benchmarks.soaking.leg import LegRun

__all__ = ["KILLS", "broken_load", "broken_prepare", "broken_save", "broken_step", "killed_at"]

Act = Callable[[], None]

_OPTIMIZER = sys.modules["shardopt.optimizer"]


def _raising(fault: Fault) -> Act:
    def fail() -> None:
        raise make_error(fault.kind)

    return fail


@contextlib.contextmanager
def _hooked(register: Callable[..., Any], act: Act) -> Iterator[None]:
    handle = register(lambda *_: act())
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _on(fault: Fault, breaks: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    return breaks() if dist.get_rank() == fault.rank else contextlib.nullcontext()


def broken_step(run: LegRun, fault: Fault, options: dict[str, Any]) -> AbstractContextManager[None]:
    """Inside, a step fails on the fault's rank; ``options`` gets what the step is to be called with."""
    act = _raising(fault)
    bad = dist.get_rank() == fault.rank
    if fault.where == "closure":
        options["closure"] = act if bad else lambda: 0.0
        return contextlib.nullcontext()
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "pre-hook": lambda: _hooked(run.optimizer.register_step_pre_hook, act),
        "inner pre-hook": lambda: _hooked(run.optimizer.optimizers[-1].register_step_pre_hook, act),
        "plain gradient": lambda: _plain_gradient(run),
        "another group": lambda: _another_group(run),
    }
    return _on(fault, ways[fault.where])


def _sharded(run: LegRun) -> torch.Tensor:
    return next(
        param for param in run.training.params.values() if isinstance(param, DTensor) and param.grad is not None
    )


@contextlib.contextmanager
def _plain_gradient(run: LegRun) -> Iterator[None]:
    param = _sharded(run)
    param.grad = torch.zeros(param.shape, dtype=param.dtype)
    yield


@contextlib.contextmanager
def _another_group(run: LegRun) -> Iterator[None]:
    params = run.optimizer.optimizers[0].param_groups[0]["params"]
    last = params.pop()
    try:
        yield
    finally:
        params.append(last)


def broken_save(run: LegRun, fault: Fault) -> AbstractContextManager[None]:
    """Inside, a save fails on the fault's rank."""
    act = _raising(fault)
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "state_dict": lambda: _attribute(run.extra, "saving", act),
        "write": lambda: replaced(Writer, "write_data", act),
        "plan": lambda: replaced(dcp.DefaultSavePlanner, "create_global_plan", act),
        "arguments": lambda: _attribute(run, "target", f"{run.target}-elsewhere"),
        "optimizer": lambda: _hooked(run.optimizer.register_state_dict_pre_hook, act),
        # Of dcp.save.
        "save": lambda: _hooked(run.optimizer.register_state_dict_pre_hook, act),
    }
    return _on(fault, ways[fault.where])


def broken_load(run: LegRun, fault: Fault) -> AbstractContextManager[None]:
    """Inside, a load fails on the fault's rank."""
    act = _raising(fault)
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "state_dict": lambda: _attribute(run.extra, "saving", act),
        "open": lambda: replaced(dcp.FileSystemReader, "read_metadata", act),
        "read": lambda: replaced(Targets, "read", act),
        "arguments": lambda: _attribute(run, "source", f"{run.source}-elsewhere"),
        "commit": lambda: _attribute(run.extra, "loading", act),
        # Of dcp.load.
        "load": lambda: _hooked(run.optimizer.register_load_state_dict_pre_hook, act),
    }
    return _on(fault, ways[fault.where])


def broken_prepare(run: LegRun, fault: Fault, options: dict[str, Any]) -> AbstractContextManager[None]:
    """Inside, ``prepare_load`` fails on the fault's rank, or is called there with other ``options``."""
    if dist.get_rank() != fault.rank:
        return contextlib.nullcontext()
    if fault.where == "options":
        options["finite"] = "never"
    elif fault.where == "path":
        options["path"] = f"{run.source}-elsewhere"
    else:
        return replaced(_OPTIMIZER, "prepare", _raising(fault))
    return contextlib.nullcontext()


def killed_at(run: LegRun, where: str, act: Act) -> AbstractContextManager[None]:
    """Inside, ``act`` is called at a point of the operation, on this rank."""
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "step": lambda: _hooked(run.optimizer.register_step_pre_hook, act),
        "save collect": lambda: _attribute(run.extra, "saving", act),
        "save write": lambda: replaced(Writer, "write", act, after=True),
        "save finish": lambda: _before_the_last_vote(act),
    }
    return ways[where]()


def _before_the_last_vote(act: Act) -> AbstractContextManager[None]:
    from shardopt.scope import Scope

    genuine = Scope.vote

    def vote(self: Scope, operation: str, **options: Any) -> int:
        if operation == "save: finish":
            act()
        return genuine(self, operation, **options)

    return _attribute(Scope, "vote", vote)


def _save(run: LegRun, timeout_s: float) -> Callable[[], object]:
    return lambda: shardopt.save(run.state, run.target, timeout_s=timeout_s)


KILLS: dict[str, Callable[[LegRun, float], Callable[[], object]]] = {
    "step": lambda run, _: run.optimizer.step,
    "save collect": _save,
    "save write": _save,
    "save finish": _save,
}
"""Where a rank is killed -> the operation, from this rank's run and how long it may wait."""
