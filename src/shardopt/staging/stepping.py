"""One step of all wrapped optimizers: everything that can fail first, a vote, then the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import PresentationError, RankFailureError
from shardopt.presentation.inventory import Inventory
from shardopt.presentation.presentation import Presentation, Ready
from shardopt.scope import differences
from shardopt.staging.consensus import Consensus
from shardopt.staging.gradients import find_overflow
from shardopt.staging.poison import Poison
from shardopt.staging.presence import Presence
from shardopt.torch_compat import run_post_hooks, run_pre_hooks, run_wrapper_post_hooks, run_wrapper_pre_hooks

__all__ = ["Stepping"]

Closure = Callable[[], Any]


class _Fact(IntFlag):
    """What ranks may differ in, carried by the vote of a step."""

    OVERFLOW = 1
    NO_OVERFLOW = 2


@dataclass(slots=True)
class _Attempt:
    """A step as far as it has come.

    Attributes:
        args: of the step, as hooks get and replace them; ``kwargs`` too.
        amp: what GradScaler has left for it.
        closure: as hooks have left it.
        calls_itself: whether the wrapped optimizer calls the closure.
        loss: what the closure returned.
        ready: what each presentation's preflight found.
        facts: for the vote.
        unscaled: whether gradients were multiplied with the inverse scale.
    """

    args: tuple[Any, ...]
    amp: dict[str, Tensor]
    kwargs: dict[str, Any] = field(default_factory=dict)
    closure: Closure | None = None
    calls_itself: bool = False
    loss: Any = None
    ready: list[Ready] = field(default_factory=list)
    facts: _Fact = field(default_factory=lambda: _Fact(0))
    unscaled: bool = False


class Stepping:
    """Steps the optimizers of one wrapper.

    Attributes:
        presence: which parameters got no gradient in the first step.
    """

    def __init__(
        self, inventory: Inventory, consensus: Consensus, poison: Poison, note_change: Callable[[], None]
    ) -> None:
        self._inventory = inventory
        self._consensus = consensus
        self._poison = poison
        self._note_change = note_change
        self.presence = Presence(inventory, consensus)

    def run(self, outer: torch.optim.Optimizer, closure: Closure | None, amp: dict[str, Tensor]) -> Any:
        """Collective. One step, on every rank or on none; returns the closure's loss.

        Args:
            outer: the wrapper, whose hooks run.
            closure: as in ``torch.optim.Optimizer.step``.
            amp: what GradScaler has left for this step.

        Raises:
            RankFailureError: another rank has failed, or ranks differ; nothing was written.
        """
        presentations = [part.presentation for part in self._inventory.parts]
        attempt = _Attempt((outer,) if closure is None else (outer, closure), amp)
        try:
            return self._run(outer, presentations, attempt)
        finally:
            for one in presentations:
                one.release()

    def _run(self, outer: torch.optim.Optimizer, presentations: list[Presentation], attempt: _Attempt) -> Any:
        failure: BaseException | None = None
        try:
            self._get_ready(outer, presentations, attempt)
        except BaseException as error:
            failure = error
        facts = attempt.facts
        held = _must_agree(attempt.ready)
        try:
            agreed = self._vote(failure, held, facts)
            if self._skips(_Fact(agreed) | facts):
                return attempt.loss
            if not attempt.calls_itself:
                # Otherwise gradients come with the closure.
                self.presence.look()
        except BaseException:
            # Who tries again with these gradients must not divide them by the scale twice.
            if attempt.unscaled:
                _multiply(presentations, attempt.amp["grad_scale"])
            raise
        self._note_change()
        try:
            self._update(presentations, attempt)
            run_wrapper_post_hooks(outer, attempt.args, attempt.kwargs)
        except BaseException as error:
            if any(one.has_written for one in presentations):
                self._poison.set("step", error)
            raise
        return attempt.loss

    def _vote(self, failure: BaseException | None, held: Mapping[str, str], facts: _Fact) -> int:
        """Collective. The vote of a step; where ranks differ, what in."""
        try:
            return self._consensus.vote("step", failure, every_step=True, digest="\n".join(held).encode(), facts=facts)
        except RankFailureError as verdict:
            if not verdict.disagree or verdict.failures or verdict.missing:
                raise
            text = differences(self._consensus.scope, held)
            raise RankFailureError(
                f"step: gradients differ between ranks in what has to be the same; nothing was stepped:\n{text}\n"
                "Every rank needs a gradient of the same parameters, placed alike.",
                operation=verdict.operation,
                disagree=verdict.disagree,
            ) from None

    def _get_ready(self, outer: torch.optim.Optimizer, presentations: list[Presentation], attempt: _Attempt) -> None:
        """Everything that can fail before the first write; what came of it is in ``attempt`` as far as it went."""
        self._poison.check()
        attempt.facts = self._overflow(presentations, attempt.amp)
        if "grad_scale" in attempt.amp and not all(one.unscales_itself for one in presentations):
            # Before hooks, which see from GradScaler what the update will see.
            attempt.unscaled = True
            _multiply(presentations, attempt.amp["grad_scale"].double().reciprocal().float())
        attempt.args, attempt.kwargs = run_wrapper_pre_hooks(outer, attempt.args, attempt.kwargs)
        args = attempt.args
        attempt.closure = args[1] if len(args) > 1 else attempt.kwargs.get("closure")
        attempt.calls_itself = self._inner_calls(attempt.closure)
        _refuse_no_closure(presentations, attempt.closure)
        for one in presentations:
            run_pre_hooks(one.inner, attempt.closure)
        if attempt.closure is not None and not attempt.calls_itself:
            with torch.enable_grad():
                attempt.loss = attempt.closure()
        for one in presentations:
            attempt.ready.append(one.preflight())

    def _update(self, presentations: list[Presentation], attempt: _Attempt) -> None:
        for one, found in zip(presentations, attempt.ready, strict=True):
            closure = attempt.closure if attempt.calls_itself else None
            result = one.step(found, closure, attempt.amp if one.unscales_itself else {})
            attempt.loss = result if attempt.calls_itself else attempt.loss
            run_post_hooks(one.inner, attempt.closure)

    def unscale(self, inverse: Tensor, *, half: bool) -> dict[torch.device, Tensor]:
        """Collective. Unscales all gradients here and agrees on an overflow; see the wrapper's method."""
        failure: BaseException | None = None
        named: list[tuple[str, Tensor]] = []
        found: dict[torch.device, Tensor] = {}
        overflow = False
        try:
            named = [pair for part in self._inventory.parts for pair in part.presentation.local_gradients()]
            if not half:
                _refuse_half(named)
            found = find_overflow([gradient for _, gradient in named], inverse)
            overflow = any(map(bool, found.values()))
        except BaseException as error:
            failure = error
        try:
            # Whatever the wrapper's votes are set to: ranks that skipped apart would be different models.
            agreed = self._consensus.scope.vote("unscale", problem=failure, facts=int(overflow))
        except BaseException:
            # Who tries again with these gradients must not divide them by the scale twice.
            if failure is None:
                find_overflow([gradient for _, gradient in named], inverse.double().reciprocal().float())
            raise
        devices = {*found, *(tracked.local.device for tracked in self._inventory.tracked)}
        return {device: torch.full((), float(agreed), dtype=torch.float32, device=device) for device in devices}

    def _inner_calls(self, closure: Closure | None) -> bool:
        """Whether the wrapped optimizer calls the closure; element-wise ones get its gradients."""
        parts = self._inventory.parts
        if closure is None or not any(part.presentation.calls_closure for part in parts):
            return False
        if len(parts) > 1:
            raise PresentationError("a closure with several optimizers needs all of them to be element-wise.")
        return True

    def _overflow(self, presentations: list[Presentation], amp: dict[str, Tensor]) -> _Fact:
        """What this rank knows of an overflow; nothing where kernels act on the device's verdict, which ranks share.

        torch reduces the verdict over the mesh of the gradients, so it is one for all ranks unless there are plain
        parameters too. Reading it waits for the device.
        """
        if "found_inf" not in amp:
            return _Fact(0)
        if not self._reads_verdict(presentations):
            return _Fact(0)
        if "grad_scale" in amp:
            _refuse_half([pair for one in presentations if not one.unscales_itself for pair in one.local_gradients()])
        return _Fact.OVERFLOW if bool(amp["found_inf"]) else _Fact.NO_OVERFLOW

    def _reads_verdict(self, presentations: list[Presentation]) -> bool:
        if not all(one.unscales_itself for one in presentations):
            return True
        return self._consensus.scope.size > 1 and self._inventory.has_plain

    def _skips(self, facts: _Fact) -> bool:
        """Whether the step is skipped, on all ranks alike."""
        if _Fact.OVERFLOW in facts and _Fact.NO_OVERFLOW in facts:
            # Their scalers are apart by now, so that skipping together would only hide it.
            raise RankFailureError(
                "step: gradients have overflowed on some ranks and not on others, and torch.amp.GradScaler keeps a "
                "scale of its own on each rank; nothing was stepped. Use shardopt.GradScaler, whose ranks agree.",
                operation="step",
            )
        return _Fact.OVERFLOW in facts


def _refuse_no_closure(presentations: Sequence[Presentation], closure: Closure | None) -> None:
    lacking = [type(one.inner).__name__ for one in presentations if one.needs_closure]
    if closure is None and lacking:
        raise PresentationError(
            f"{lacking[0]} needs a closure that evaluates the model and returns the loss: optimizer.step(closure)."
        )


def _must_agree(found: Sequence[Ready]) -> dict[str, str]:
    """What the step communicates about, in words that have to be the same on every rank."""
    unaligned = [f"{fqn}: its gradient, placed unlike the parameter" for one in found for fqn in one.unaligned.values()]
    return dict.fromkeys([*unaligned, *(f"{fqn}: no gradient" for one in found for fqn in one.without)], "yes")


def _multiply(presentations: Sequence[Presentation], factor: Tensor) -> None:
    """Multiplies the gradients of the optimizers that do not unscale by themselves, in place."""
    for one in presentations:
        if not one.unscales_itself:
            find_overflow([gradient for _, gradient in one.local_gradients()], factor)


def _refuse_half(gradients: Sequence[tuple[str, Tensor]]) -> None:
    half = [name for name, gradient in gradients if gradient.dtype == torch.float16]
    if half:
        raise ValueError(
            f"{len(half)} gradients are float16 ({', '.join(half[:5])}), and unscaled in it they would lose what the "
            "scale has kept; keep gradients in float32 (MixedPrecisionPolicy), or let a fused rule unscale them."
        )
