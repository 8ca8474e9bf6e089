"""``local``: the inner optimizer sees this rank's shard of each parameter, a plain tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError, PresentationError
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.presentation import Presentation, Ready
from shardopt.torch_compat import gradients_of, local_shard, same_spec, set_gradients, shard_in_place, spec_token

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

    The leaves share memory with the parameters for good; what is swapped is each group's list and the state, another
    mapping of the same values. Between steps the state's values are plain local tensors under the user's parameters.

    A step touches objects of every parameter, and the update in its middle drives them from the cache. What counts is
    therefore how often each is touched, not how many instructions that takes: whole lists are exchanged, not filled.
    """

    name: ClassVar[str] = "local"

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._views: list[_View] = []
        self._leaf_of: dict[int, Tensor] = {}
        self._param_of: dict[int, Tensor] = {}
        self._leaves: list[Tensor] = []
        self._leaf_lists: list[list[Tensor]] = []

    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Checks that DTensor state that already exists is placed like its parameter."""
        for item in tracked:
            if isinstance(item.param, DTensor):
                self._check_state(item, item.param)

    def register(self, tracked: Sequence[Tracked]) -> None:
        """Makes the leaves, and turns DTensor state that already exists into its local tensors."""
        super().register(tracked)
        for item in tracked:
            param = item.param
            if not isinstance(param, DTensor):
                continue
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
        self._leaves = [view.leaf for view in self._views]
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

    def preflight(self) -> Ready:
        """Checks groups and gradients, and finds this rank's part of each gradient."""
        self.check_groups()
        params = [view.param for view in self._views]
        if not all(map(is_, map(shard_in_place, params), [view.shard for view in self._views])):
            self._refresh()
        ready = Ready()
        for view, grad in zip(self._views, gradients_of(params), strict=True):
            # The usual gradient passes by identity alone: FSDP2 gives it its parameter's own spec.
            if type(grad) is DTensor and spec_token(grad) is view.matching_spec:
                shard = shard_in_place(grad)
                ready.gradients.append(shard if type(shard) is Tensor else local_shard(grad))
            else:
                ready.gradients.append(_unusual_gradient(view, grad, ready))
        return ready

    def _refresh(self) -> None:
        # to_empty() and .to(dtype) put a new local tensor into the same parameter.
        for view in self._views:
            shard, known = local_shard(view.param), view.shard
            if shard is known:
                continue
            if shard.shape != known.shape or shard.dtype != known.dtype or shard.device != known.device:
                raise PresentationError(
                    f"{view.fqn}: this rank's shard was {known.dtype}{tuple(known.shape)} on {known.device} when the "
                    f"optimizer was wrapped and is now {shard.dtype}{tuple(shard.shape)} on {shard.device}; build the "
                    "optimizer and the wrapper after the model has its final dtype, shape and device."
                )
            del self._param_of[id(view.leaf)]
            view.shard = shard
            view.leaf = nn.Parameter(shard.detach(), requires_grad=view.param.requires_grad)
            self._show(view)
        self._relist()

    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Swaps, steps, and swaps back, also when the inner optimizer raises."""
        for index in ready.unaligned:
            # Tensor-parallel replicas arrive as partial sums; the vote has shown that every rank has them.
            param = self._views[index].param
            aligned = param.grad.redistribute(placements=param.placements)  # pyrefly: ignore
            ready.gradients[index] = local_shard(aligned)
        user_state = self.inner.state
        user_lists = [group["params"] for group in self.inner.param_groups]
        shown: defaultdict[Any, Any] = defaultdict(dict)
        shown.update(zip(_renamed(user_state, self._leaf_of), user_state.values(), strict=True))
        try:
            self._enter(shown, ready)
            return self._run(closure, amp)
        finally:
            self._leave(user_state, user_lists)

    def _enter(self, shown: defaultdict[Any, Any], ready: Ready) -> None:
        set_gradients(self._leaves, ready.gradients)
        # Dropped while they are in the cache; after the update, that would fetch each of them once more.
        ready.gradients.clear()
        for group, leaves in zip(self.inner.param_groups, self._leaf_lists, strict=True):
            group["params"] = leaves
        self.inner.state = shown

    def _leave(self, user_state: defaultdict[Any, Any], user_lists: Sequence[list[Tensor]]) -> None:
        shown = self.inner.state
        self.inner.state = user_state
        for group, params in zip(self.inner.param_groups, user_lists, strict=True):
            group["params"] = params
        # A leaf that kept its gradient would hold the memory past zero_grad(set_to_none=True).
        set_gradients(self._leaves, repeat(None, len(self._leaves)))
        if shown is user_state:
            return
        params = list(_renamed(shown, self._param_of))
        # Nearly always true, and an identity test costs a tenth of filing each value anew under a tensor.
        unchanged = len(shown) == len(user_state) and all(map(is_, params, user_state))
        if not (unchanged and all(map(is_, shown.values(), user_state.values()))):
            restored = dict(zip(params, shown.values(), strict=True))
            user_state.clear()
            user_state.update(restored)

    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """The local tensor itself."""
        return local


def _unusual_gradient(view: _View, grad: Tensor | None, ready: Ready) -> Tensor | None:
    """This rank's part of a gradient, or None when there is none or, as noted in ``ready``, not yet."""
    if grad is None:
        return None
    param = view.param
    if not isinstance(grad, DTensor):
        raise PresentationError(
            f"{view.fqn}: the parameter is a DTensor placed {param.placements}, but its gradient is a plain "
            f"tensor of shape {tuple(grad.shape)}; assign gradients as DTensors placed like the parameter."
        )
    if not same_spec(grad, param):
        ready.unaligned[len(ready.gradients)] = view.fqn
        return None
    view.matching_spec = spec_token(grad)
    return local_shard(grad)


def _renamed(state: Iterable[Any], names: dict[int, Tensor]) -> Iterator[Any]:
    """The keys of ``state``, tensors by the name they have in ``names``; all else keeps its own."""
    keys = list(state)
    return map(names.get, map(id, keys), keys)
