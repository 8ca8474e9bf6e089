"""Steps, as a training loop takes them with each kind of optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.catalogue.protocols import Protocol
from benchmarks.catalogue.sessions import Session, seed_step

__all__ = ["train"]


def train(session: Session, optimizers: Sequence[Any], protocol: Protocol, steps: Iterable[int]) -> None:
    """Takes the steps with every optimizer. Collective if the session is."""
    for step in steps:
        seed_step(step)
        _take(session, optimizers, protocol, step)
        for optimizer in optimizers:
            optimizer.zero_grad()


def _take(session: Session, optimizers: Sequence[Any], protocol: Protocol, step: int) -> None:
    if protocol.calls == "fused_backward":
        # The rule runs in hooks of this model's backward pass.
        optimizers[0].fused_backward(session.model.loss(step), optimizers[0].param_groups[0]["lr"])
        return
    if "closure" in protocol.calls:
        if protocol.calls == "step after closure":
            session.backward(step)

        def closure() -> Any:
            loss = float(session.backward(step))
            return (None, loss) if protocol.calls == "closure of a pair" else loss

        for optimizer in optimizers:
            optimizer.step(closure)
        return
    session.backward(step, create_graph=protocol.calls == "create_graph")
    for optimizer in optimizers:
        optimizer.step()
