"""State that every rank needs in a step, and one keeps between steps."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from shardopt.geometry import Box
from shardopt.presentation.transport import Move, Transport
from shardopt.scope import Scope
from shardopt.scope.channel import Channel

__all__ = ["Stowage", "Stowed"]


@dataclass(frozen=True, slots=True)
class _Absent:
    """Stands for a tensor that another rank keeps.

    Attributes:
        number: among the distinct tensors of one parameter's state.
        shape: its shape.
        stride: how it lies in memory: products of a matrix that lies otherwise round otherwise.
        dtype: its dtype.
        device: type of the device it is on.
    """

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(slots=True)
class Stowed:
    """The state of one parameter.

    Attributes:
        owner: the rank that keeps its tensors, as a place in the scope.
        state: on the owner all of it; elsewhere the same with stand-ins; None when there is none.
    """

    owner: int
    state: Any = None


class Stowage:
    """Lends the owners' state to every rank for a step, and takes it back.

    What is no tensor is kept on every rank. Its form is remembered from step to step; after ``forget`` the owners tell
    it anew.
    """

    def __init__(self, scope: Scope, channel: Channel) -> None:
        self._scope = scope
        self._channel = channel
        self._known = False

    def forget(self) -> None:
        """The owners' state has been changed by something else than a step."""
        self._known = False

    def fetch(self, stowed: Sequence[Stowed], device: torch.device) -> None:
        """Collective. Every rank gets tensors of its own where it has stand-ins.

        Args:
            stowed: of all parameters, in an order that is the same on every rank.
            device: of the exchange.
        """
        if not self._known:
            self._tell(stowed)
            self._known = True
        held = [_distinct(one.state) for one in stowed]
        tensors: list[Tensor] = []
        moves: list[list[Move]] = []
        for one, some in zip(stowed, held, strict=True):
            for item in some:
                tensor = item if isinstance(item, Tensor) else _made(item, device)
                box = Box.whole(tuple(tensor.shape))
                num_bytes = tensor.numel() * tensor.element_size()
                others = [rank for rank in range(self._scope.size) if rank != one.owner]
                if num_bytes:
                    moves.append([Move(len(tensors), box, one.owner, rank, num_bytes) for rank in others])
                tensors.append(tensor)
        Transport(moves, self._channel).run(
            lambda move: tensors[move.tensor].detach(), lambda move: tensors[move.tensor], device
        )
        rest = iter(tensors)
        for one, some in zip(stowed, held, strict=True):
            own = [next(rest) for _ in some]
            if one.owner != self._scope.index and one.state is not None:
                one.state = _filled(one.state, own)

    def put_away(self, one: Stowed) -> None:
        """Replaces what is not this rank's to keep by stand-ins."""
        if one.owner != self._scope.index and one.state is not None:
            one.state = _emptied(one.state)

    def _tell(self, stowed: Sequence[Stowed]) -> None:
        """Collective. Owners tell the form of their state. Pickled: from this program to itself, and kept nowhere."""
        own = self._scope.index
        mine = [_emptied(one.state) if one.owner == own else None for one in stowed]
        told = [pickle.loads(data) for data in self._scope.exchange("state", pickle.dumps(mine))]
        for index, one in enumerate(stowed):
            if one.owner != own:
                one.state = told[one.owner][index]


def _emptied(state: Any) -> Any:
    if state is None:
        return None
    numbers: dict[int, int] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = numbers.setdefault(id(leaf), len(numbers))
        # As a copy of it lies: the same for a dense tensor, in one piece for a part of another.
        stride = torch.empty_like(leaf, device="meta").stride()
        return _Absent(number, tuple(leaf.shape), stride, leaf.dtype, leaf.device.type)

    return tree_map(stand_in, state)


def _filled(state: Any, tensors: Sequence[Tensor]) -> Any:
    def tensor_of(leaf: Any) -> Any:
        return tensors[leaf.number] if isinstance(leaf, _Absent) else leaf

    return tree_map(tensor_of, state)


def _distinct(state: Any) -> list[Tensor | _Absent]:
    """Tensors or stand-ins of a state, each once, in the order in which they are met."""
    found: dict[int, Tensor | _Absent] = {}
    for leaf in _leaves(state):
        found.setdefault(leaf.number if isinstance(leaf, _Absent) else id(leaf), leaf)
    return list(found.values())


def _leaves(state: Any) -> Iterator[Tensor | _Absent]:
    for leaf in tree_flatten(state)[0]:
        if isinstance(leaf, (Tensor, _Absent)):
            yield leaf


def _made(absent: _Absent, device: torch.device) -> Tensor:
    place = device if absent.device == device.type else torch.device(absent.device)
    return torch.empty_strided(absent.shape, absent.stride, dtype=absent.dtype, device=place)
