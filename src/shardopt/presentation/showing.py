"""The moment in which an inner optimizer sees whole parameters in place of the user's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardopt.torch_compat import set_gradients

__all__ = ["Showing"]


class Showing:
    """For as long as it is entered, the inner optimizer's groups and state hold leaves over whole parameters.

    The lists of the groups stay the same objects: some rules remember one.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        leaf_of: Mapping[int, nn.Parameter],
        param_of: Mapping[int, Tensor],
        visible: Callable[[], Sequence[tuple[nn.Parameter, Tensor, Tensor | None]]],
    ) -> None:
        """Takes what there is to show.

        Args:
            inner: the optimizer.
            leaf_of: by a parameter's id, its leaf.
            param_of: by a leaf's id, its parameter.
            visible: tells, each time, which leaves are shown, with the memory of parameter and gradient.
        """
        self._inner = inner
        self._leaf_of = leaf_of
        self._param_of = param_of
        self._visible = visible
        self._lists: list[list[Tensor]] = []
        self._state: Any = None

    def __enter__(self) -> Showing:
        inner = self._inner
        visible = self._visible()
        for leaf, whole, _ in visible:
            leaf.data = whole
        set_gradients([leaf for leaf, _, _ in visible], [gradient for _, _, gradient in visible])
        seen = {id(leaf) for leaf, _, _ in visible}
        self._lists = [list(group["params"]) for group in inner.param_groups]
        for group in inner.param_groups:
            leaves = [self._leaf_of[id(param)] for param in group["params"]]
            group["params"][:] = [leaf for leaf in leaves if id(leaf) in seen]
        self._state = inner.state
        inner.state = _renamed(self._state, self._leaf_of)
        return self

    def __exit__(self, *raised: object) -> None:
        inner = self._inner
        shown, inner.state = inner.state, self._state
        for group, params in zip(inner.param_groups, self._lists, strict=True):
            group["params"][:] = params
        restored = _renamed(shown, self._param_of)
        self._state.clear()
        self._state.update(restored)


def _renamed(state: Any, names: Mapping[int, Tensor]) -> defaultdict[Any, Any]:
    """The same values under other keys; what is not named keeps its own."""
    return defaultdict(dict, {names.get(id(key), key): value for key, value in state.items()})
