"""What a rank does in a leg: load, fail, train, save, go on, die. It tells what it held, and what went wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import shardopt
from benchmarks.soaking.breaking import KILLS, broken_load, broken_prepare, broken_save, broken_step, killed_at
from benchmarks.soaking.episode import Episode, Fault
from benchmarks.soaking.rules import RULES, Drawn
from benchmarks.soaking.sabotage import sabotaged
from benchmarks.soaking.spoiling import spoil
from benchmarks.soaking.training import Held, Training
from shardopt import ShardedStateOptimizer
from shardopt.presentation.inventory import Part
from shardopt.presentation.whole import WholePresentation
from tests.faults.stage import Caught, caught
from tests.support.parcel import pack
from tests.support.ranks import reached
from tests.support.snapshot import Snapshot, snapshot

__all__ = ["Look", "Orders", "Told", "last_words", "quiet", "run_leg", "run_oracle", "schedulers_of"]

# In seconds, on a machine that has a core for each rank. No living rank comes near the first; a rank that was killed is
# named after the second.
_LONG_S = 30.0
_SHORT_S = 4.0
_HALVES_EVERY = 4

# Counters of the wrapper's own, which say that something was prepared; and of torch's schedulers: that step was called.
_COUNTERS = ("attribute._changes", "attribute._prepared", "attribute._opt_called")
# What torch's own load writes in place, before it comes to the optimizer.
_WEIGHTS = ("parameter.*", "buffer.*")


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a rank is told of a leg.

    Attributes:
        episode: it belongs to.
        number: of the leg.
        source: the checkpoint that it loads, or empty.
        target: the directory that it saves to.
        patience: how many times longer than usual ranks wait for each other.
        sabotage: key of ``sabotage.SABOTAGE``, or empty.
    """

    episode: Episode
    number: int
    source: str
    target: str
    patience: float
    sabotage: str


@dataclass
class Look:
    """What a rank held at a moment.

    Attributes:
        moment: in words.
        held: then.
        trained: whether the leg's steps are in it, which may round.
    """

    moment: str
    held: Held
    trained: bool


@dataclass
class Told:
    """What a rank tells of a leg.

    Attributes:
        looks: at the run.
        problems: what was not as it must be.
        pieces: of each parameter, the numbers of this rank's elements, in the shape of its shard.
        by_shard: whether shards were updated by themselves.
    """

    looks: list[Look] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    pieces: dict[str, Tensor] = field(default_factory=dict)
    by_shard: bool = False


class Extra:
    """A user's own part of a checkpoint, which fails on demand."""

    def __init__(self) -> None:
        self.step = 0
        self.saving: Callable[[], None] = _nothing
        self.loading: Callable[[], None] = _nothing

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        self.saving()
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts it back."""
        self.loading()
        self.step = state["step"]


def _nothing() -> None:
    return


class LegRun:
    """One rank's part of a leg. Collective throughout."""

    def __init__(self, orders: Orders) -> None:
        episode, leg = orders.episode, orders.episode.legs[orders.number]
        self.episode, self.leg = episode, leg
        self.source, self.target = orders.source, orders.target
        self.long_s, self.short_s = orders.patience * _LONG_S, orders.patience * _SHORT_S
        self.told = Told()
        self.has_state = False
        # Before the first save the run has its first weights; later everything has to come from the checkpoint.
        self.training = Training(episode, leg.layout, "elsewhere" if self.source else "start")
        self.model = self.training.model
        inner = self.training.optimizers()
        # To import a library takes one rank much longer than another.
        dist.barrier()
        self.optimizer = ShardedStateOptimizer(inner, self.model, compute=leg.compute, vote_timeout=self.long_s)
        (self.scheduler,) = schedulers_of([self.optimizer])
        self.extra = Extra()
        self.rank = dist.get_rank()
        self.told.pieces = self.training.index
        self.told.by_shard = {part.presentation.name for part in self._parts} <= {"local", "dtensor"}

    @property
    def _parts(self) -> list[Part]:
        return self.optimizer._inventory.parts

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model, "optim": self.optimizer, "scheduler": self.scheduler, "extra": self.extra}

    def run(self) -> Told:
        """The whole leg."""
        if self.source:
            self._resume()
        self._step_faults(late=False)
        self._train(self.leg.until)
        self._look("after the steps", trained=True)
        self._step_faults(late=True)
        self._save()
        self._train(self.extra.step + self.leg.overrun)
        self._look("after the save and further steps", trained=True)
        for fault in self.leg.of("save"):
            self._fail(
                fault, broken_save(self, fault), lambda: shardopt.save(self.state, self.target, timeout_s=self.long_s)
            )
        if self.leg.kill:
            self._die()
        return self.told

    def _look(self, moment: str, *, trained: bool) -> None:
        hidden = self._rule.hides_state
        held = self.training.held(self.extra.step, self.optimizer.optimizers, state=not hidden)
        names = {param: name for name, param in self.training.params.items()}
        held.owned = {
            names[param]
            for part in self._parts
            if isinstance(part.presentation, WholePresentation)
            for group in part.inner.param_groups
            for param in group["params"]
        }
        self.told.looks.append(Look(moment, held, trained))

    @property
    def _rule(self) -> Drawn:
        return RULES[self.episode.rule]

    def _train(self, until: int) -> None:
        for step in range(self.extra.step, until):
            self.training.give_gradients(step)
            before = torch.get_rng_state()
            self.optimizer.step()
            if not torch.equal(before, torch.get_rng_state()):
                self.told.problems.append(f"step {step}: the random number generator was moved")
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.extra.step = step + 1

    def _resume(self) -> None:
        if self.leg.warm:
            self.training.give_gradients(1000)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.has_state = True
        for fault in self.leg.of("load"):
            self._fail(
                fault,
                broken_load(self, fault),
                lambda: shardopt.load(self.state, self.source, timeout_s=self.long_s),
                half=fault.where == "commit",
            )
        for fault in self.leg.of("prepare"):
            options: dict[str, Any] = {"path": self.source}
            with_options = broken_prepare(self, fault, options)
            self._fail(fault, with_options, lambda: self._prepare(**options))  # noqa: B023
        for fault in self.leg.of("dcp"):
            if fault.where == "load":
                hook = broken_load(self, fault)
                self._fail(fault, hook, lambda: self._dcp_load("model", "optim"), ignore=_WEIGHTS)
        spoil(self)
        ignored = ("parameter.*", "state*", "group*", *_COUNTERS, "attribute.*", "buffer.*")
        before = snapshot(self.optimizer, self.model)
        self._load()
        self._compare(before, "the load", ignore=ignored)
        self._look(f"after a load by {self.leg.load}", trained=False)

    def _prepare(self, path: str, **options: Any) -> object:
        return self.optimizer.prepare_load(path, prefix="optim", **options)

    def _dcp_load(self, *keys: str) -> None:
        dcp.load({key: self.state[key] for key in keys}, checkpoint_id=self.source)

    def _load(self) -> None:
        how = self.leg.load
        if how == "dcp":
            self._dcp_load(*self.state)
        elif how == "shardopt":
            shardopt.load(self.state, self.source, timeout_s=self.long_s)
        else:
            self._dcp_load("model", "scheduler", "extra")
            if how == "path":
                self._prepare(self.source).commit()  # type: ignore[attr-defined]
            else:
                read = {"optim": self.optimizer.state_dict()}
                dcp.load(read, checkpoint_id=self.source)
                self.optimizer.prepare_load(read["optim"]).commit()

    def _save(self) -> None:
        for fault in self.leg.of("dcp"):
            if fault.where == "save":
                elsewhere = f"{self.target}-failed"
                self._fail(fault, broken_save(self, fault), lambda: dcp.save(self.state, checkpoint_id=elsewhere))  # noqa: B023
        before = snapshot(self.optimizer, self.model)
        pending: Any = None
        if self.leg.save == "async":
            pending = dcp.async_save(self.state, checkpoint_id=self.target)
        elif self.leg.save == "dcp":
            dcp.save(self.state, checkpoint_id=self.target)
        else:
            shardopt.save(self.state, self.target, timeout_s=self.long_s)
        self._compare(before, "the save")
        if pending is not None:
            # The run goes on, and must not be in the file.
            self._train(self.extra.step + 1)
            pending.result()

    def _compare(self, before: Snapshot, what: str, *, ignore: tuple[str, ...] = _COUNTERS) -> None:
        found = before.diff(snapshot(self.optimizer, self.model), ignore=ignore)
        self.told.problems += [f"{what} changed {item}" for item in found]

    def _step_faults(self, *, late: bool) -> None:
        for fault in self.leg.of("step"):
            if fault.late is late:
                self.training.give_gradients(self.extra.step)
                options: dict[str, Any] = {}
                self._fail(fault, broken_step(self, fault, options), lambda: self.optimizer.step(**options))  # noqa: B023
                self.optimizer.zero_grad()

    def _fail(
        self,
        fault: Fault,
        breaks: contextlib.AbstractContextManager[None],
        operation: Callable[[], object],
        *,
        half: bool = False,
        ignore: tuple[str, ...] = (),
    ) -> None:
        """An operation that fails on one rank: all get an error, nothing has changed, and the group works."""
        what = f"{fault.operation} broken at {fault.where} ({fault.kind}) on rank {fault.rank}"
        before: Snapshot | None = None
        with breaks:
            before = snapshot(self.optimizer, self.model)
            found = caught(operation)
            if not half:
                self._compare(before, what, ignore=(*_COUNTERS, *ignore))
        self._judge(what, fault.rank, found)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if ones.item() != self.leg.world_size:
            self.told.problems.append(f"{what}: the group adds up to {ones.item()} afterwards")
        if half:
            self._refuses(what)
            shardopt.load(self.state, self.source, timeout_s=self.long_s)
            self.has_state = True
            self._look(f"after the load that mends {what}", trained=False)

    def _judge(self, what: str, rank: int, found: Caught) -> None:
        if not found.kind:
            self.told.problems.append(f"{what}: rank {self.rank} got no error")
        elif self.rank != rank and (rank,) not in (found.failures, found.missing, *found.disagree):
            self.told.problems.append(
                f"{what}: rank {self.rank} is not told of rank {rank}: {found.kind}: {found.text}"
            )

    def _refuses(self, what: str) -> None:
        """After a load that failed half way the optimizer must not go on."""
        self.training.give_gradients(self.extra.step)
        elsewhere = f"{self.source}-half"
        saves = partial(shardopt.save, self.state, elsewhere, timeout_s=self.long_s)
        for name, operation in (("step", self.optimizer.step), ("a save", saves)):
            if not caught(operation).kind:
                self.told.problems.append(f"{what}: {name} went on with state that is half loaded")
        self.optimizer.zero_grad()

    def _die(self) -> None:
        """The victim is killed in an operation; the others must be told, and have changed nothing."""
        what = f"killed in {self.leg.kill} on rank {self.leg.victim}"
        if self.leg.kill == "step":
            self.training.give_gradients(self.extra.step)
        before = snapshot(self.optimizer, self.model)
        if self.rank == self.leg.victim:
            Path(last_words(self.target)).write_bytes(pack(self.told))
        died = killed_at(self, self.leg.kill, lambda: reached("kill")) if self.rank == self.leg.victim else None
        with died or contextlib.nullcontext(), self.optimizer._scope.within(self.short_s):
            found = caught(KILLS[self.leg.kill](self, self.short_s))
        self._compare(before, what)
        self._judge(what, self.leg.victim, found)
        if found.seconds > self.short_s + self.long_s / 2:
            self.told.problems.append(f"{what}: rank {self.rank} waited {found.seconds:.1f} s")


def last_words(target: str) -> str:
    """Where a rank that will be killed leaves what it has to tell."""
    return f"{target}.told"


def run_leg(orders: Orders) -> Told:
    """The job of a leg."""
    with quiet(), sabotaged(orders.sabotage):
        return LegRun(orders).run()


def run_oracle(episode: Episode) -> dict[int, Held]:
    """What the unsharded and uninterrupted run holds, by number of steps."""
    with quiet():
        training = Training(episode, None, "start")
        optimizers = training.optimizers()
        schedulers = schedulers_of(optimizers)
        state = not RULES[episode.rule].hides_state
        found: dict[int, Held] = {}
        for step in range(episode.last_step + 1):
            found[step] = training.held(step, optimizers, state=state)
            training.give_gradients(step)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return found


def schedulers_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.lr_scheduler.StepLR]:
    """Of the runs without shards, one for each optimizer."""
    return [torch.optim.lr_scheduler.StepLR(one, _HALVES_EVERY, gamma=0.5) for one in optimizers]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the advice that libraries log and warn of, and on one thread for the kernels that choose their own."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    os.environ["LOCAL_WORLD_SIZE"] = str(max(2, int(os.environ.get("WORLD_SIZE", "1"))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
