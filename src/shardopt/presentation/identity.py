"""Whether the parameters are still those the optimizer was wrapped with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shardopt.errors import PresentationError
from shardopt.layouts.tracked import Kind, Tracked
from shardopt.naming import members_of

__all__ = ["Identity"]


class Identity:
    """Compares tracked parameters with what the models hold now.

    A model can be given other parameters (``load_state_dict(assign=True)``, assigning a ``Parameter``, ``to_empty``
    from meta) or its parameters other data (``.to(dtype)``). The optimizer notices neither: it would update what
    nothing uses, or fail in the middle of a step.
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._models = models
        self._tracked: list[Tracked] = []

    def add(self, tracked: Sequence[Tracked]) -> None:
        """Takes in parameters, as they are now."""
        self._tracked.extend(tracked)

    def check(self) -> None:
        """Looks through all models: meant for saves and loads, and for steps that give a reason.

        Raises:
            PresentationError: a parameter was replaced, removed, or given data of another kind; all are listed.
        """
        problems = [*self._replaced(), *self._changed()]
        if problems:
            raise PresentationError(
                f"{len(problems)} parameters are not those that the optimizer was wrapped with:\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + "\nThe optimizer knows the old ones only: it would update what nothing uses, or with state that does "
                "not fit. fully_shard, load_state_dict(assign=True), assigning a Parameter, to_empty() and .to(dtype) "
                "do that; build the optimizer and its wrapper afterwards, or load with assign=False."
            )

    def _replaced(self) -> list[str]:
        if not self._models:
            return []
        now: dict[str, Tensor] = {}
        for fqn, param in members_of(self._models):
            now.setdefault(fqn, param)
        held = set(map(id, now.values()))
        problems: list[str] = []
        for item in self._tracked:
            if not item.name.in_model:
                continue
            other = [name for name in item.name.all if now.get(name, item.param) is not item.param]
            problems += [f"{name}: the model has another parameter of this name now" for name in other]
            if not other and id(item.param) not in held:
                problems.append(f"{item.fqn}: the model does not have it any more")
        return problems

    def _changed(self) -> list[str]:
        return [
            f"{item.fqn}: this rank's part was {item.kind} and is now {kind}"
            for item in self._tracked
            if (kind := Kind.of(item.local)) != item.kind
        ]
