"""Every element-wise optimizer of torch with each of its flags, saved on one topology and resumed on another.

The equality rule: right after the load the state is the saved one bit for bit. The next three steps equal the
uninterrupted sharded run and the unsharded run bit for bit too, except where ``fused`` meets a shard that is not a
multiple of 64 elements: torch's vector bodies and scalar tails round differently, so where a shard is cut shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardopt.layouts.catalog import spec_of
from tests.ranks.trajectories import (
    WORLD_SIZES,
    Array,
    Run,
    Whole,
    assemble,
    gathered_job,
    resume_job,
    save_job,
    train_unsharded,
)
from tests.support.ranks import RankPool
from tests.support.rules import ELEMENTWISE, NOT_ELEMENTWISE, RULES, Rule

# What the shared rules leave out: flags of one class, and pairs of flags that share a branch of the update.
MORE: list[Rule] = [
    Rule(torch.optim.Adagrad, {"lr": 0.125, "lr_decay": 0.1}),
    Rule(torch.optim.Adagrad, {"lr": 0.125, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "foreach": True}),
    Rule(torch.optim.Adam, {"lr": 0.125, "maximize": True, "foreach": True}),
    Rule(torch.optim.Adam, {"lr": torch.tensor(0.125), "amsgrad": True, "betas": (0.5, 0.75)}),
    Rule(torch.optim.AdamW, {"lr": 0.125, "amsgrad": True, "fused": True, "maximize": True}),
    Rule(torch.optim.NAdam, {"lr": 0.125, "momentum_decay": 0.5, "weight_decay": 0.1, "foreach": True}),
    Rule(torch.optim.SGD, {"lr": 0.125, "momentum": 0.9, "nesterov": True, "fused": True, "maximize": True}),
    Rule(torch.optim.SGD, {"lr": torch.tensor(0.125), "momentum": 0.9, "foreach": True}),
]
MATRIX: list[Rule] = [*RULES, *MORE]
# One rule with the most state of each class, for the ways to load that differ in the wrapper and not in the class.
FEW: list[Rule] = [max((r for r in MATRIX if r.cls is c), key=lambda r: len(r.options)) for c in ELEMENTWISE.values()]
# Needs a device / an autograd graph through the step; neither can be had with gradients on the CPU's FSDP2.
UNTRIED_FLAGS = {"capturable", "differentiable"}

MOVES = [
    ("fsdp2", "fsdp2"),
    ("fsdp2", "fsdp4"),
    ("fsdp2", "fsdp1"),
    ("fsdp4", "fsdp3"),
    ("hsdp2x2", "fsdp4"),
    ("fsdp4", "hsdp2x2"),
    ("fsdp2+tp2", "fsdp4"),
    ("fsdp4", "fsdp2+tp2"),
]
# In units of fp32's spacing at the largest element of the array; twice the most that these runs show.
MAX_ROUNDING = 4.0

pytestmark = pytest.mark.timeout(600)
DEADLINE_S = 500.0


@dataclass
class Saves:
    """The saved runs by source topology: made when first asked for, shared by all moves from there."""

    pool: RankPool
    root: Path
    rules: list[Rule]

    def __post_init__(self) -> None:
        self._made: dict[str, dict[int, tuple[Whole, Whole]]] = {}

    def path(self, topology: str) -> str:
        """Where its checkpoints are."""
        return str(self.root / topology)

    def of(self, topology: str) -> dict[int, tuple[Whole, Whole]]:
        """By rule: what the run held at its save and three steps later."""
        if topology not in self._made:
            args = (topology, self.rules, self.path(topology))
            self._made[topology] = _whole(self.pool.run(WORLD_SIZES[topology], save_job, *args, deadline_s=DEADLINE_S))
        return self._made[topology]

    def resume(self, source: str, target: str, how: str) -> dict[int, tuple[Whole, Whole]]:
        """By rule: what a run on ``target`` holds right after loading what ``source`` saved, and three steps later."""
        weights = {index: middle.arrays for index, (middle, _) in self.of(source).items()}
        args = (target, self.rules, self.path(source), how, weights)
        return _whole(self.pool.run(WORLD_SIZES[target], resume_job, *args, deadline_s=DEADLINE_S))


def _whole(ranks: list[dict[int, Run]]) -> dict[int, tuple[Whole, Whole]]:
    return {i: (assemble([r[i].middle for r in ranks]), assemble([r[i].end for r in ranks])) for i in ranks[0]}


@pytest.fixture(scope="module")
def saves(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ranks, tmp_path_factory.mktemp("matrix"), MATRIX)


@pytest.fixture(scope="module")
def few_saves(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ranks, tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def unsharded() -> dict[int, tuple[Whole, Whole]]:
    return train_unsharded(MATRIX)


def differences(got: Whole, want: Whole, *, tails: Callable[[str], bool]) -> list[str]:
    """Keys in which ``got`` differs from ``want`` by more than the equality rule allows.

    Args:
        got: one run.
        want: the other.
        tails: whether a key may differ by rounding.
    """
    found = [f"{key}: {got.values.get(key)} for {v}" for key, v in want.values.items() if got.values.get(key) != v]
    if got.values.keys() != want.values.keys() or got.arrays.keys() != want.arrays.keys():
        extra = (got.values.keys() ^ want.values.keys()) | (got.arrays.keys() ^ want.arrays.keys())
        found.append(f"only in one run: {sorted(extra)}")
    for key in want.arrays.keys() & got.arrays.keys():
        if got.arrays[key].tobytes() != want.arrays[key].tobytes():
            off = rounding(got.arrays[key], want.arrays[key])
            if not (tails(key) and off <= MAX_ROUNDING):
                found.append(f"{key}: off by {off:.3g} roundings of its largest element")
    return found


def rounding(got: Array, want: Array) -> float:
    """The largest difference, in units of fp32's spacing at the largest element; inf if shapes or types differ."""
    if got.shape != want.shape or got.dtype != want.dtype or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got.astype(np.float64) - want).max() / np.spacing(np.abs(want).max()))


def has_tails(rule: Rule, *runs: Whole) -> Callable[[str], bool]:
    """Whether, under the rule, a key's shards meet a scalar tail in one of the runs."""
    fused = bool(rule.options.get("fused"))
    return lambda key: fused and any(count % 64 for run in runs for count in run.elements[key])


def never(key: str) -> bool:
    return False


def label(index: int, rules: list[Rule]) -> str:
    return f"{index} {rules[index]}"


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_resume_equals_uninterrupted_and_unsharded(
    saves: Saves,
    unsharded: dict[int, tuple[Whole, Whole]],
    record_property: Callable[[str, Any], None],
    source: str,
    target: str,
) -> None:
    saved, resumed = saves.of(source), saves.resume(source, target, "fresh")
    failed: list[str] = []
    cells = 0
    for index, rule in enumerate(MATRIX):
        (at_save, uninterrupted), (loaded, end), (_, oracle) = saved[index], resumed[index], unsharded[index]
        tails = has_tails(rule, at_save, loaded)
        comparisons = {
            "loaded state": differences(loaded, at_save, tails=never),
            "against the uninterrupted run": differences(
                end, uninterrupted, tails=never if source == target else tails
            ),
            "against the unsharded run": differences(end, oracle, tails=tails),
        }
        cells += len(comparisons) * (len(oracle.arrays) + len(oracle.values))
        failed += [f"{label(index, MATRIX)} {what}: {item}" for what, found in comparisons.items() for item in found]
    record_property("configurations", len(MATRIX))
    record_property("cells", cells)
    assert not failed, "\n".join([f"{len(failed)} differences", *failed])
    assert len(resumed) == len(saved) == len(MATRIX)


@pytest.mark.parametrize("how", ["warm", "prepared"])
@pytest.mark.parametrize(("source", "target"), [("fsdp2", "fsdp4"), ("fsdp4", "fsdp2+tp2")])
def test_other_ways_to_load_equal_the_fresh_one(few_saves: Saves, source: str, target: str, how: str) -> None:
    saved, fresh, other = (
        few_saves.of(source),
        few_saves.resume(source, target, "fresh"),
        few_saves.resume(source, target, how),
    )
    failed = [
        f"{label(index, FEW)}: {item}"
        for index in range(len(FEW))
        for got, want in ((other[index][0], saved[index][0]), (other[index][1], fresh[index][1]))
        for item in differences(got, want, tails=never)
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("target", ["fsdp1", "fsdp2", "fsdp3"])
def test_empty_shards_B1_B2(few_saves: Saves, target: str) -> None:
    saved, resumed = few_saves.of("fsdp4"), few_saves.resume("fsdp4", target, "fresh")
    empty = {key for key, counts in saved[0][0].elements.items() if 0 in counts}
    assert {"odd.rows1", "odd.rows2", "odd.rows3"} <= empty
    failed = [
        f"{label(index, FEW)}: {item}"
        for index in range(len(FEW))
        for item in differences(resumed[index][0], saved[index][0], tails=never)
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("topology", WORLD_SIZES)
def test_parts_put_together_are_what_torch_gathers_B19(ranks: RankPool, topology: str) -> None:
    outcomes = ranks.run(WORLD_SIZES[topology], gathered_job, topology, Rule(torch.optim.AdamW, {"lr": 0.125}))
    whole = assemble([part for part, _ in outcomes])
    assert len(whole.arrays) == 9 + 2 * 8  # odd.idle has no state
    for _, gathered in outcomes:
        renamed = {key.replace(".exp_avg", "/exp_avg"): value for key, value in gathered.items()}
        assert {key: value.tobytes() for key, value in renamed.items()} == {
            key: value.tobytes() for key, value in whole.arrays.items()
        }


def test_every_element_wise_class_of_torch_is_in_the_matrix() -> None:
    exported = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    known = {name for name, cls in exported.items() if spec_of(cls([weight], lr=0.125)) is not None}
    assert known == exported.keys() - NOT_ELEMENTWISE
    assert known == {rule.cls.__name__ for rule in MATRIX}
    assert len(known) == 11


@pytest.mark.parametrize("cls", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_every_flag_of_a_class_is_in_the_matrix(cls: type[torch.optim.Optimizer]) -> None:
    arguments = inspect.signature(cls).parameters.values()
    switches = {a.name for a in arguments if a.default in (False, None, 0)} - UNTRIED_FLAGS
    tried = {key for rule in MATRIX if rule.cls is cls for key, value in rule.options.items() if value}
    assert switches <= tried
