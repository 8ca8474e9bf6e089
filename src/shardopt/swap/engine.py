"""All that SwapAdamW keeps and does wherever its parameters are; the optimizer gives it groups and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError, PresentationError
from shardopt.layouts.tracked import Kind
from shardopt.staging.poison import Poison
from shardopt.swap.clip import Clip
from shardopt.swap.fitting import Fill, copy_all, fit, missing_masters, staged
from shardopt.swap.gradients import Found, Gradients
from shardopt.swap.held import MASTER, REMAINDER, Held, Keeps, check_param, shard_of, sharing_spans
from shardopt.swap.kernel_rows import Table
from shardopt.swap.masters import Masters, follow
from shardopt.swap.numbers import Groups, grouped_hypers, refuse_numbers
from shardopt.swap.slabs import Slabs
from shardopt.swap.table import StepTable
from shardopt.torch_compat import shard_in_place

__all__ = ["Engine", "Step", "number_of"]

State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Step:
    """What one update works on.

    Attributes:
        found: the gradients, which must live as long as they are read.
        address: of each parameter's gradient.
        code: their dtypes, DtypeCode.
        has: whether there is one.
        which: row of ``hypers`` for each parameter.
        hypers: numbers.
        amsgrad: whether each parameter uses its maximum.
        factor: of all gradients, of a clip.
        amp: a GradScaler's ``grad_scale`` and ``found_inf``, where there is one.
    """

    found: Found
    address: NDArray[np.int64]  # [num_params]
    code: NDArray[np.int8]  # [num_params]
    has: NDArray[np.bool_]  # [num_params]
    which: NDArray[np.int64]  # [num_params]
    hypers: Table
    amsgrad: NDArray[np.bool_]  # [num_params]
    factor: float
    amp: Mapping[str, Tensor]


class Engine(ABC):
    """Memory, table and step of one optimizer.

    Attributes:
        keeps: what is kept for each parameter.
        device: of the parameters.
        slabs: makes its memory.
        held: the parameters, in the order of their groups.
        poison: whether a step or load has failed half way.
        has_written: whether the step that runs may have written something.
        clip: a factor that waits for its step.
        masters: of bf16 parameters.
        gradients: reads those of ``held``.
        table: of all of them.
        seed: of random bits.
        num_threads: at most so many step on the host; None leaves it to the CPUs that this process may use.
        num_streams: of random bits that parameters have been given.
    """

    def __init__(self, keeps: Keeps, *, device: torch.device, pin: bool, seed: int, num_threads: int | None) -> None:
        self.keeps = keeps
        self.device = device
        self.slabs = Slabs(pin=pin, device=device if device.type == "cuda" else None)
        self.held: list[Held] = []
        self.poison = Poison()
        self.has_written = False
        self.clip: Clip | None = None
        self.seed = seed
        self.num_threads = num_threads
        self.num_streams = 0
        self._by_id: dict[int, Held] = {}
        self.masters = Masters([])
        self.index([])

    @abstractmethod
    def hold(self, named: Sequence[tuple[str, Tensor]], amsgrad: Sequence[bool]) -> list[Held]:
        """Makes the state of new parameters, zeros, each with the streams that follow those of the ones before."""

    @abstractmethod
    def run(self, step: Step) -> None:
        """Updates parameters and state.

        Raises:
            ValueError, TypeError: it looked at everything and has refused, before anything was written.
        """

    def drain(self) -> None:
        """Waits until the state's memory holds what the last step has made of it: the host may read and write it."""
        return None

    def settle_counts(self) -> None:
        """Makes the counts of steps what they are, where that was not known when the step was made."""
        return None

    def skips(self, amp: Mapping[str, Tensor]) -> bool:
        """Whether a GradScaler says not to step; one that need not be waited for says so to ``run`` alone."""
        return "found_inf" in amp and number_of(amp["found_inf"]) != 0

    # What is made in inference mode no step could write to.
    @torch.inference_mode(False)
    def add(self, named: Sequence[tuple[str, Tensor, bool]], groups: Groups, state: State) -> None:
        """Makes the state of new parameters, which are in the groups already: all of it, or none.

        Args:
            named: name and parameter, and whether its group keeps maxima.
            groups: of the optimizer.
            state: of the optimizer.

        Raises:
            PlacementError: parameters cannot be updated here; all of them are listed.
            PresentationError: a parameter has state already.
            ValueError: numbers of a group are out of range.
        """
        refuse_numbers(groups)
        self._refuse_unknown(groups, {id(param) for _, param, _ in named})
        known = [name for name, param, _ in named if id(param) in self._by_id]
        if known:
            raise PresentationError(
                f"{', '.join(known)}: it has state here already, which a new group would start anew. To move a "
                "parameter, take it out of one group's list and put it into that of another that is there."
            )
        problems = self._problems([(name, param) for name, param, _ in named])
        if not problems:
            known_spans = [(one.name, one.param) for one in self.held]
            problems = sharing_spans([*known_spans, *((name, param) for name, param, _ in named)])
        if problems:
            raise PlacementError("SwapAdamW cannot update parameters:\n" + "\n".join(problems))
        self.drain()
        nbytes = self.slabs.nbytes
        try:
            new = self.hold([(name, param) for name, param, _ in named], [flag for _, _, flag in named])
            copy_all([fill for one in new for fill in missing_masters(one, {})])
            self.num_streams += len(new)
            self._by_id.update((id(one.param), one) for one in new)
            for one in new:
                state[one.param] = dict(one.own)
            self.index(groups)
        except BaseException:
            self.withdraw([param for _, param, _ in named])
            self.slabs.nbytes = nbytes
            for _, param, _ in named:
                state.pop(param, None)
            raise

    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Forgets parameters that were added last: those of the next group get the random bits that they had."""
        there = [one for param in params if (one := self._by_id.pop(id(param), None)) is not None]
        if there:
            self.num_streams = min(one.stream for one in there)

    def _problems(self, named: Sequence[tuple[str, Tensor]]) -> list[str]:
        return [f"{name}: {why}." for name, param in named if (why := check_param(param, self.device)) is not None]

    def index(self, groups: Groups) -> None:
        """Takes the parameters in the order of the groups, and makes the tables anew."""
        # Masters that were loaded wait for the weights of their checkpoint, which the step compares them with.
        if not self.masters.loaded:
            self.follow()
        self._lists = [list(group["params"]) for group in groups]
        params = [param for listed in self._lists for param in listed]
        self.held = [self._by_id[id(param)] for param in params]
        self._by_id = {id(one.param): one for one in self.held}
        self._group_of = np.repeat(np.arange(len(groups)), [len(listed) for listed in self._lists])
        self.table = StepTable(self.held)
        self.gradients = Gradients(self.held, self.device)
        self.masters = Masters(self.held, loaded=self.masters.loaded)
        self._params = params
        self._sharded = bool(params) and all(isinstance(param, DTensor) for param in params)
        self._shards = [one.shard for one in self.held]
        self._addresses = [shard.data_ptr() for shard in self._shards]
        # Nothing is known of the state until it has been looked at.
        self._dicts: list[object] = []
        self._values: list[object] = []

    def name(self, names: Mapping[int, str]) -> None:
        """Takes better names for errors, by the parameters' ids."""
        for one in self.held:
            one.name = names.get(id(one.param), one.name)
        self.table.names = [self.held[int(owner)].name for owner in self.table.owners]

    def check(self, groups: Groups, state: State) -> None:
        """Takes notice of what users have changed: groups, memory of parameters, tensors of state.

        Raises:
            PresentationError: the groups hold a parameter that was never added.
            PlacementError: a parameter or state is of another kind than before; all of them are listed.
        """
        if len(groups) != len(self._lists) or not all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._lists, strict=True)
        ):
            self._regroup(groups)
        shards: list[Tensor] = list(map(shard_in_place if self._sharded else shard_of, self._params))
        if not _same(shards, self._shards) or list(map(Tensor.data_ptr, shards)) != self._addresses:
            self._rebase(groups, shards)
        dicts, values = _held_in(state)
        if not (_same(dicts, self._dicts) and _same(values, self._values)):
            self.adopt(state)

    def _regroup(self, groups: Groups) -> None:
        self._refuse_unknown(groups, set())
        self.index(groups)

    def _refuse_unknown(self, groups: Groups, added: Set[int]) -> None:
        """Refuses groups that hold parameters which have no memory, and are not being added."""
        new = [
            f"group {index}, parameter {place} of shape {tuple(param.shape)}"
            for index, group in enumerate(groups)
            for place, param in enumerate(group["params"])
            if id(param) not in self._by_id and id(param) not in added
        ]
        if new:
            raise PresentationError(
                f"the groups hold parameters that were never added: {'; '.join(new)}. Their state has no memory, and a "
                "step makes none; use add_param_group."
            )

    def _rebase(self, groups: Groups, shards: Sequence[Tensor]) -> None:
        """Parameters have other memory than before (``to_empty``, ``param.data = ...``)."""
        problems = [
            f"{one.name}: it was {one.kind} when the optimizer was made, and is {Kind.of(shard)} now; make a new one."
            for one, shard in zip(self.held, shards, strict=True)
            if Kind.of(shard) != one.kind or shard.stride() != one.shard.stride()
        ]
        problems += self._problems([(one.name, one.param) for one in self.held])
        if problems:
            raise PlacementError("parameters were replaced:\n" + "\n".join(problems))
        moved = [
            one
            for one, shard, known in zip(self.held, shards, self._addresses, strict=True)
            if shard.data_ptr() != known
        ]
        for one, shard in zip(self.held, shards, strict=True):
            one.shard = shard
        self.index(groups)
        if moved and not self.masters.loaded:
            self.drain()
            for one in moved:
                follow(one, loaded=False)

    def adopt(self, state: State) -> None:
        """Brings values that were put into the state into its memory, and the memory's own tensors back into it.

        A parameter without any state starts anew.

        Raises:
            PlacementError: what is there does not fit; all of it is listed, and nothing was changed.
        """
        fills: list[Fill] = []
        anew: list[Held] = []
        problems: list[str] = []
        for one in self.held:
            live = state.get(one.param) or {}
            if not any(name in live for name in one.own):
                anew.append(one)
                continue
            for name, own in one.own.items():
                if name not in live:
                    continue
                found = (own, own) if live[name] is own else fit(one, name, live[name])
                if isinstance(found, str):
                    problems.append(f"{one.name}: {found}.")
                elif live[name] is not own:
                    fills.append(found)
            fills += missing_masters(one, live)
            lacking = [name for name in one.own if name not in live and name not in (MASTER, REMAINDER)]
            problems += [f"{one.name}: state {name!r} was taken out, and the rest of it was not." for name in lacking]
        if problems:
            raise PlacementError("state was replaced by what does not fit:\n" + "\n".join(problems))
        # Before values are copied anywhere: some may be live state.
        self.drain()
        copy_all(staged(fills))
        for one in anew:
            one.reset()
        for one in self.held:
            state.setdefault(one.param, {}).update(one.own)
        self._dicts, self._values = _held_in(state)

    def follow(self) -> None:
        """Brings masters up to weights that were written since the last step."""
        if self.masters.outdated():
            self.drain()
            self.masters.follow()

    def refresh_masters(self) -> None:
        """Makes every master the parameter's own value."""
        self.drain()
        copy_all([fill for one in self.held for fill in missing_masters(one, {})])
        self.masters.note()

    def look(self, groups: Groups, state: State) -> Found:
        """Checks all that can be wrong with a step, without communication; what it finds is for the next ``update``.

        Raises:
            ShardoptError: the step must not run; nothing was changed.
        """
        self.poison.check()
        self.check(groups, state)
        lacking = self.table.without_maximum(self._flags(groups))
        if lacking:
            raise PresentationError(
                f"amsgrad is on, and the optimizer was made without memory for maxima of {', '.join(lacking[:5])}"
                f"{', ...' * (len(lacking) > 5)}; make it with amsgrad=True."
            )
        refuse_numbers(groups)
        found = self.gradients.look()
        if self.clip is not None and not self.clip.is_of(self.gradients):
            raise PresentationError(
                "gradients have changed since clip_grad_norm_, whose factor is for the step of the very gradients it "
                "has read. Call it after the last backward pass, right before the step; zero_grad() drops the factor."
            )
        return found

    def update(self, found: Found, groups: Groups, amp: Mapping[str, Tensor]) -> None:
        """Collective, where gradients are not placed like their parameters. One step.

        Args:
            found: what ``look`` has found.
            groups: of the optimizer.
            amp: a GradScaler's ``grad_scale`` and ``found_inf``, where there is one.
        """
        self.has_written = False
        if self.skips(amp):
            self.clip = None
            return
        self.gradients.complete(found)
        address, code, has = self.gradients.addresses(found)
        self.follow()
        if not has.any():
            self.clip = None
            return
        self.settle_counts()
        which, table = grouped_hypers(self._group_of, self.table.steps() + 1, has, groups)
        factor = 1.0 if self.clip is None else self.clip.factor
        step = Step(found, address, code, has, which, table, self._flags(groups), factor, amp)
        try:
            self.has_written = True
            self.run(step)
            self.table.count(has)
            self.table.mark_written(has)
            self.masters.note()
        except (ValueError, TypeError):
            # The kernel looks at everything before it writes.
            self.has_written = False
            raise
        except BaseException as error:
            self.poison.set("step", error)
            raise
        self.clip = None

    def _flags(self, groups: Groups) -> NDArray[np.bool_]:
        """Which parameters use maxima."""
        return np.array([bool(group["amsgrad"]) for group in groups], np.bool_)[self._group_of]


def number_of(value: Tensor) -> float:
    """The one element of a tensor, on the host."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _held_in(state: Mapping[Any, Any]) -> tuple[list[object], list[object]]:
    """The dicts of the state, and what is in them; state under a name is not the engine's."""
    dicts = [entries for entries in state.values() if type(entries) is dict]
    return list(dicts), [value for entries in dicts for value in entries.values()]


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(left) == len(right) and all(map(is_, left, right))
