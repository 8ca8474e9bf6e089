"""``local``: the inner optimizer sees this rank's shard of each parameter, a plain tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError, PresentationError
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.presentation import Presentation
from shardopt.torch_compat import local_shard, same_spec, spec_token

__all__ = ["LocalPresentation"]


class _View:
    """One DTensor parameter and the leaf over its shard that the inner optimizer is shown."""

    __slots__ = ("fqn", "leaf", "matching_spec", "param", "shard")

    def __init__(self, tracked: Tracked, param: DTensor) -> None:
        self.fqn = tracked.fqn
        self.param = param
        self.shard = local_shard(param)
        self.leaf = nn.Parameter(self.shard.detach(), requires_grad=param.requires_grad)
        self.matching_spec = spec_token(param)


class LocalPresentation(Presentation):
    """Swaps DTensor parameters for leaves over their shards while the inner optimizer steps.

    The leaves share memory with the parameters for good; only the lists and the state's keys are
    swapped. Between steps the state's values are plain local tensors under the user's parameters.
    """

    name: ClassVar[str] = "local"

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._views: list[_View] = []
        self._leaf_of: dict[int, Tensor] = {}
        self._param_of: dict[int, Tensor] = {}
        self._leaf_lists: list[list[Tensor]] = []

    def register(self, tracked: Sequence[Tracked]) -> None:
        """Makes the leaves, and turns DTensor state that already exists into its local tensors."""
        sharded = [(item, item.param) for item in tracked if isinstance(item.param, DTensor)]
        # All checks before the first change: a refusal must leave the inner optimizer as it was.
        for item, param in sharded:
            self._check_state(item, param)
        super().register(tracked)
        for item, param in sharded:
            view = _View(item, param)
            self._views.append(view)
            self._show(view)
            state = self.inner.state.get(param) or {}
            state.update((entry, local_shard(value)) for entry, value in state.items() if isinstance(value, DTensor))
        self._relist()

    def _show(self, view: _View) -> None:
        self._leaf_of[id(view.param)] = view.leaf
        self._param_of[id(view.leaf)] = view.param

    def _relist(self) -> None:
        self._leaf_lists = [[self._leaf_of.get(id(p), p) for p in known] for known in self._lists]

    def _check_state(self, tracked: Tracked, param: DTensor) -> None:
        # Adagrad makes its state in __init__, and a warm optimizer may be wrapped: both hold DTensors.
        for entry, value in (self.inner.state.get(param) or {}).items():
            if isinstance(value, DTensor) and not (same_spec(value, param) and value.shape == param.shape):
                raise PlacementError(
                    f"{tracked.fqn}: state {entry!r} is placed {value.placements} with shape {tuple(value.shape)}, the "
                    f"parameter {param.placements} with shape {tracked.shape}; element-wise state is placed like its "
                    "parameter."
                )

    def preflight(self) -> list[str]:
        """Checks groups and gradients, and points each leaf at this rank's part of the gradient."""
        self.check_groups()
        redistribute: list[str] = []
        for view in self._views:
            param = view.param
            if local_shard(param) is not view.shard:
                self._refresh(view)
            grad = param.grad
            if grad is None:
                continue
            if not isinstance(grad, DTensor):
                raise PresentationError(
                    f"{view.fqn}: the parameter is a DTensor placed {param.placements}, but its gradient is a plain "
                    f"tensor of shape {tuple(grad.shape)}; assign gradients as DTensors placed like the parameter."
                )
            spec = spec_token(grad)
            if spec is not view.matching_spec:
                if not same_spec(grad, param):
                    redistribute.append(view.fqn)
                    continue
                view.matching_spec = spec
            view.leaf.grad = local_shard(grad)
        return redistribute

    def _refresh(self, view: _View) -> None:
        # to_empty() and .to(dtype) put a new local tensor into the same parameter.
        shard = local_shard(view.param)
        if shard.shape != view.shard.shape or shard.dtype != view.shard.dtype or shard.device != view.shard.device:
            raise PresentationError(
                f"{view.fqn}: this rank's shard was {view.shard.dtype}{tuple(view.shard.shape)} on {view.shard.device} when "
                f"the optimizer was wrapped and is now {shard.dtype}{tuple(shard.shape)} on {shard.device}; build the "
                "optimizer and the wrapper after the model has its final dtype, shape and device."
            )
        del self._param_of[id(view.leaf)]
        view.shard = shard
        view.leaf = nn.Parameter(shard.detach(), requires_grad=view.param.requires_grad)
        self._show(view)
        self._relist()

    def step(self, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Swaps, steps, and swaps back, also when the inner optimizer raises."""
        for view in self._views:
            grad = view.param.grad
            if grad is not None and view.leaf.grad is None:
                # Tensor-parallel replicas arrive as partial sums; the vote has shown that every rank has them.
                placements = view.param.placements
                view.leaf.grad = local_shard(grad.redistribute(placements=placements))  # pyrefly: ignore
        user_state = self.inner.state
        self._enter(user_state)
        try:
            return self._run(closure, amp)
        finally:
            self._leave(user_state)

    def _enter(self, user_state: dict[Any, Any]) -> None:
        leaf_of = self._leaf_of
        shown: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in user_state.items():
            shown[leaf_of.get(id(key), key)] = value
        self.inner.state = shown
        for group, leaves in zip(self.inner.param_groups, self._leaf_lists, strict=True):
            # In place: some optimizers keep the list itself (LBFGS).
            group["params"][:] = leaves

    def _leave(self, user_state: dict[Any, Any]) -> None:
        shown = self.inner.state
        param_of = self._param_of
        user_state.clear()
        for key, value in shown.items():
            user_state[param_of.get(id(key), key)] = value
        self.inner.state = user_state
        for group, params in zip(self.inner.param_groups, self._lists, strict=True):
            group["params"][:] = params
        for view in self._views:
            # A leaf that kept its gradient would hold the memory past zero_grad(set_to_none=True).
            view.leaf.grad = None

    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """The local tensor itself."""
        return local
