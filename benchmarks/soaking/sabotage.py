"""Mutants of shardopt, each of which the soak must find: they prove that it can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardopt
from shardopt.portable.handles import BoxHandle
from shardopt.scope import Scope
from shardopt.staging.offer import Offers
from shardopt.staging.plan import ParameterPlan
from shardopt.staging.prepare import Plan

__all__ = ["SABOTAGE", "Sabotage", "sabotaged"]


@contextlib.contextmanager
def _patched(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    genuine = getattr(owner, name)
    setattr(owner, name, make(genuine))
    try:
        yield
    finally:
        setattr(owner, name, genuine)


def _after_commit(change: Callable[[dict[str, Any]], None]) -> AbstractContextManager[None]:
    """Every load changes a parameter's state once more."""

    def make(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def commit(self: ParameterPlan) -> None:
            genuine(self)
            entries = self.state.get(self.param)
            if entries:
                change(entries)

        return commit

    return _patched(ParameterPlan, "commit", make)


def _drop_an_entry(entries: dict[str, Any]) -> None:
    del entries[next(reversed(entries))]


def _set_back_a_step(entries: dict[str, Any]) -> None:
    step = entries.get("step")
    if isinstance(step, Tensor):
        step -= 1
    elif step is not None:
        entries["step"] = step - 1


def _widen(entries: dict[str, Any]) -> None:
    for name, value in entries.items():
        if type(value) is Tensor and value.dim() and value.is_floating_point():
            entries[name] = value.double()


def _swap_shards() -> AbstractContextManager[None]:
    """A save writes shards of equal size that lie at the two ends of a tensor each in the other's place."""

    def make(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: BoxHandle, *args: Any, **options: Any) -> None:
            genuine(self, *args, **options)
            if len(self.tensors) == 1 and self.tensors[0].dim():
                self.offsets = [_mirrored(tuple(self.shape), self.offsets[0], tuple(self.tensors[0].shape))]

        return init

    return _patched(BoxHandle, "_fill", make)


def _mirrored(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    even = shape[0] == size[0] * dist.get_world_size()
    return (shape[0] - offset[0] - size[0], *offset[1:]) if even else offset


def _ask_nobody() -> AbstractContextManager[None]:
    def make(_: Callable[..., Any]) -> Callable[..., Any]:
        def vote(self: Scope, operation: str, *, problem: Any = None, digest: bytes = b"", facts: int = 0) -> int:
            if isinstance(problem, BaseException):
                raise problem
            return facts

        return vote

    return _patched(Scope, "vote", make)


def _draw() -> AbstractContextManager[None]:
    def make(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def offered(self: Offers, *args: Any, **options: Any) -> Any:
            torch.rand(1)
            return genuine(self, *args, **options)

        return offered

    return _patched(Offers, "make", make)


@contextlib.contextmanager
def _load_nothing() -> Iterator[None]:
    """``shardopt.load`` does nothing, and what was prepared is not put in place."""

    def nothing(*_: Any, **options: Any) -> dict[str, Any]:
        return {}

    with _patched(shardopt, "load", lambda _: nothing), _patched(Plan, "commit", lambda _: nothing):
        yield


def _lose_small_moments() -> AbstractContextManager[None]:
    """Every load zeroes what is below a hundredth of a tensor's largest element."""

    def change(entries: dict[str, Any]) -> None:
        for value in entries.values():
            if type(value) is Tensor and value.numel() > 1 and value.is_floating_point():
                value[value.abs() < value.abs().max() / 100] = 0

    return _after_commit(change)


@dataclass(frozen=True, kw_only=True)
class Sabotage:
    """A fault of shardopt.

    Attributes:
        make: shardopt with it, in this process.
        kinds: of failure that it may cause; another does not show that it was found.
    """

    make: Callable[[], AbstractContextManager[None]]
    kinds: tuple[str, ...] = ("difference",)


SABOTAGE: Mapping[str, Sabotage] = {
    # The rule that misses an entry, or gets one of another dtype, may raise.
    "an entry is dropped": Sabotage(make=lambda: _after_commit(_drop_an_entry), kinds=("difference", "error")),
    "shards are swapped": Sabotage(make=_swap_shards),
    # Ranks that do not agree may wait for each other, or fail in a collective.
    "no vote": Sabotage(make=_ask_nobody, kinds=("difference", "error", "hang")),
    "a stale step count": Sabotage(make=lambda: _after_commit(_set_back_a_step)),
    "a wrong dtype": Sabotage(make=lambda: _after_commit(_widen), kinds=("difference", "error")),
    "random numbers are drawn": Sabotage(make=_draw),
    "small moments are lost": Sabotage(make=_lose_small_moments),
    "a load loads nothing": Sabotage(make=_load_nothing),
}
"""What is wrong -> shardopt with it."""


def sabotaged(name: str) -> AbstractContextManager[None]:
    """Inside, shardopt has this fault; none if the name is empty."""
    return SABOTAGE[name].make() if name else contextlib.nullcontext()
