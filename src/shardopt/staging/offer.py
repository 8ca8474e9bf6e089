"""What ``state_dict()`` offers to a save or a load, once every rank has found the same."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

import torch

from shardopt.errors import RankFailureError
from shardopt.portable.agreement import name_differences
from shardopt.portable.export import Described, Merged, assemble, describe
from shardopt.portable.handles import Lease
from shardopt.portable.keys import MANIFEST_KEY
from shardopt.portable.merging import merge
from shardopt.presentation.inventory import Inventory
from shardopt.staging.consensus import Consensus
from shardopt.staging.poison import Poison

__all__ = ["Offers"]

_LOG = logging.getLogger(__name__)


class Offers:
    """Makes the portable state of one wrapper."""

    def __init__(self, inventory: Inventory, consensus: Consensus, poison: Poison) -> None:
        self._inventory = inventory
        self._consensus = consensus
        self._poison = poison
        self._logged: set[str] = set()

    def make(self, outer: torch.optim.Optimizer, changed: Callable[[], bool]) -> dict[str, Any]:
        """Collective. The portable state; nothing is created, stepped or copied.

        Args:
            outer: the wrapper, whose hooks run.
            changed: tells, later, whether live state has changed since.

        Raises:
            PlacementError: a state entry has no known place; all of them are listed.
            RankFailureError: that is so on another rank, or ranks differ in what must be the same.
        """
        exported = None
        result: dict[str, Any] = {}
        described, failure = self._describe(outer)
        merged = Merged()
        if self._inventory.is_spread:
            merged = merge(self._consensus.scope, self._inventory, described, failure)
        if described is not None:
            try:
                exported = assemble(self._inventory, described, merged)
                # Hooks before the vote: one that raises on one rank must not leave the others waiting in DCP.
                result = dict(exported.handles)
                for post_hook in outer._optimizer_state_dict_post_hooks.values():
                    replaced = post_hook(outer, result)
                    result = result if replaced is None else replaced
            except BaseException as error:
                failure = error
        verdict: RankFailureError | None = None
        number = 0
        try:
            digest = self._poison.digest(exported.digest if exported else b"")
            # The first rank's number is everybody's.
            number = secrets.randbits(64) if self._consensus.scope.index == 0 else 0
            number = self._consensus.vote("state_dict", failure, digest=digest, facts=number)
        except RankFailureError as error:
            verdict, number = error, 0
            if exported is not None and error.disagree and not (error.failures or self._poison.known(error)):
                verdict = name_differences(error, self._consensus.scope, self._inventory, exported)
        # dcp.load calls state_dict() too, and a good load is the way out of half-written state: only saving is refused.
        refusal = self._poison.refusal(verdict)
        assert exported is not None  # an export that did not fail has handles
        exported.mark(number)
        for note in exported.notes:
            if note not in self._logged:
                self._logged.add(note)
                _LOG.warning(note)
        for handle in exported.handles.values():
            handle.refuse_save = refusal
        exported.handles[MANIFEST_KEY].outdated = Lease(changed)
        return result

    def _describe(self, outer: torch.optim.Optimizer) -> tuple[Described | None, BaseException | None]:
        """What this rank has, or why it cannot say."""
        try:
            for pre_hook in outer._optimizer_state_dict_pre_hooks.values():
                pre_hook(outer)
            for part in self._inventory.parts:
                part.presentation.settle()
            return describe(self._inventory), None
        except BaseException as error:
            return None, error
