"""``local``: the inner optimizer sees this rank's shard of each parameter, a plain tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from operator import is_
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError, PresentationError
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.presentation import Presentation, Ready
from shardopt.torch_compat import (
    gradients_of,
    local_shard,
    same_spec,
    set_gradients,
    shard_in_place,
    spec_token,
    stand_in,
    trainable_of,
)

__all__ = ["LocalPresentation"]

# What torch's vector loops take at once, at most; they round the rest by other instructions.
_VECTOR_ELEMENTS = 64
_MOST_SHOWN = 20


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
        # Of each DTensor parameter, in one order: its name, itself, its shard, the leaf over it, and the spec of a
        # gradient placed like it. Five lists, because objects that hold the five would have to be fetched too.
        self._fqns: list[str] = []
        self._params: list[DTensor] = []
        self._shards: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._specs: list[object] = []
        self._trainable: list[bool] = []
        self._leaf_of: dict[int, Tensor] = {}
        self._param_of: dict[int, Tensor] = {}
        self._leaf_lists: list[list[Tensor]] = []
        # The state as it was shown last, its keys, and the user's keys of it. They are compared with the user's state
        # before each use; until then they keep what the user may have thrown out of it.
        self._shown: defaultdict[Any, Any] = defaultdict(dict)
        self._shown_keys: list[Any] = []
        self._user_keys: list[Any] = []

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
            shard = local_shard(param)
            self._fqns.append(item.fqn)
            self._params.append(param)
            self._shards.append(shard)
            self._leaves.append(_leaf(param, shard))
            self._specs.append(spec_token(param))
            state = self.inner.state.get(param) or {}
            state.update((entry, local_shard(value)) for entry, value in state.items() if isinstance(value, DTensor))
        self._relist()

    def _relist(self) -> None:
        self._leaf_of = {id(param): leaf for param, leaf in zip(self._params, self._leaves, strict=True)}
        self._param_of = {id(leaf): param for param, leaf in zip(self._params, self._leaves, strict=True)}
        self._leaf_lists = [[self._leaf_of.get(id(p), p) for p in known] for known in self._lists]
        self._shown = defaultdict(dict)
        self._shown_keys = []
        self._user_keys = []

    def explained(self) -> list[str]:
        """Where the update equals the unsharded one to rounding only."""
        fused = {id(param) for group in self.inner.param_groups if group.get("fused") for param in group["params"]}
        rounded = [
            item.fqn
            for item in self.tracked
            if isinstance(item.param, DTensor)
            and item.local.numel() % _VECTOR_ELEMENTS
            and item.local.numel() < item.param.numel()
            and (id(item.param) in fused or item.param.dtype in (torch.bfloat16, torch.float16))
        ]
        if not rounded:
            return []
        named = ", ".join(rounded[:_MOST_SHOWN]) + f" and {len(rounded) - _MOST_SHOWN} more" * (
            len(rounded) > _MOST_SHOWN
        )
        return [
            "equal to the unsharded run to rounding only, since fused kernels and 16-bit types round the end of a "
            f"shard that is no multiple of {_VECTOR_ELEMENTS} elements otherwise: {named}"
        ]

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
        self._check_parameters()
        if not all(map(is_, map(shard_in_place, self._params), self._shards)):
            self._refresh()
        trainable = trainable_of(self._params)
        if trainable != self._trainable:
            self._trainable = trainable
            for leaf, does in zip(self._leaves, trainable, strict=True):
                leaf.requires_grad_(does)
        grads = gradients_of(self._params)
        parts = self._usual_parts(grads)
        if parts is not None:
            return Ready(parts)
        self._note_missing(self._params, grads)
        ready = Ready()
        for grad in grads:
            ready.gradients.append(self._part_of(grad, ready))
        return ready

    def _usual_parts(self, grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """This rank's part of every gradient, if all are there and placed as they were last; else None.

        FSDP2 gives a gradient its parameter's own spec, and lists of the same objects are equal without a look at them.
        Loops in C, one after the other, are quicker than a single one of Python.
        """
        if set(map(type, grads)) != {DTensor}:
            return None
        sharded = cast("Sequence[DTensor]", grads)
        if list(map(spec_token, sharded)) != self._specs:
            return None
        parts: list[Tensor | None] = list(map(shard_in_place, sharded))
        return parts if set(map(type, parts)) == {Tensor} else None

    def _part_of(self, grad: Tensor | None, ready: Ready) -> Tensor | None:
        """This rank's part of the next gradient, or None when there is none or, as noted in ``ready``, not yet."""
        if grad is None:
            return None
        index = len(ready.gradients)
        if not isinstance(grad, DTensor):
            raise PresentationError(
                f"{self._fqns[index]}: the parameter is a DTensor placed {self._params[index].placements}, but its "
                f"gradient is a plain tensor of shape {tuple(grad.shape)}; assign gradients as DTensors placed like "
                "the parameter."
            )
        spec = spec_token(grad)
        if spec is not self._specs[index]:
            if not same_spec(grad, self._params[index]):
                ready.unaligned[index] = self._fqns[index]
                return None
            self._specs[index] = spec
        return local_shard(grad)

    def _refresh(self) -> None:
        # to_empty() and .to(dtype) put a new local tensor into the same parameter.
        self.identity.check()
        for index, (param, known) in enumerate(zip(self._params, self._shards, strict=True)):
            shard = local_shard(param)
            if shard is not known:
                self._shards[index], self._leaves[index] = shard, _leaf(param, shard)
        self._relist()

    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Swaps, steps, and swaps back, also when the inner optimizer raises."""
        for index in ready.unaligned:
            # Tensor-parallel replicas arrive as partial sums; the vote has shown that every rank has them.
            param = self._params[index]
            aligned = param.grad.redistribute(placements=param.placements)  # pyrefly: ignore
            ready.gradients[index] = local_shard(aligned)
        user_state = self.inner.state
        user_lists = [group["params"] for group in self.inner.param_groups]
        if not (_same(self._user_keys, user_state) and _same(self._shown.values(), user_state.values())):
            self._user_keys = list(user_state)
            self._shown_keys = _renamed(self._user_keys, self._leaf_of)
            self._shown = defaultdict(dict, zip(self._shown_keys, user_state.values(), strict=True))
        try:
            self._enter(ready)
            return self._run(closure, amp)
        finally:
            self._leave(user_state, user_lists)

    def _enter(self, ready: Ready) -> None:
        set_gradients(self._leaves, ready.gradients)
        # Dropped while they are in the cache; after the update, that would fetch each of them once more.
        ready.gradients.clear()
        for group, leaves in zip(self.inner.param_groups, self._leaf_lists, strict=True):
            group["params"] = leaves
        self.inner.state = self._shown

    def _leave(self, user_state: defaultdict[Any, Any], user_lists: Sequence[list[Tensor]]) -> None:
        shown = self.inner.state
        self.inner.state = user_state
        for group, params in zip(self.inner.param_groups, user_lists, strict=True):
            group["params"] = params
        self._clear_cleared()
        # A leaf that kept its gradient would hold the memory past zero_grad(set_to_none=True).
        set_gradients(self._leaves, repeat(None, len(self._leaves)))
        if shown is user_state:
            return
        # Compared with the keys that were shown, which are in the cache: the user's are not.
        if not (_same(self._shown_keys, shown) and _same(shown.values(), user_state.values())):
            restored = dict(zip(_renamed(list(shown), self._param_of), shown.values(), strict=True))
            user_state.clear()
            user_state.update(restored)

    def _clear_cleared(self) -> None:
        """Takes the user's gradients away where the rule has taken the leaves' (its own ``zero_grad``).

        One look tells, nearly always: a rule clears all of them or none.
        """
        for param, leaf in zip(self._params, self._leaves, strict=True):
            if leaf.grad is not None:
                return
            if param.grad is not None:
                break
        else:
            return
        for param, leaf in zip(self._params, self._leaves, strict=True):
            if leaf.grad is None:
                param.grad = None

    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """The local tensor itself."""
        return local


def _leaf(param: DTensor, shard: Tensor) -> nn.Parameter:
    return stand_in(param, shard.detach())


def _renamed(keys: Sequence[Any], names: dict[int, Tensor]) -> list[Any]:
    """The keys, tensors by the name they have in ``names``; all else keeps its own."""
    return list(map(names.get, map(id, keys), keys))


def _same(left: Collection[object], right: Collection[object]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(left) == len(right) and all(map(is_, left, right))
