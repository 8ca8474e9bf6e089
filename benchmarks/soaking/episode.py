"""An episode: one training run, drawn from a seed, that is saved, broken off, broken and resumed on other layouts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.soaking.rules import RULES

__all__ = ["FAULTS", "LAYOUTS", "Cell", "Episode", "Fault", "Leg", "draw"]

LAYOUTS: Mapping[str, int] = {
    "fsdp1": 1,
    "fsdp2": 2,
    "fsdp3": 3,
    "fsdp4": 4,
    "hsdp2x2": 4,
    "fsdp2xtp2": 4,
    "tp2": 2,
}
"""Name -> ranks."""

FAULTS: Mapping[str, tuple[str, ...]] = {
    "step": ("pre-hook", "inner pre-hook", "closure", "plain gradient", "another group"),
    "save": ("state_dict", "write", "plan", "arguments", "optimizer"),
    "load": ("state_dict", "open", "read", "arguments", "commit"),
    "prepare": ("options", "path", "check"),
    "dcp": ("save", "load"),
}
"""Operation -> where it is broken on one rank."""

_KINDS = ("raises", "cannot be pickled", "no Exception", "interrupted")
_KILLS = ("", "", "", "", "", "", "", "", "step", "save collect", "save write", "save finish")
_SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 3),
    (2,),
    (3, 2),
    (5, 7),
    (7, 14),
    (130,),
    (4, 2, 3),
    (24, 64),
    (1,),
    (16, 16),
    (33, 5),
)
# A multiple of 64 elements on every layout, cut along either dim.
_EVEN = (64, 32)
# Whole blocks of 256, at least 4,096 elements each, on 1, 2 and 4 ranks.
_BLOCKS = (64, 512)
_LARGE = ((66, 130), (9001,))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One parameter, alone in its module.

    Attributes:
        name: of the module.
        shape: global.
        kind: ``trained``; ``late``: without gradient at first, and in every third step; ``frozen``: needs none;
            ``idle``: never gets one; ``plain``: left out of ``fully_shard``, so whole on every rank.
        tensor_dim: what tensor parallelism cuts; None if it does not.
        tied: whether a second module holds the same parameter.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "trained"
    tensor_dim: int | None = None
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An error on one rank.

    Attributes:
        operation: key of ``FAULTS``.
        where: one of its values.
        kind: of exception; see tests/faults/kinds.py.
        rank: who raises.
        late: of ``step``: whether it comes after the leg's steps, and not before them.
    """

    operation: str
    where: str
    kind: str
    rank: int
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A part of the run, in processes of its own layout.

    Attributes:
        layout: key of ``LAYOUTS``.
        compute: the presentation asked for.
        load: how the state of the last save comes back: ``dcp``, ``shardopt``, ``dict``, ``path``.
        warm: whether the optimizer has stepped elsewhere before it loads.
        until: how many steps there have been at the save.
        faults: in the order of the leg.
        save: ``dcp``, ``shardopt``, ``over`` (shardopt, over the last checkpoint), ``async``.
        overrun: steps after the save, which the crash loses.
        kill: where a rank is killed in the end, or empty.
        victim: which rank.
    """

    layout: str
    compute: str
    load: str
    warm: bool
    until: int
    faults: tuple[Fault, ...]
    save: str
    overrun: int
    kill: str
    victim: int

    @property
    def world_size(self) -> int:
        """Ranks."""
        return LAYOUTS[self.layout]

    def is_cut_like(self, other: Leg) -> bool:
        """Whether ranks and presentation are the same, so that even state that depends on them is."""
        return (self.layout, self.compute) == (other.layout, other.compute)

    def steps(self, begin: int) -> tuple[int, int]:
        """How many steps there have been at the save, and at the end; one goes on beside a save in a thread.

        Args:
            begin: that it resumes from: later than ``until`` where a killed save has put its checkpoint in place.
        """
        at_save = max(self.until, begin)
        return at_save, at_save + self.overrun + (self.save == "async")

    def of(self, *operations: str) -> list[Fault]:
        """Faults of these operations."""
        return [fault for fault in self.faults if fault.operation in operations]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One run.

    Attributes:
        seed: of the soak.
        number: of the episode.
        rule: key of ``rules.RULES``.
        dtype: of the parameters.
        cells: the model.
        legs: in order.
    """

    seed: int
    number: int
    rule: str
    dtype: torch.dtype
    cells: tuple[Cell, ...]
    legs: tuple[Leg, ...]

    @property
    def last_step(self) -> int:
        """How many steps any leg takes at most."""
        step = 0
        for leg in self.legs:
            step = leg.steps(step)[1]
        return step

    def __str__(self) -> str:
        legs = " | ".join(
            f"{leg.load}{' warm' * leg.warm} {leg.layout} {leg.compute} to {leg.until}+{leg.overrun} {leg.save}"
            + "".join(f", {fault.operation}: {fault.where} {fault.kind} on {fault.rank}" for fault in leg.faults)
            + (f", killed in {leg.kill} on {leg.victim}" if leg.kill else "")
            for leg in self.legs
        )
        return f"{self.rule}, {len(self.cells)} parameters, {str(self.dtype)[6:]}: {legs}"


def draw(seed: int, number: int, *, rules: tuple[str, ...] = ()) -> Episode:
    """The episode of these numbers, always the same; of these rules only, if some are named."""
    source = random.Random(f"{seed}/{number}")
    # Every rule has its turn in every round: a soak of a few minutes leaves none out.
    names = [*(rules or RULES)]
    order = random.Random(f"{seed}/{number // len(names)}").sample(names, len(names))
    name = order[number % len(names)]
    rule = RULES[name]
    dtype = source.choice(rule.dtypes)
    cells = _cells(source, name)
    legs: list[Leg] = []
    until = 0
    for index in range(source.choice((2, 3, 3, 4))):
        until += source.randint(1, 4)
        legs.append(_leg(source, name, index, until))
    return Episode(seed=seed, number=number, rule=name, dtype=dtype, cells=cells, legs=tuple(legs))


def _cells(source: random.Random, name: str) -> tuple[Cell, ...]:
    rule = RULES[name]
    if rule.aligned:
        return tuple(Cell(name=f"cell{index}", shape=_BLOCKS) for index in range(source.randint(1, 2)))
    # At least one matrix that can be cut by tensor parallelism: on "tp2" nothing else is a DTensor.
    cells = [Cell(name="cell0", shape=_EVEN, tensor_dim=source.randrange(2))]
    kinds = ("trained", "trained", "trained", "late", "frozen", "idle", "plain")
    for index in range(1, source.randint(3, 8)):
        shape = source.choice(_LARGE if rule.hides_state and source.random() < 0.3 else _SHAPES)
        kind = source.choice(kinds)
        kind = "trained" if kind == "late" and not rule.late else kind
        cuts = kind == "trained" and len(shape) == 2 and source.random() < 0.5
        tied = kind == "trained" and not cuts and source.random() < 0.2
        dim = source.randrange(2) if cuts else None
        cells.append(Cell(name=f"cell{index}", shape=shape, kind=kind, tensor_dim=dim, tied=tied))
    return tuple(cells)


def _leg(source: random.Random, name: str, index: int, until: int) -> Leg:
    rule = RULES[name]
    layouts = [layout for layout in LAYOUTS if not rule.aligned or layout in ("fsdp1", "fsdp2", "fsdp4", "hsdp2x2")]
    layout = source.choice(layouts)
    world_size = LAYOUTS[layout]
    faults: list[Fault] = []
    if world_size > 1:
        faults = [_fault(source, world_size, index) for _ in range(source.choice((0, 1, 1, 2)))]
    return Leg(
        layout=layout,
        compute=source.choice(rule.computes),
        load=source.choice(("dcp", "shardopt", "dict", "path")),
        warm=source.random() < 0.3,
        until=until,
        faults=tuple(faults),
        save=source.choice(("dcp", "shardopt", "over", "async")),
        overrun=source.randint(0, 2),
        kill=source.choice(_KILLS) if world_size > 1 else "",
        victim=source.randrange(world_size),
    )


def _fault(source: random.Random, world_size: int, index: int) -> Fault:
    operations = ("step", "step", "save", "dcp") + (("load", "prepare") if index else ())
    operation = source.choice(operations)
    where = source.choice([where for where in FAULTS[operation] if index or (operation, where) != ("dcp", "load")])
    # The first rank alone makes the plan for all.
    rank = 0 if (operation, where) == ("save", "plan") else source.randrange(world_size)
    late = source.random() < 0.5
    return Fault(operation=operation, where=where, kind=source.choice(_KINDS), rank=rank, late=late)
