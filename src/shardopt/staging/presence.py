"""Which parameters got no gradient in the first step, on any rank: most often somebody's mistake."""

from __future__ import annotations

import json
import logging

from shardopt.presentation.inventory import Inventory
from shardopt.staging.consensus import Consensus
from shardopt.torch_compat import gradients_of

__all__ = ["Presence"]

_LOG = logging.getLogger(__name__)
_MOST_SHOWN = 20


class Presence:
    """Looks at the gradients of the first step, once.

    Attributes:
        without: FQNs of trainable parameters that had none on any rank (on this one, where steps are not voted on);
            None before that step.
    """

    def __init__(self, inventory: Inventory, consensus: Consensus) -> None:
        self._inventory = inventory
        self._consensus = consensus
        self.without: list[str] | None = None

    def look(self) -> None:
        """Collective in the first step of an optimizer whose steps are voted on; after that nothing.

        Raises:
            RankFailureError: a rank did not come.
        """
        if self.without is not None:
            return
        tracked = self._inventory.tracked
        gradients = gradients_of([item.param for item in tracked])
        lacking = {
            item.fqn
            for item, gradient in zip(tracked, gradients, strict=True)
            if gradient is None and item.param.requires_grad
        }
        if self._consensus.mode == "every-step":
            lacking = self._agreed(lacking)
        self.without = [item.fqn for item in tracked if item.fqn in lacking]
        if self.without and self._consensus.scope.index == 0:
            _LOG.warning(
                "%s. They are not updated, and have no state, until they get one.",
                self.said(),
            )

    def _agreed(self, lacking: set[str]) -> set[str]:
        """What all ranks lack. The first rank compares, so that nobody reads the lists of thousands."""
        scope = self._consensus.scope
        own = json.dumps(sorted(lacking)).encode()
        gathered = scope.gather("gradients", own)
        common = set.intersection(*(set(json.loads(one)) for one in gathered)) if gathered else set()
        answer = json.dumps(sorted(common)).encode()
        return set(json.loads(scope.scatter("gradients", [answer] * scope.size if gathered else [])))

    def said(self) -> str:
        """That, as a sentence; empty if there is nothing to say."""
        names = self.without
        if not names:
            return ""
        more = f" and {len(names) - _MOST_SHOWN} more" * (len(names) > _MOST_SHOWN)
        shown = ", ".join(names[:_MOST_SHOWN])
        return f"{len(names)} trainable parameters got no gradient in the first step: {shown}{more}"
