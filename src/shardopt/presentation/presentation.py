"""The port every presentation implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PresentationError
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.identity import Identity
from shardopt.presentation.ownership import Balance
from shardopt.scope import Scope
from shardopt.torch_compat import gradients_of, local_shard, raw_step

__all__ = ["Agree", "Presentation", "Ready", "alone", "amp_scale", "drop_amp_scale"]

# A vote within a step: operation, why this rank cannot, what must be equal, flags; all ranks' flags, as far as known.
Agree = Callable[[str, "BaseException | None", bytes, int], int]

# In C, since it is read for every plain parameter in every step.
_kind_of: Callable[[Tensor], tuple[Any, ...]] = attrgetter("dtype", "shape", "device")

# Attributes through which GradScaler hands its scale and verdict to an optimizer's own kernel.
_AMP_ATTRIBUTES = ("grad_scale", "found_inf")


@dataclass(slots=True)
class Ready:
    """What ``preflight`` found. Not kept by the presentation: gradients must not outlive ``zero_grad``.

    Attributes:
        gradients: this rank's part of each gradient, in the presentation's own order; None where there is none.
        unaligned: index -> FQN of the gradients that have to be redistributed to their parameter's placements first;
            that communicates, so they must be the same on every rank.
        without: FQNs that have no gradient, where those have to be the same on every rank.
    """

    gradients: list[Tensor | None] = field(default_factory=list)
    unaligned: dict[int, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)


class Presentation(ABC):
    """Shows one inner optimizer its parameters for the length of a step, and only then.

    Between steps the inner optimizer's groups and state hold the user's parameters.
    """

    name: ClassVar[str]
    # Whether the optimizer's own step calls the closure; otherwise it was called before, and gradients are all it gets.
    calls_closure: ClassVar[bool] = False
    # Whether the presentation is there when the closure returns.
    sees_closure: ClassVar[bool] = False

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.tracked: list[Tracked] = []
        # Of all wrapped optimizers, where there are several: a look at the models is a look for all of them.
        self.identity = Identity()
        self._lists: list[list[Tensor]] = []
        self._plain: list[Tensor] = []
        self._plain_kinds: list[tuple[Any, ...]] = []
        self._identity_is_new = True
        self._without_gradient: set[int] = set()
        # Whether parameters that are not sharded are each rank's own.
        self.own_plain = False
        # Entries that hold the parameter in a wider dtype.
        self.masters: tuple[str, ...] = ()
        # Attributes of the optimizer whose tensors are no state, and may be in the state of several parameters.
        self.constants: tuple[str, ...] = ()
        # Whether an item of a parameter's state is none.
        self.is_scratch: Callable[[str], bool] = _never
        # Whether the step that runs may have written something: the poison of a failure.
        self.has_written = False
        # Whether the rule does not run without a closure.
        self.needs_closure = False

    def join(self, scope: Scope, balance: Balance, agree: Agree) -> None:
        """Collective, in those that communicate. Takes the ranks, once they have met.

        Args:
            scope: the ranks.
            balance: of what they own, over all wrapped optimizers.
            agree: a vote within a step.
        """
        return None

    def described(self, item: Tracked) -> str:
        """What of a new parameter has to be the same on every rank, because ``register`` communicates."""
        return ""

    @property
    def told(self) -> Mapping[str, str]:
        """What else of the optimizer has to be the same on every rank, by name."""
        return {}

    def explained(self) -> list[str]:
        """What there is to say of how its parameters are shown."""
        return []

    @abstractmethod
    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Raises if state that parameters have already cannot be shown; changes nothing.

        Raises:
            PlacementError: such state has no known place.
        """

    def register(self, tracked: Sequence[Tracked]) -> None:
        """Adds parameters that are now in the inner optimizer's groups."""
        self.tracked.extend(tracked)
        self._lists = [list(group["params"]) for group in self.inner.param_groups]
        self._plain.extend(item.param for item in tracked if not isinstance(item.param, DTensor))
        self._plain_kinds = list(map(_kind_of, self._plain))
        self._identity_is_new = True

    def check_groups(self) -> None:
        """Raises when the groups no longer hold the parameters they were registered with.

        Raises:
            PresentationError: a parameter was added, removed or replaced behind the wrapper's back.
        """
        groups = self.inner.param_groups
        same = len(groups) == len(self._lists) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._lists, strict=False)
        )
        if not same:
            raise PresentationError(
                f"the parameter groups of {type(self.inner).__name__} no longer hold the parameters they were wrapped "
                "with; add parameters through ShardedStateOptimizer.add_param_group, and wrap again after replacing "
                "them."
            )

    def _check_parameters(self) -> None:
        """What every step checks first.

        Raises:
            PresentationError: groups or parameters are not those that were registered.
        """
        self.check_groups()
        if self._identity_is_new or list(map(_kind_of, self._plain)) != self._plain_kinds:
            self.identity.check()
            self._identity_is_new = False
        self._note_missing(self._plain, gradients_of(self._plain))

    def _note_missing(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Looks into the models when a gradient is missing that has not been missed before.

        That is what a replaced parameter looks like from here. One that is not used looks the same, and costs nothing
        from the second time on.

        Raises:
            PresentationError: parameters were replaced.
        """
        if type(None) not in set(map(type, gradients)):
            return
        missing = {id(param) for param, gradient in zip(params, gradients, strict=True) if gradient is None}
        if not missing <= self._without_gradient:
            self.identity.check()
            self._without_gradient |= missing

    @abstractmethod
    def preflight(self) -> Ready:
        """Checks gradients before anything is written; no communication."""

    @abstractmethod
    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Runs the inner update once, with what ``preflight`` found. May communicate, the same calls on every rank."""

    @property
    def draws(self) -> tuple[int, int] | None:
        """Of a rule that may draw random numbers: the seed, and how many steps have drawn; saved, and set by a load."""
        return None

    def set_draws(self, seed: int, num_steps: int) -> None:
        """Goes on from saved ``draws``."""
        return None

    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Undoes what the optimizer has made for parameters that were added, on this rank, and are not after all."""
        return None

    def settle(self) -> None:
        """Makes the state what a save may read, where the optimizer can do that by itself."""
        return None

    def state_changed(self) -> None:
        """Notes that a load has changed the state."""
        return None

    def release(self) -> None:
        """Gives back what ``preflight`` took for one step, whatever became of it."""
        return None

    @abstractmethod
    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """``local`` in the form in which this presentation keeps element-wise state."""

    @property
    def unscales_itself(self) -> bool:
        """Whether the optimizer's own kernel takes GradScaler's scale and skips on its verdict."""
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and this rank's part of each gradient that is there."""
        gradients = gradients_of([item.param for item in self.tracked])
        for item, gradient in zip(self.tracked, gradients, strict=True):
            if gradient is not None:
                yield item.fqn, local_shard(gradient) if isinstance(gradient, DTensor) else gradient

    @torch.no_grad()
    def _refresh_masters(self) -> None:
        """Brings masters up to weights that were loaded without the optimizer's state."""
        for group in self.inner.param_groups:
            for param in group["params"]:
                state = self.inner.state.get(param) or {}
                for name in self.masters:
                    _refresh(state.get(name), param)

    def _run(self, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        if self.masters:
            self._refresh_masters()
        step = raw_step(self.inner)
        # A rule that calls a closure has nothing to write before that has returned; who sees it return says so.
        self.has_written = closure is None or not self.sees_closure
        if not amp:
            return step(closure)
        for key, value in amp.items():
            setattr(self.inner, key, _plain(value))
        try:
            return step(closure)
        finally:
            for key in amp:
                delattr(self.inner, key)


def alone(operation: str, failure: BaseException | None, digest: bytes, facts: int) -> int:
    """``Agree`` before the ranks have met."""
    if failure is not None:
        raise failure
    return facts


def _never(item: str) -> bool:
    return False


def _refresh(master: object, param: Tensor) -> None:
    """Where the parameter is not the master's rounding, somebody else has written it since: the master follows."""
    if not isinstance(master, Tensor):
        return
    held = local_shard(master) if isinstance(master, DTensor) else master
    shard = (local_shard(param) if isinstance(param, DTensor) else param).detach()
    if held.shape == shard.shape:
        held.copy_(torch.where(held.to(shard.dtype) == shard, held, shard.to(held.dtype)))


def _plain(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def amp_scale(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What GradScaler has left on ``optimizer`` for the step that follows; empty when it is not in use."""
    found = vars(optimizer)
    return {key: found[key] for key in _AMP_ATTRIBUTES if found.get(key) is not None}


def drop_amp_scale(optimizer: torch.optim.Optimizer) -> None:
    """Takes it off, after a step that raises.

    GradScaler does so only after one that returns, and would multiply the scale it finds with the next one.
    """
    for key in _AMP_ATTRIBUTES:
        vars(optimizer).pop(key, None)
