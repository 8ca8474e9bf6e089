"""A parameter, and what stands for it while an optimizer sees it whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardopt.errors import PlacementError
from shardopt.geometry import Box
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.ownership import Holdings

__all__ = ["Shown", "refuse_shared", "view_of"]


@dataclass(slots=True)
class Shown:
    """One parameter, and what stands for it during a step.

    Attributes:
        item: the parameter.
        holdings: which ranks hold what of it.
        owner: the rank that keeps its state, as a place in the scope; None when every rank has its own.
        leaf: what the inner optimizer sees; without memory between steps.
        whole: in a step, all of the parameter.
        is_shard: whether that is the shard itself.
        gradient: in a step, all of its gradient, if there is one.
        part: in a step, this rank's part of the gradient.
    """

    item: Tracked
    holdings: Holdings
    owner: int | None
    leaf: nn.Parameter
    whole: Tensor | None = None
    is_shard: bool = False
    gradient: Tensor | None = None
    part: Tensor | None = None

    @property
    def shard(self) -> Tensor:
        """This rank's part of the parameter."""
        return self.item.local.detach()

    def is_idle(self, has_gradient: bool) -> bool:
        """Whether no rule updates it: then it is not shown, and stays where it is."""
        return not has_gradient and not self.item.param.requires_grad

    def is_seen_in(self, value: object) -> bool:
        """Whether a value is the leaf, or shares the memory that the whole parameter has for a step."""
        if value is self.leaf:
            return True
        if not isinstance(value, Tensor) or not value.numel() or self.whole is None or self.is_shard:
            return False
        # Those of other classes are made of tensors, and have no memory themselves.
        if type(value) not in (Tensor, nn.Parameter):
            return False
        return value.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr()


def refuse_shared(shown: Sequence[Shown], inner: torch.optim.Optimizer, constants: Sequence[str] = ()) -> None:
    """Checks, after an update, that state shares no memory with whole parameters, which go, nor with other state.

    Args:
        shown: what the optimizer has seen.
        inner: the optimizer.
        constants: attributes whose tensors are no state, and may be in the state of several parameters.

    Raises:
        PlacementError: an entry does.
    """
    holder: dict[int, str] = {}
    tables = {id(leaf) for name in constants for leaf in tree_leaves(vars(inner).get(name)) if isinstance(leaf, Tensor)}
    for one in shown:
        for entry, value in (inner.state.get(one.item.param) or {}).items():
            here = f"{one.item.fqn}: state {entry!r}"
            if isinstance(value, Tensor) and id(value) not in tables and holder.setdefault(id(value), here) != here:
                raise PlacementError(
                    f"{here} is the same tensor as {holder[id(value)]}, and parameters of one rank would share what "
                    "those of two ranks cannot; keep a tensor for each, or state under a name: self.state['name']."
                )
            if one.is_seen_in(value):
                raise PlacementError(
                    f"{one.item.fqn}: state {entry!r} is the parameter itself or a view of it, which is whole only "
                    "while the optimizer steps; a rule must keep a copy (clone()). compute='dtensor' shows it the "
                    "parameters themselves."
                )


def view_of(whole: Tensor, box: Box) -> Tensor:
    """The view of a box."""
    return whole[tuple(slice(start, end) for start, end in zip(box.offset, box.end, strict=True))]
