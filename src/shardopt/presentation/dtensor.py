"""``dtensor``: the inner optimizer sees the DTensors themselves, with torch's dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.layouts.tracked import Tracked
from shardopt.presentation.presentation import Presentation, Ready
from shardopt.torch_compat import gradients_of, shard_in_place

__all__ = ["DTensorPresentation"]


class DTensorPresentation(Presentation):
    """Shows the user's parameters as they are. Right for rules written for DTensors."""

    name: ClassVar[str] = "dtensor"

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._params: list[DTensor] = []
        self._shards: list[Tensor] = []

    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Nothing to check: the state is shown as it is."""

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
        """Runs the inner update on the DTensors."""
        return self._run(closure, amp)

    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """``local`` as a DTensor placed like the parameter."""
        return tracked.as_param(local)
