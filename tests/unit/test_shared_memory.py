"""Live tensors that share memory: the last copy into them would win."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from shardopt import LoadError, ShardedStateOptimizer
from shardopt.staging.filling import can_be_filled, overlapping, sharing_memory
from tests.support.rules import state
from tests.support.snapshot import snapshot
from tests.unit.test_load_options import Made, model_of, saved, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@given(some.lists(some.tuples(some.integers(0, 30), some.integers(0, 6), some.integers(1, 3)), max_size=6))
def test_overlap_is_found_as_by_looking_at_every_pair(spans: list[tuple[int, int, int]]) -> None:
    memory = torch.zeros(64)
    views = [memory[start : start + length * step : step] for start, length, step in spans]
    found = sharing_memory(views)

    def extent(view: torch.Tensor) -> range:
        return range(view.storage_offset(), view.storage_offset() + (view.numel() - 1) * view.stride(0) + 1)

    expected: set[int] = set()
    for one, two in itertools.combinations([view for view in views if view.numel()], 2):
        if set(extent(one)) & set(extent(two)):
            expected |= {id(one), id(two)}
    assert found == expected


def trained(tmp_path: Path) -> dict[str, Any]:
    source = wrapped(model_of("ab"), steps=2)
    # Counters that differ, so that a shared one cannot hold both.
    source[0].state[source[1]["b"].weight]["step"].fill_(7.0)
    saved(tmp_path, source)
    return state(*source)


def one_step(live: Made) -> None:
    shared = live[0].state[live[1]["a"].weight]["step"]
    live[0].state[live[1]["b"].weight]["step"] = shared


def one_moment(live: Made) -> None:
    entries = live[0].state[live[1]["a"].weight]
    entries["exp_avg_sq"] = entries["exp_avg"]


def one_memory(live: Made) -> None:
    memory = torch.zeros(9)
    for start, name in ((0, "a"), (3, "b")):
        live[0].state[live[1][name].weight]["exp_avg"] = memory[start : start + 6].view(2, 3)


@pytest.mark.parametrize("edit", [one_step, one_moment, one_memory])
def test_state_that_shares_memory_is_replaced_each_by_its_own(edit: Any, tmp_path: Path) -> None:
    want = trained(tmp_path)
    live = wrapped(model_of("ab"), steps=1)
    edit(live)
    live[0].prepare_load(tmp_path).commit()
    assert state(*live) == want
    held = [value for entries in live[0].state.values() for value in entries.values()]
    assert not sharing_memory(held)


def test_state_that_is_the_parameter_itself_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    live = wrapped(model_of("ab"), steps=1)
    live[0].state[live[1]["a"].weight]["exp_avg"] = live[1]["a"].weight.detach()
    before = snapshot(*live)
    with pytest.raises(LoadError, match=r"state\.a\.weight\.exp_avg shares memory with a parameter"):
        live[0].prepare_load(tmp_path)
    assert before.diff(snapshot(*live)) == []


def by_group(model: nn.ModuleDict, rates: list[Any]) -> ShardedStateOptimizer:
    groups = [{"params": [param], "lr": lr} for param, lr in zip(model.parameters(), rates, strict=True)]
    return ShardedStateOptimizer(torch.optim.AdamW(groups, foreach=False), model)


def test_learning_rates_that_share_memory_need_equal_values(tmp_path: Path) -> None:
    model = model_of("ab")
    saved(tmp_path / "two", (by_group(model, [0.5, 0.25]), model))
    saved(tmp_path / "one", (by_group(model, [0.5, 0.5]), model))
    memory = torch.ones(3)
    for rates, text in (
        ([memory[0], memory[0]], "'lr' is the tensor that group 0 has too"),
        ([memory[:2], memory[1:]], r"'lr', group 1: 'lr': these tensors share memory"),
    ):
        live = by_group(model, [0.5, 0.5])
        for group, rate in zip(live.param_groups, rates, strict=True):
            group["lr"] = rate
        with pytest.raises(LoadError, match=text):
            live.prepare_load(tmp_path / "two")
    live = by_group(model, [shared := torch.tensor(0.125), shared])
    live.prepare_load(tmp_path / "one").commit()
    assert shared.item() == 0.5
    assert all(group["lr"] is shared for group in live.param_groups)


def test_state_on_the_meta_device_is_replaced(tmp_path: Path) -> None:
    want = trained(tmp_path)
    live = wrapped(model_of("ab"), steps=1)
    entries = live[0].state[live[1]["a"].weight]
    entries["exp_avg"] = entries["exp_avg"].to("meta")
    live[0].prepare_load(tmp_path).commit()
    assert state(*live) == want


@given(
    some.lists(some.tuples(some.integers(0, 40), some.integers(1, 6)), max_size=5),
    some.lists(some.tuples(some.integers(0, 40), some.integers(1, 6)), max_size=5),
)
def test_overlap_with_others_is_found_as_by_looking_at_every_pair(
    mine: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    memory = torch.zeros(64)
    left, right = ([memory[start : start + length] for start, length in spans] for spans in (mine, others))
    expected = {
        id(view)
        for view, (start, length) in zip(left, mine, strict=True)
        if any(start < other + size and other < start + length for other, size in others)
    }
    assert overlapping(left, right) == expected


@given(some.lists(some.integers(1, 4), min_size=1, max_size=3), some.data())
def test_what_can_be_filled_keeps_each_element_in_a_place_of_its_own(size: list[int], data: some.DataObject) -> None:
    stride = data.draw(some.lists(some.integers(0, 12), min_size=len(size), max_size=len(size)))
    view = torch.zeros(200).as_strided(size, stride)
    places = {
        sum(at * step for at, step in zip(index, stride, strict=True)) for index in itertools.product(*map(range, size))
    }
    if can_be_filled(view):
        assert len(places) == view.numel()
    if view.is_contiguous():
        assert can_be_filled(view)


def test_a_window_over_overlapping_memory_is_replaced(tmp_path: Path) -> None:
    want = trained(tmp_path)
    live = wrapped(model_of("ab"), steps=1)
    live[0].state[live[1]["a"].weight]["exp_avg"] = torch.zeros(4).unfold(0, 3, 1)
    live[0].prepare_load(tmp_path).commit()
    assert state(*live) == want


def test_a_group_value_that_is_a_parameter_is_refused(tmp_path: Path) -> None:
    model = model_of("ab")
    optimizer = by_group(model, [0.5, 0.25])
    saved(tmp_path, (optimizer, model))
    live = by_group(model, [0.5, 0.25])
    model.register_parameter("rate", nn.Parameter(torch.tensor(0.75)))
    live.param_groups[0]["lr"] = model.rate.detach()
    with pytest.raises(LoadError, match="group 0: 'lr' shares memory with a parameter"):
        live.prepare_load(tmp_path)
    assert model.rate.item() == 0.75


def test_state_and_a_nested_group_value_that_are_one_tensor_part(tmp_path: Path) -> None:
    source = wrapped(model_of("a"), steps=2)
    source[0].param_groups[0]["counters"] = (torch.tensor(100.0),)
    saved(tmp_path, source)
    live = wrapped(model_of("a"), steps=1)
    live[0].param_groups[0]["counters"] = (live[0].state[live[1]["a"].weight]["step"],)
    live[0].prepare_load(tmp_path).commit()
    assert live[0].state[live[1]["a"].weight]["step"].item() == 2.0
    assert live[0].param_groups[0]["counters"][0].item() == 100.0


def test_tensors_deep_in_groups_that_share_memory_are_named(tmp_path: Path) -> None:
    model = model_of("ab")
    source = by_group(model, [0.5, 0.5])
    for index, group in enumerate(source.param_groups):
        group["deep"] = ((torch.tensor(float(index)),),)
    saved(tmp_path, (source, model))
    live = by_group(model, [0.5, 0.5])
    shared = torch.tensor(9.0)
    for group in live.param_groups:
        group["deep"] = ((shared,),)
    with pytest.raises(LoadError, match="group 1: 'deep' is the tensor that group 0 has too"):
        live.prepare_load(tmp_path)
    assert shared.item() == 9.0
