"""``replicated``: every rank updates every parameter, whole, as an unsharded run does."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PresentationError, RankFailureError
from shardopt.layouts.tracked import Keeping, Tracked
from shardopt.presentation.ownership import Balance
from shardopt.presentation.presentation import Agree, Ready
from shardopt.presentation.showing import Showing
from shardopt.presentation.shown import Shown
from shardopt.presentation.stowage import Stowage, Stowed
from shardopt.presentation.whole import WholePresentation
from shardopt.scope import Scope

__all__ = ["ReplicatedPresentation"]


class ReplicatedPresentation(WholePresentation):
    """Shows every rank all parameters. Right for rules that couple parameters, draw, or call closures.

    Random numbers come from generators that are seeded for each step: by the first rank's ``torch.initial_seed()`` of
    when the optimizer was wrapped, and the number of steps. So ranks draw the same, and what else draws is not
    disturbed; the numbers are not those of an unsharded run.
    """

    name: ClassVar[str] = "replicated"
    calls_closure: ClassVar[bool] = True
    sees_closure: ClassVar[bool] = True

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._seed = 0
        self._num_steps = 0
        self._stowage = Stowage(self._scope, self._channel)
        # By the parameter's id: what state looks like that another rank keeps.
        self._forms: dict[int, Any] = {}

    def join(self, scope: Scope, balance: Balance, agree: Agree) -> None:
        """Collective. Takes the ranks, and the first one's seed."""
        super().join(scope, balance, agree)
        self._stowage = Stowage(scope, self._channel)
        self._seed = json.loads(scope.exchange("seed", json.dumps(torch.initial_seed()).encode())[0])

    @property
    def draws(self) -> tuple[int, int]:
        """What the random numbers of the next step are made of: the seed, and the number of steps before it."""
        return self._seed, self._num_steps

    def set_draws(self, seed: int, num_steps: int) -> None:
        """Goes on from saved ``draws``."""
        self._seed, self._num_steps = seed, num_steps

    def state_changed(self) -> None:
        """The owners tell the form of their state anew in the next step."""
        self._stowage.forget()

    def check_new(self, tracked: Sequence[Tracked]) -> None:
        """Checks also that no parameter is this rank's own.

        Raises:
            PresentationError: some are, and a rule that couples parameters would take the shared ones apart.
        """
        super().check_new(tracked)
        own = [item.fqn for item in tracked if self.own_plain and not isinstance(item.param, DTensor)]
        if own:
            raise PresentationError(
                f"{', '.join(own[:5])}{', ...' * (len(own) > 5)}: with plain='per_rank' each rank has parameters of "
                f"its own, and {type(self.inner).__name__} couples all parameters that it has; give those that are "
                "each rank's own an optimizer of their own."
            )

    def targets(self, shown: Shown) -> Sequence[int]:
        """All ranks."""
        return () if shown.owner is None else range(self._scope.size)

    def keeping(self, shown: Shown) -> Keeping:
        """Between steps on one rank alone."""
        return Keeping.HERE if shown.owner == self._scope.index else Keeping.ELSEWHERE

    def step(self, ready: Ready, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        """As ``owner`` does, with the state of all parameters lent to every rank."""
        self._fetch_state()
        try:
            return super().step(ready, closure, amp)
        finally:
            self._put_state_away()

    def _shared(self) -> list[Shown]:
        return [shown for shown in self._shown if shown.owner is not None] if self._scope.size > 1 else []

    def _fetch_state(self) -> None:
        """Collective."""
        shared = self._shared()
        stowed: list[Stowed] = []
        for shown in shared:
            here = shown.owner == self._scope.index
            state = self.inner.state.get(shown.item.param) if here else self._forms.get(id(shown.item.param))
            stowed.append(Stowed(shown.owner or 0, state or None))
        if shared:
            self._stowage.fetch(stowed, shared[0].item.local.device)
        for shown, one in zip(shared, stowed, strict=True):
            if one.owner != self._scope.index and one.state is not None:
                self.inner.state[shown.item.param] = one.state

    def _put_state_away(self) -> None:
        for shown in self._shared():
            if shown.owner != self._scope.index:
                one = Stowed(shown.owner or 0, self.inner.state.pop(shown.item.param, None))
                self._stowage.put_away(one)
                self._forms[id(shown.item.param)] = one.state

    def _digest(self) -> bytes:
        """Of the updated parameters, which every rank has computed from the same numbers."""
        sums = [_sum_of_bits(shown.whole) for shown in self._shared() if shown.whole is not None]
        return torch.stack(sums).cpu().numpy().tobytes() if sums else b""

    def _agree_on_update(self, failure: BaseException | None) -> int:
        """Collective."""
        try:
            return self._agree("update", failure, b"" if failure else self._digest(), self.cleared())
        except RankFailureError as verdict:
            if isinstance(failure, RankFailureError) and failure.operation == "closure":
                # All have this one already. The vote on the update only adds that it failed everywhere, and hides who
                # failed first.
                raise failure from failure.__cause__
            if not verdict.disagree or verdict.failures or verdict.missing:
                raise
            raise RankFailureError(
                f"update: {type(self.inner).__name__} has made different parameters of the same numbers on "
                f"{len(verdict.disagree)} groups of ranks ({', '.join(map(str, verdict.disagree.values()))}): its rule "
                "depends on something that differs between ranks. Nothing was brought back into the model.",
                operation=verdict.operation,
                disagree=verdict.disagree,
            ) from None

    def _update(self, closure: Callable[[], Any] | None, amp: dict[str, Tensor]) -> Any:
        digest = hashlib.blake2b(f"{self._seed} {self._num_steps}".encode(), digest_size=8).digest()
        with self.showing() as showing:
            between = None if closure is None else lambda: self._call(closure, showing)
            with _seeded(int.from_bytes(digest, "little"), {shown.shard.device for shown in self._shown}) as suspended:
                result = self._run(None if between is None else lambda: suspended(between), amp)
        self._num_steps += 1
        return result

    def _call(self, closure: Callable[[], Any], showing: Showing) -> Any:
        """Collective. The closure, on the sharded model with what the optimizer has made of it; then its gradients."""
        failure: BaseException | None = None
        loss: Any = None
        ready = Ready()
        showing.__exit__()
        try:
            try:
                self._return()
                with torch.enable_grad():
                    loss = closure()
                ready = self.preflight()
            except BaseException as error:
                failure = error
            self._agree("closure", failure, b"", 0)
            self._align(ready)
            self._gather()
            loss = self._common(loss)
            self.has_written = True
            return loss
        finally:
            showing.__enter__()

    def _common(self, loss: Any) -> Any:
        """Collective. The loss, or where ranks have different ones their mean: the rule must see one number."""
        told = self._scope.exchange("loss", json.dumps(None if loss is None else _number(loss)).encode())
        losses = [json.loads(one) for one in told]
        if loss is None or all(one == losses[0] for one in losses):
            return loss
        mean = sum(losses) / len(losses)
        return torch.full_like(loss.detach(), mean) if isinstance(loss, Tensor) else mean


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """A number that differs where tensors do, nearly always: one pass, and in any order the same."""
    wide = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(wide).sum(dtype=torch.int64)


@contextmanager
def _seeded(seed: int, devices: set[torch.device]) -> Generator[Callable[[Callable[[], Any]], Any]]:
    """Seeds the generators of torch, NumPy and Python, and puts them back.

    Yields:
        Runs a function with the generators as they were, whose draws count.
    """
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    outside = _states()

    def suspended(function: Callable[[], Any]) -> Any:
        nonlocal outside
        inside = _states()
        _restore(outside)
        try:
            return function()
        finally:
            outside = _states()
            _restore(inside)

    with torch.random.fork_rng(devices=indices):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield suspended
        finally:
            np.random.set_state(outside[0])
            random.setstate(outside[1])
    torch.set_rng_state(outside[2])


def _states() -> tuple[Any, Any, Tensor]:
    return np.random.get_state(), random.getstate(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, Tensor]) -> None:
    np.random.set_state(states[0])
    random.setstate(states[1])
    torch.set_rng_state(states[2])
