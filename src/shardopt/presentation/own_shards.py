"""Optimizers that step the shards of DTensors by themselves: they are shown their parameters as they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardopt.errors import PresentationError
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.dtensor import DTensorPresentation
from shardopt.presentation.ownership import Balance
from shardopt.presentation.presentation import Agree, Ready
from shardopt.scope import Scope

__all__ = ["OwnShardsPresentation", "TakesShards"]


class TakesShards(ABC):
    """What such an optimizer tells and is told, besides what any optimizer does.

    Attributes:
        has_written: whether its last step may have changed something, though it raised.
        told: options, by name, that have to be the same on every rank.
        state_device: where it keeps all state, wherever the parameters are.
    """

    has_written: bool
    state_device: torch.device
    told: Mapping[str, str]

    @abstractmethod
    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Takes names for errors, by ``id`` of the parameter."""

    @abstractmethod
    def look(self) -> list[str]:
        """Checks all that can be wrong with the step that follows, without communication.

        Returns:
            Names of the parameters whose gradient has to be redistributed in it, which communicates.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drops what ``look`` has found, gradients among it."""

    @abstractmethod
    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Drops what was made for parameters that were added last, as if they never had been."""

    @abstractmethod
    def settle(self) -> None:
        """Makes the state what a save may read."""

    @abstractmethod
    def state_replaced(self) -> None:
        """Takes notice of a load that has put values into its groups and its state."""


class OwnShardsPresentation(DTensorPresentation):
    """Shows the parameters as they are to an optimizer that takes their shards itself.

    Nothing is swapped, and the state is the optimizer's own memory before, in and after a step.
    """

    name: ClassVar[str] = "shards"
    # The wrapper calls it: gradients are looked at before the vote.
    calls_closure: ClassVar[bool] = False

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        if not isinstance(inner, TakesShards):
            raise PresentationError(f"{type(inner).__name__} does not take shards by itself.")
        self._own: TakesShards = inner
        self._is_alone = True

    def join(self, scope: Scope, balance: Balance, agree: Agree) -> None:
        """Notes whether other ranks step too."""
        self._is_alone = scope.size == 1

    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Nothing: the optimizer has checked parameters and made their state."""
        return None

    def register(self, tracked: Sequence[Tracked]) -> None:
        """Tells the optimizer what parameters are called."""
        super().register(tracked)
        self._own.name_parameters({id(item.param): item.fqn for item in self.tracked})

    @property
    def told(self) -> Mapping[str, str]:
        """Options of the optimizer that are in none of its groups."""
        return self._own.told

    def preflight(self) -> Ready:
        """Lets the optimizer check its own step."""
        ready = super().preflight()
        ready.unaligned = dict(enumerate(self._own.look()))
        return ready

    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Runs the update on the shards."""
        try:
            return super().step(ready, closure, amp)
        finally:
            # Where the optimizer has refused its step, other ranks have made theirs.
            self.has_written = self._own.has_written or not self._is_alone

    def release(self) -> None:
        """Gives gradients back."""
        self._own.forget()

    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Lets the optimizer forget them: on other ranks they were never there."""
        self._own.withdraw(params)

    def settle(self) -> None:
        """Lets the optimizer bring its state up to its parameters."""
        self._own.settle()

    def state_changed(self) -> None:
        """Lets the optimizer take what was loaded into its own memory."""
        self._own.state_replaced()
