"""Torch's own functions for optimizer state on several ranks, and resuming from checkpoints that they have written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_road
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from shardopt import LoadError, RankFailureError, ShardedStateOptimizer
from tests.ranks.refusals import make, train
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import Shape, SmallModel, build, set_gradients
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot

SHAPE = Shape(rows=(1, 3), width=3, hidden=5, ignored=("gain", "kernel"), gain=True)

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.125), foreach=False),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, weight_decay=0.5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
}
CALLS = ("get_optimizer_state_dict", "get_state_dict", "set_optimizer_state_dict", "set_state_dict")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"flatten_optimizer_state_dict": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
]


def call(name: str, model: SmallModel, optimizer: Any, saved: dict[str, Any], options: StateDictOptions) -> None:
    if name.startswith("get"):
        getattr(torch_road, name)(model, optimizer, options=options)
    elif name == "set_optimizer_state_dict":
        torch_road.set_optimizer_state_dict(model, optimizer, saved, options=options)
    else:
        # It loads the model before it looks at the optimizer: here what the model has.
        weights = torch_road.get_model_state_dict(model, options=options)
        torch_road.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=saved, options=options)


def call_all(steps: int, gradients: bool) -> list[str]:
    """What went wrong on this rank."""
    twin = build("fsdp", SHAPE)
    plain = torch.optim.AdamW(twin.parameters())
    set_gradients(twin, 0)
    plain.step()
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, range(steps))
    if gradients:
        set_gradients(model, 7)
    else:
        optimizer.zero_grad()
    wrong: list[str] = []
    for chosen in OPTIONS:
        saved = torch_road.get_optimizer_state_dict(twin, plain, options=StateDictOptions(**chosen))
        for name in CALLS:
            if name.startswith("get") and "broadcast_from_rank0" in chosen:
                continue
            before = snapshot(optimizer, model)
            try:
                call(name, model, optimizer, dict(saved), StateDictOptions(**chosen))
                wrong.append(f"{name} {chosen}: nothing was raised")
            except TypeError as error:
                if "does not suit a ShardedStateOptimizer" not in str(error):
                    raise
            wrong += [f"{name} {chosen}: {line}" for line in before.diff(snapshot(optimizer, model))]
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    train(optimizer, model, [steps])
    assert optimizer.state[model.up.weight]["step"].item() == steps + 1
    return wrong


@pytest.mark.parametrize("gradients", [False, True], ids=["no-gradients", "gradients"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "warm"])
def test_torchs_functions_are_refused_on_every_rank_T1_A1(steps: int, gradients: bool, ranks: RankPool) -> None:
    assert ranks.run(2, call_all, steps, gradients) == [[], []]


def inner(rule: str, model: SmallModel) -> torch.optim.Optimizer:
    params = [*model.parameters()]
    return RULES[rule]([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.25}])


def plain_run(rule: str, path: str) -> list[dict[str, Any]]:
    """Trains unwrapped, saves in every form, goes on: whole state and parameters at the save and after."""
    model = build("fsdp", SHAPE)
    optimizer = inner(rule, model)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = torch_road.get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save({"model": model, "optim": saved}, checkpoint_id=f"{path}/{'flattened' if flat else 'nested'}")
    return [gathered(optimizer, model), *go_on(optimizer, model)]


def go_on(optimizer: Any, model: SmallModel) -> list[dict[str, Any]]:
    for step in range(2, 5):
        set_gradients(model, step)
        optimizer.step()
    return [gathered(optimizer, model), gathered_parameters(model)]


def resumed_run(rule: str, path: str, topology: str, warm: bool, prefix: str | None) -> list[dict[str, Any]]:
    """The same, wrapped and resumed."""
    model = build(topology, SHAPE, seed=7)
    optimizer = ShardedStateOptimizer(inner(rule, model), model)
    if warm:
        set_gradients(model, 9)
        optimizer.step()
    dcp.load({"model": model}, checkpoint_id=path)
    set_gradients(model, 3)  # a gradient that is there must not change what is loaded
    before = snapshot(optimizer, model)
    optimizer.prepare_load(path, prefix=prefix).commit()
    ignored = ["state*", "group*", "attribute._changes", "attribute._prepared"]
    assert before.diff(snapshot(optimizer, model), ignore=ignored) == []
    for param, entries in optimizer.state.items():
        for value in entries.values():
            if isinstance(param, DTensor) and value.dim() and isinstance(value, DTensor):
                assert (value.placements, value.shape) == (param.placements, param.shape)
            elif value.dim():
                assert value.shape == (param.to_local() if isinstance(param, DTensor) else param).shape
    return [gathered(optimizer, model), *go_on(optimizer, model)]


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize("rule", RULES)
def test_resumes_from_what_torch_saved_bit_for_bit_B18_T1(
    rule: str, form: str, ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(2, plain_run, rule, str(tmp_path))[0]
    path = str(tmp_path / form)
    more = [(4, "fsdp", False, None), (4, "hsdp", True, "optim")] if rule == "AdamW" else []
    for world_size, topology, warm, prefix in [
        (1, "plain", False, None),
        (2, "fsdp", False, "optim"),
        (2, "fsdp", True, None),
        *more,
    ]:
        for found in ranks.run(world_size, resumed_run, rule, path, topology, warm, prefix):
            for there, here in zip(expected, found, strict=True):
                assert value_differences(there, here) == []


def save_shards(path: str) -> None:
    """State kept as plain local tensors, of which torch saves one rank's."""
    model = build("fsdp", SHAPE)
    optimizer = inner("AdamW", model)
    set_gradients(model, 0)
    optimizer.step()
    saved = torch_road.get_optimizer_state_dict(model, optimizer)
    for entries in saved["state"].values():
        for key, value in entries.items():
            entries[key] = value.to_local() if isinstance(value, DTensor) else value
    dcp.save({"model": model, "optim": saved}, checkpoint_id=path)


def load_shards(path: str, topology: str) -> list[str]:
    model = build(topology, SHAPE)
    optimizer = make(model)
    before = snapshot(optimizer, model)
    try:
        optimizer.prepare_load(path)
    except LoadError as error:
        assert before.diff(snapshot(optimizer, model)) == []
        return list(error.problems)
    return []


@pytest.mark.parametrize(("world_size", "topology"), [(1, "plain"), (2, "fsdp")])
def test_one_ranks_shard_is_not_taken_for_the_state(
    world_size: int, topology: str, ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, save_shards, str(tmp_path))
    for problems in ranks.run(world_size, load_shards, str(tmp_path), topology):
        # Which rank's it is, torch decides by how much each has to write.
        pattern = r"up\.weight: state 'exp_avg' was saved with shape \([23], 3\), the parameter has \(5, 3\)\. It looks"
        assert [problem for problem in problems if re.match(pattern, problem)]
        assert not [problem for problem in problems if problem.startswith(("gain", "kernel"))]


def pickle_state(path: str) -> dict[str, Any]:
    """Saves each rank's state dict with torch.save; the whole state at that moment."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, range(2))
    torch.save(optimizer.state_dict(), f"{path}/{dist.get_rank()}.pt")
    expected = gathered(optimizer, model)
    train(optimizer, model, [2])
    return expected


def unpickle_state(path: str, file_of: dict[int, int], expected: dict[str, Any]) -> list[str]:
    """Loads what a rank has pickled; what was raised, or differs."""
    model = build("fsdp", SHAPE, seed=7)
    optimizer = make(model)
    train(optimizer, model, [5])
    kept = torch.load(f"{path}/{file_of[dist.get_rank()]}.pt", weights_only=False)
    before = snapshot(optimizer, model)
    try:
        optimizer.load_state_dict(kept)
    except (LoadError, RankFailureError) as error:
        return [type(error).__name__, str(error), *before.diff(snapshot(optimizer, model))]
    return value_differences(expected, gathered(optimizer, model))


def test_torch_save_is_for_the_same_sharding_and_refused_on_another_J8(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, pickle_state, str(tmp_path))[0]
    assert ranks.run(2, unpickle_state, str(tmp_path), {0: 0, 1: 1}, expected) == [[], []]
    sentence = r"up\.weight: state 'exp_avg': the state dict was made for the box .*; save it with dcp\.save to move it"
    for world_size, file_of in ((1, {0: 0}), (2, {0: 1, 1: 0})):
        for kind, text, *changes in ranks.run(world_size, unpickle_state, str(tmp_path), file_of, expected):
            assert kind == "LoadError"
            assert re.search(sentence, text)
            assert changes == []
