"""Who holds what of each parameter, and which rank updates it whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from shardopt.errors import PlacementError
from shardopt.geometry import Box, missing
from shardopt.layouts.tracked import Tracked
from shardopt.scope import Scope

__all__ = ["Balance", "Holdings", "exchange_boxes"]


@dataclass(frozen=True, slots=True)
class Holdings:
    """Where the elements of one parameter are.

    Attributes:
        holders: each distinct box that has elements -> the ranks that hold it, ascending, as places in the scope.
    """

    holders: dict[Box, tuple[int, ...]]

    def sender(self, box: Box, target: int) -> int:
        """Who gives ``target`` that box: itself if it can, else the first that holds it."""
        held_by = self.holders[box]
        return target if target in held_by else held_by[0]


class Balance:
    """Gives parameters to ranks so that each owns about as many elements; the same answer on every rank."""

    def __init__(self, num_ranks: int) -> None:
        self.loads: list[int] = [0] * num_ranks

    def assign(self, volumes: Sequence[int]) -> list[int]:
        """The owner of each parameter, given their numbers of elements: the largest first, each to the least loaded."""
        owners = [0] * len(volumes)
        for index in sorted(range(len(volumes)), key=lambda index: (-volumes[index], index)):
            owner = min(range(len(self.loads)), key=self.loads.__getitem__)
            owners[index] = owner
            self.loads[owner] += volumes[index]
        return owners


def exchange_boxes(tracked: Sequence[Tracked], scope: Scope) -> list[Holdings]:
    """Collective. Where the elements of each parameter are, by what every rank says of itself.

    Raises:
        PlacementError: no rank of the scope holds some elements of a parameter; raised on every rank.
    """
    own = [(item.box.offset, item.box.size) for item in tracked]
    told = [json.loads(data) for data in scope.exchange("boxes", json.dumps(own).encode())]
    found: list[Holdings] = []
    problems: list[str] = []
    for index, item in enumerate(tracked):
        holders: dict[Box, tuple[int, ...]] = {}
        for rank, boxes in enumerate(told):
            box = Box(*map(tuple, boxes[index]))
            if box.volume:
                holders[box] = (*holders.get(box, ()), rank)
        gap = missing(Box.whole(item.shape), list(holders))
        twice = sum(box.volume for box in holders) > Box.whole(item.shape).volume
        if gap is not None or twice:
            where = f"the box at {gap.offset} of size {gap.size} is on none of them" if gap else "some boxes overlap"
            problems.append(
                f"{item.fqn}: the optimizer's ranks {list(scope.ranks)} do not hold the whole parameter of shape "
                f"{item.shape} once: {where}."
            )
        found.append(Holdings(holders))
    if problems:
        raise PlacementError("\n".join(problems))
    return found
