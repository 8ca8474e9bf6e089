"""``dtensor``: the inner optimizer sees the DTensors themselves, with torch's dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PresentationError
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.ownership import Balance
from shardopt.presentation.presentation import Agree, Presentation, Ready, alone
from shardopt.scope import Scope
from shardopt.torch_compat import gradients_of, shard_in_place

__all__ = ["DTensorPresentation"]


class DTensorPresentation(Presentation):
    """Shows the user's parameters as they are. Right for rules written for DTensors."""

    name: ClassVar[str] = "dtensor"
    calls_closure: ClassVar[bool] = True
    sees_closure: ClassVar[bool] = True

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._params: list[DTensor] = []
        self._shards: list[Tensor] = []
        self._agree: Agree = alone

    def join(self, scope: Scope, balance: Balance, agree: Agree) -> None:
        """Takes the vote on closures."""
        super().join(scope, balance, agree)
        self._agree = agree

    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Checks that no group mixes DTensors and plain tensors that torch would put into one call.

        Raises:
            PresentationError: a group does, and the step would fail; every group is listed.
        """
        problems: list[str] = []
        for index in dict.fromkeys(item.group for item in tracked):
            members = [item for item in tracked if item.group == index]
            plain = [item.fqn for item in members if not isinstance(item.param, DTensor)]
            flags = [flag for flag in ("foreach", "fused") if self._options_of(members[0]).get(flag)]
            if flags and 0 < len(plain) < len(members):
                problems.append(
                    f"group {index} has {len(members) - len(plain)} DTensors and {len(plain)} plain tensors "
                    f"({', '.join(plain[:5])}{', ...' * (len(plain) > 5)}), which {flags[0]}=True puts into one call, "
                    "and torch refuses that. Give the plain ones a group of their own, leave the flag out, or use "
                    "compute='local'."
                )
        if problems:
            raise PresentationError("\n".join(problems))

    def _options_of(self, item: Tracked) -> dict[str, Any]:
        """The group's own; the optimizer's defaults for a group that is still to be added."""
        groups = (group for group in self.inner.param_groups if any(p is item.param for p in group["params"]))
        return next(groups, self.inner.defaults)

    def register(self, tracked: Sequence[Tracked]) -> None:
        """Notes the shards, to tell when one is replaced."""
        super().register(tracked)
        self._params.extend(item.param for item in tracked if isinstance(item.param, DTensor))
        self._shards = list(map(shard_in_place, self._params))

    def preflight(self) -> Ready:
        """Checks the parameters only; torch's dispatch redistributes gradients itself."""
        self._check_parameters()
        shards = list(map(shard_in_place, self._params))
        if not all(map(is_, shards, self._shards)):
            self.identity.check()
            self._shards = shards
        self._note_missing(self._params, gradients_of(self._params))
        return Ready()

    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Runs the inner update on the DTensors; the optimizer calls the closure, with a vote after each call."""
        return self._run(None if closure is None else lambda: self._call(closure), amp)

    def _call(self, closure: Callable[[], Any]) -> Any:
        """Collective. What the closure raises on one rank is raised on all; the first call comes before any write."""
        failure: BaseException | None = None
        loss: Any = None
        try:
            loss = closure()
        except BaseException as error:
            failure = error
        self._agree("closure", failure, b"", 0)
        self.has_written = True
        return loss

    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """``local`` as a DTensor placed like the parameter."""
        return tracked.as_param(local)
