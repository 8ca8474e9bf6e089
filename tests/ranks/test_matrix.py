"""Every element-wise optimizer of torch with each of its flags, saved on one topology and resumed on another."""

from __future__ import annotations

import inspect

import pytest
import torch

from shardopt.layouts.catalog import spec_of
from tests.ranks.comparison import Saves, compare_resumed, differences, label, never
from tests.ranks.configurations import FEW, MATRIX
from tests.ranks.topologies import TOPOLOGIES
from tests.ranks.trajectories import assemble, gathered_job
from tests.support.ranks import RankPool
from tests.support.rules import ELEMENTWISE, NOT_ELEMENTWISE, Rule

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
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def saves(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ranks, tmp_path_factory.mktemp("matrix"), MATRIX)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_resume_equals_uninterrupted_and_unsharded(saves: Saves, source: str, target: str) -> None:
    cells, found = compare_resumed(saves, source, target)
    print(f"{source} -> {target}: {len(MATRIX)} configurations, {cells} values compared")  # pytest -rP shows it
    assert not found, "\n".join([f"{len(found)} of {cells} values differ", *found])


@pytest.mark.parametrize("how", ["warm", "prepared"])
@pytest.mark.parametrize(("source", "target"), [("fsdp2", "fsdp4"), ("fsdp4", "fsdp2+tp2")])
def test_other_ways_to_load_equal_the_fresh_one(saves: Saves, source: str, target: str, how: str) -> None:
    fresh, other = saves.resume(source, target), saves.resume_some(source, target, how, FEW)
    assert other.keys() == FEW.keys()
    found = [
        f"{label(index, saves.rules[index])}: {item}"
        for index, runs in other.items()
        for got, want in zip(runs, fresh[index], strict=True)
        for item in differences(got, want, may_round=never)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("target", ["fsdp1", "fsdp2", "fsdp3"])
def test_empty_shards_B1_B2(saves: Saves, target: str) -> None:
    saved, resumed = saves.of("fsdp4"), saves.resume_some("fsdp4", target, "fresh", FEW)
    empty = {key for key, counts in saved[0][0].elements.items() if 0 in counts}
    assert {"odd.rows1", "odd.rows2", "odd.rows3"} <= empty
    found = [
        f"{label(index, saves.rules[index])}: {item}"
        for index, (loaded, _) in resumed.items()
        for item in differences(loaded, saved[index][0], may_round=never)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_parts_put_together_are_what_torch_gathers_B19(ranks: RankPool, topology: str) -> None:
    outcomes = ranks.run(
        TOPOLOGIES[topology].world_size, gathered_job, topology, Rule(torch.optim.AdamW, {"lr": 0.125})
    )
    whole = assemble([part for part, _ in outcomes])
    assert len(whole.arrays) == 7 + 2 * 6  # odd.idle has no state
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
    assert known == {rule.cls.__name__ for rule in MATRIX.values()}
    assert len(known) == 11


@pytest.mark.parametrize("cls", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_every_flag_of_a_class_is_in_the_matrix(cls: type[torch.optim.Optimizer]) -> None:
    arguments = inspect.signature(cls).parameters.values()
    switches = {a.name for a in arguments if a.default in (False, None, 0)} - UNTRIED_FLAGS
    tried = {key for rule in MATRIX.values() if rule.cls is cls for key, value in rule.options.items() if value}
    assert switches <= tried
