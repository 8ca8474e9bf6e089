"""What ``owner`` and ``replicated`` share: the inner optimizer sees whole parameters while it steps, and only then."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError, PresentationError
from shardopt.geometry import Box
from shardopt.layouts.tracked import Keeping, Tracked
from shardopt.presentation.ownership import Balance, exchange_boxes
from shardopt.presentation.presentation import Agree, Presentation, Ready, alone
from shardopt.presentation.showing import Showing
from shardopt.presentation.shown import Shown, refuse_shared, view_of
from shardopt.presentation.transport import Move, Transport
from shardopt.scope import Scope
from shardopt.scope.channel import Channel
from shardopt.torch_compat import gradients_of, local_shard, same_spec, stand_in

__all__ = ["WholePresentation"]


# Facts of the vote on an update.
_CLEARED, _KEPT = 1, 2
# Plans of exchanges that are kept: one for each set of parameters that had gradients.
_MOST_ROUTES = 8


@dataclass(slots=True)
class _Routes:
    """How the parameters of a step travel; the same in each step with the same gradients."""

    there: Transport
    back: Transport


class WholePresentation(Presentation):
    """Gathers parameters and gradients, whole, on the ranks that update them, and brings the updates back.

    The memory for that is taken before the ranks vote on a step, so that a lack of it is an error like any other.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._shown: list[Shown] = []
        self._shards: list[Tensor] = []
        self._leaf_of: dict[int, nn.Parameter] = {}
        self._param_of: dict[int, Tensor] = {}
        self._routes: dict[tuple[Any, ...], _Routes] = {}
        self._scope = Scope.single()
        self._channel = Channel(self._scope)
        self._balance = Balance(1)
        self._agree: Agree = alone
        self._has: list[bool] = []

    # What the two differ in.

    @abstractmethod
    def targets(self, shown: Shown) -> Sequence[int]:
        """The ranks that update the parameter, as places in the scope."""

    @abstractmethod
    def keeping(self, shown: Shown) -> Keeping:
        """Where its state is, seen from this rank."""

    # Construction.

    def join(self, scope: Scope, balance: Balance, agree: Agree) -> None:
        """Collective. Takes the ranks, and what of them is shared by all wrapped optimizers."""
        self._scope = scope
        self._channel = Channel(scope)
        self._balance = balance
        self._agree = agree

    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Checks that state that already exists is of the whole parameter, or placed like it."""
        problems: list[str] = []
        for item in tracked:
            for entry, value in (self.inner.state.get(item.param) or {}).items():
                param = item.param
                if self.is_scratch(entry):
                    continue
                if isinstance(value, DTensor):
                    fits = isinstance(param, DTensor) and value.shape == param.shape and same_spec(value, param)
                else:
                    # Of the whole parameter's shape, it was made in full on every rank; the owner's is used.
                    plain = isinstance(value, Tensor) and value.dim() and value.shape != param.shape
                    fits = not (isinstance(param, DTensor) and plain)
                if not fits:
                    problems.append(
                        f"{item.fqn}: state {entry!r} of shape {tuple(value.shape)} exists already, and nothing says "
                        "which part of the parameter's state it is; wrap the optimizer before its first step, and load "
                        "its state."
                    )
        if problems:
            raise PlacementError("\n".join(problems))

    def described(self, item: Tracked) -> str:
        """What of a new parameter has to be the same on every rank before ``register`` communicates."""
        state = self.inner.state.get(item.param) or {}
        return repr([(entry, isinstance(value, DTensor)) for entry, value in state.items()])

    def register(self, tracked: Sequence[Tracked]) -> None:
        """Collective, if there are any. Finds out who holds what, and decides who updates which."""
        super().register(tracked)
        if not tracked:
            return
        shared = [item for item in tracked if not self._is_own(item)]
        owners = iter(self._balance.assign([Box.whole(item.shape).volume for item in shared]))
        for item, holdings in zip(tracked, exchange_boxes(tracked, self._scope), strict=True):
            owner = None if self._is_own(item) else next(owners)
            leaf = stand_in(item.param, item.local.new_empty(0))
            shown = Shown(item, holdings, owner, leaf)
            item.keeping = Keeping.BESIDE_SHARD if owner is None else self.keeping(shown)
            self._convert_state(item)
            self._shown.append(shown)
        self._shards = [shown.item.local for shown in self._shown]
        self._leaf_of = {id(shown.item.param): shown.leaf for shown in self._shown}
        self._param_of = {id(shown.leaf): shown.item.param for shown in self._shown}
        self._routes.clear()

    def explained(self) -> list[str]:
        """Who keeps the state of how much."""
        loads: dict[int, tuple[int, int]] = {}
        for shown in self._shown:
            if shown.owner is not None:
                count, elements = loads.get(shown.owner, (0, 0))
                loads[shown.owner] = count + 1, elements + Box.whole(shown.item.shape).volume
        ranks = self._scope.ranks
        said = [
            f"rank {ranks[owner]}: {count} ({elements} elements)" for owner, (count, elements) in sorted(loads.items())
        ]
        return [f"parameters whose state a rank keeps, whole: {', '.join(said)}"] if len(ranks) > 1 else []

    def _is_own(self, item: Tracked) -> bool:
        return self.own_plain and not isinstance(item.param, DTensor)

    def _convert_state(self, item: Tracked) -> None:
        state = self.inner.state.get(item.param) or {}
        # On every rank, since it communicates; the votes before have shown that all have the same entries.
        whole = {entry: value.full_tensor() for entry, value in state.items() if isinstance(value, DTensor)}
        state.update(whole)
        if item.keeping is Keeping.ELSEWHERE:
            self.inner.state.pop(item.param, None)

    # Before a step.

    def preflight(self) -> Ready:
        """Checks parameters and gradients, and takes the memory for whole ones."""
        self._check_parameters()
        shards = [shown.item.local for shown in self._shown]
        if not all(map(is_, shards, self._shards)):
            self.identity.check()
            self._shards = shards
        params = [shown.item.param for shown in self._shown]
        gradients = gradients_of(params)
        self._note_missing(params, gradients)
        ready = Ready()
        for index, (shown, gradient) in enumerate(zip(self._shown, gradients, strict=True)):
            shown.part = self._part_of(shown, gradient, index, ready)
            if gradient is None and shown.owner is not None:
                ready.without.append(f"{shown.item.fqn}{'' if shown.item.param.requires_grad else ' (frozen)'}")
        self._has = [gradient is not None for gradient in gradients]
        self._take_memory(gradients)
        return ready

    def _part_of(self, shown: Shown, gradient: Tensor | None, index: int, ready: Ready) -> Tensor | None:
        item, param = shown.item, shown.item.param
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise PresentationError(f"{item.fqn}: its gradient is {gradient.layout}; whole updates take dense ones.")
        if gradient.dtype != param.dtype:
            raise PresentationError(
                f"{item.fqn}: its gradient is {gradient.dtype} and the parameter {param.dtype}; keep gradients in the "
                "parameter's dtype."
            )
        if not isinstance(param, DTensor):
            return gradient
        if not isinstance(gradient, DTensor):
            raise PresentationError(
                f"{item.fqn}: the parameter is a DTensor placed {param.placements}, but its gradient is a plain tensor "
                f"of shape {tuple(gradient.shape)}; assign gradients as DTensors placed like the parameter."
            )
        if not same_spec(gradient, param):
            ready.unaligned[index] = item.fqn
            return None
        return local_shard(gradient)

    def _take_memory(self, gradients: Sequence[Tensor | None]) -> None:
        own = self._scope.index
        for shown, gradient in zip(self._shown, gradients, strict=True):
            if shown.owner is not None and (own not in self.targets(shown) or shown.is_idle(gradient is not None)):
                continue
            shard = shown.shard
            shown.leaf.requires_grad_(shown.item.param.requires_grad)
            # With other ranks in it, a step writes to no shard before all of them have stepped.
            is_all = shown.item.box == Box.whole(shown.item.shape) and (self._scope.size == 1 or shown.owner is None)
            shown.is_shard = is_all
            shown.whole = shard if is_all else shard.new_empty(shown.item.shape)
            if gradient is not None and not is_all:
                shown.gradient = shard.new_empty(shown.item.shape)

    def release(self) -> None:
        """Gives the memory of a step back."""
        for shown in self._shown:
            shown.whole = shown.gradient = shown.part = None
            shown.leaf.grad = None
            shown.leaf.data = shown.item.local.new_empty(0)

    # The step.

    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """Gathers, steps, and once every rank has stepped brings the updates back."""
        self._align(ready)
        self._gather()
        failure: BaseException | None = None
        result: Any = None
        try:
            result = self._update(closure, amp)
            refuse_shared(self.visible(), self.inner, self.constants)
        except BaseException as error:
            failure = error
        if self._agree_on_update(failure) == _CLEARED:
            for shown in self._shown:
                shown.item.param.grad = None
        self._return()
        return result

    def cleared(self) -> int:
        """For the vote: whether the rule has taken the gradients away that it was shown, as its ``zero_grad`` does."""
        left = [shown.leaf.grad is not None for shown in self.visible() if shown.gradient is not None]
        return 0 if not left else _KEPT if any(left) else _CLEARED

    def _agree_on_update(self, failure: BaseException | None) -> int:
        """Collective. Whether gradients were cleared, over all ranks."""
        return self._agree("update", failure, b"", self.cleared())

    def _align(self, ready: Ready) -> None:
        for index in ready.unaligned:
            # Tensor-parallel replicas arrive as partial sums; the vote has shown that every rank has them.
            param: Any = self._shown[index].item.param
            self._shown[index].part = local_shard(param.grad.redistribute(placements=param.placements))
        for shown in self.visible():
            if shown.is_shard:
                shown.gradient = shown.part

    def _update(self, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        with self.showing():
            return self._run(closure, amp)

    def showing(self) -> Showing:
        """The moment in which the inner optimizer sees what this rank updates."""

        def visible() -> list[tuple[nn.Parameter, Tensor, Tensor | None]]:
            return [(shown.leaf, shown.whole, shown.gradient) for shown in self._shown if shown.whole is not None]

        return Showing(self.inner, self._leaf_of, self._param_of, visible)

    def visible(self) -> list[Shown]:
        """The parameters that the inner optimizer sees on this rank."""
        return [shown for shown in self._shown if shown.whole is not None]

    def _gather(self) -> None:
        """Collective. Fills whole parameters and gradients."""
        for shown in self.visible():
            if shown.is_shard:
                continue
            for whole, part in ((shown.whole, shown.shard), (shown.gradient, shown.part)):
                if whole is not None and part is not None and part.numel():
                    with torch.no_grad():
                        view_of(whole, shown.item.box).copy_(part)

        def read(move: Move) -> Tensor:
            shown = self._shown[move.tensor // 2]
            part = shown.part if move.tensor % 2 else shown.shard
            assert part is not None  # the ranks have agreed on which parameters have a gradient
            return part

        def write(move: Move) -> Tensor:
            shown = self._shown[move.tensor // 2]
            whole = shown.gradient if move.tensor % 2 else shown.whole
            assert whole is not None
            return view_of(whole, move.box)

        for device, routes in self._routes_now().items():
            routes.there.run(read, write, device)

    def _return(self) -> None:
        """Collective. Brings whole parameters back into the shards."""
        for shown in self.visible():
            if shown.whole is not None and shown.shard.numel() and not shown.is_shard:
                with torch.no_grad():
                    shown.shard.copy_(view_of(shown.whole, shown.item.box))

        def read(move: Move) -> Tensor:
            whole = self._shown[move.tensor].whole
            assert whole is not None
            return view_of(whole, move.box)

        for device, routes in self._routes_now().items():
            routes.back.run(read, lambda move: self._shown[move.tensor].shard, device)

    def _routes_now(self) -> dict[torch.device, _Routes]:
        """For each device the routes of parameters there. Ranks hold a parameter on devices of one type."""
        if self._scope.size == 1:
            return {}
        on: dict[torch.device, list[int]] = {}
        for index, shown in enumerate(self._shown):
            if shown.owner is not None and not shown.is_idle(self._has[index]):
                on.setdefault(shown.item.local.device, []).append(index)
        found: dict[torch.device, _Routes] = {}
        if len(self._routes) > _MOST_ROUTES:
            self._routes.clear()
        for device, indices in sorted(on.items(), key=lambda pair: str(pair[0])):
            key = (device, *indices, *(self._has[index] for index in indices))
            if key not in self._routes:
                self._routes[key] = self._plan(indices)
            found[device] = self._routes[key]
        return found

    def _plan(self, indices: Sequence[int]) -> _Routes:
        there: list[list[Move]] = []
        back: list[list[Move]] = []
        for index in indices:
            shown = self._shown[index]
            to_whole = list(self._moves_there(shown))
            there.append([Move(2 * index, *move) for move in to_whole])
            if self._has[index]:
                there.append([Move(2 * index + 1, *move) for move in to_whole])
            back.append([Move(index, *move) for move in self._moves_back(shown)])
        return _Routes(Transport(there, self._channel), Transport(back, self._channel))

    def _moves_there(self, shown: Shown) -> Iterator[tuple[Box, int, int, int]]:
        for target in self.targets(shown):
            for box in shown.holdings.holders:
                source = shown.holdings.sender(box, target)
                if source != target:
                    yield box, source, target, box.volume * shown.item.param.element_size()

    def _moves_back(self, shown: Shown) -> Iterator[tuple[Box, int, int, int]]:
        targets = self.targets(shown)
        for box, holders in shown.holdings.holders.items():
            for holder in holders:
                if holder not in targets:
                    yield box, targets[0], holder, box.volume * shown.item.param.element_size()

    def to_state(self, tracked: Tracked, local: Tensor) -> Tensor:
        """The tensor itself."""
        return local
