"""A prepared load on several ranks: one rank that has moved refuses it for all, and a commit replaces no object."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardopt import ShardedStateOptimizer
from tests.ranks.refusals import SHAPE, STEPS_SAVED, make, save, train
from tests.support.gather import gathered
from tests.support.models import SmallModel, build, set_gradients
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences
from tests.support.snapshot import Snapshot, snapshot

Move = Callable[[ShardedStateOptimizer, SmallModel, str], Any]


def step(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    train(optimizer, model, [6])


def inner_step(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    set_gradients(model, 6)
    optimizer.optimizers[0].step()


def other_data(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    model.up.weight.data = model.up.weight.data.clone()


def to_empty(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    model.up.to_empty(device="cpu")


def add_group(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    model.late = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.late]})


def prepare_again(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    optimizer.prepare_load(path)


def stock_load(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    dcp.load({"optim": optimizer}, checkpoint_id=path)


def written_state(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    next(iter(optimizer.state.values()))["step"].add_(1)


def other_state(optimizer: ShardedStateOptimizer, model: SmallModel, path: str) -> None:
    entries = next(iter(optimizer.state.values()))
    entries["exp_avg"] = entries["exp_avg"].clone()


MOVED = "the optimizer stepped, loaded, prepared another load, or got a new parameter group"

EVERYWHERE: dict[str, tuple[Move, str]] = {
    "step": (step, MOVED),
    "add_param_group": (add_group, MOVED),
    "second prepare": (prepare_again, MOVED),
    "stock load": (stock_load, MOVED),
}
ON_ONE_RANK: dict[str, tuple[Move, str]] = {
    "data": (other_data, "a parameter was given other data"),
    "to_empty": (to_empty, "a parameter was given other data"),
    "written state": (written_state, "optimizer state was changed"),
    "other state": (other_state, "optimizer state was changed"),
}
WHILE_FRESH: dict[str, tuple[Move, str]] = {"inner step": (inner_step, "optimizer state was changed")}
MOVES = EVERYWHERE | ON_ONE_RANK | WHILE_FRESH


def commit_after_moves(path: str) -> dict[str, tuple[str, str, list[str]]]:
    """Move -> what commit raised, its text, what it changed."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    found = {}
    for name, (move, _) in MOVES.items():
        model = build("fsdp", SHAPE, seed=7)
        optimizer = make(model)
        if name not in WHILE_FRESH:
            train(optimizer, model, [5])
        prepared = optimizer.prepare_load(path)
        if name in EVERYWHERE or rank == last:
            move(optimizer, model, path)
        before = snapshot(optimizer, model)
        kind, text = "", ""
        try:
            prepared.commit()
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        found[name] = kind, text, before.diff(snapshot(optimizer, model))
        # The scope still works: the next load goes through on every rank.
        if name not in ("add_param_group", "inner step"):
            optimizer.prepare_load(path).commit()
    return found


@pytest.fixture(scope="module", params=[2, 4])
def saved(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = str(tmp_path_factory.mktemp("prepared") / "good")
    return request.param, path, ranks.run(request.param, save, path, SHAPE, {}, STEPS_SAVED)[0]


@pytest.fixture(scope="module")
def commits(saved: Any, ranks: RankPool) -> list[dict[str, tuple[str, str, list[str]]]]:
    world_size, path, _ = saved
    return ranks.run(world_size, commit_after_moves, path, deadline_s=120.0)


@pytest.mark.parametrize("name", MOVES)
def test_commit_is_refused_on_every_rank_and_changes_nothing(name: str, commits: Any) -> None:
    _, reason = MOVES[name]
    last = len(commits) - 1
    sentence = f"{reason} after the load was prepared; nothing was changed"
    for rank, (kind, text, changes) in enumerate(per_rank[name] for per_rank in commits):
        assert changes == []
        if name in EVERYWHERE or rank == last:
            assert kind == "StaleLoadError"
            assert text == f"{sentence}. Prepare it again."
        else:
            assert kind == "RankFailureError"
            assert re.search(f"commit failed on rank {last}: StaleLoadError: {sentence}", text)


def commit_untouched(path: str, expected: dict[str, Any]) -> list[str]:
    """Weights are loaded between prepare and commit, which goes through; a second commit does not."""
    model = build("fsdp", SHAPE, seed=7)
    optimizer = make(model)
    train(optimizer, model, [5])
    prepared = optimizer.prepare_load(path)
    dcp.load({"model": model}, checkpoint_id=path)
    set_gradients(model, 6)
    prepared.commit()
    assert value_differences(expected, gathered(optimizer, model)) == []
    before = snapshot(optimizer, model)
    try:
        prepared.commit()
    except Exception as error:
        return [type(error).__name__, str(error), *before.diff(snapshot(optimizer, model))]
    return []


def test_an_untouched_load_is_committed_once(saved: Any, ranks: RankPool) -> None:
    world_size, path, expected = saved
    text = "this load has been committed already; prepare it again."
    assert ranks.run(world_size, commit_untouched, path, expected) == [["StaleLoadError", text]] * world_size


def load_and_compare(path: str, how: str, live: str) -> list[str]:
    """Everything that a load has changed on this rank."""
    model = build("fsdp", SHAPE, seed=7)
    optimizer = make(model, amsgrad=live == "more")
    model.register_forward_hook(lambda *_: None)
    optimizer.register_step_pre_hook(lambda *_: None)
    if live != "fresh":
        train(optimizer, model, [5])
    set_gradients(model, 6)
    before = snapshot(optimizer, model)
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    else:
        optimizer.prepare_load(path).commit()
    after = snapshot(optimizer, model)
    assert unreplaced(before, after) == []
    return before.diff(after, ignore=["attribute._changes", "attribute._prepared"])


def unreplaced(before: Snapshot, after: Snapshot) -> list[str]:
    """Objects that both snapshots have and that are not the same one."""
    return [line for line in before.diff(after) if "replaced by" in line or "moved from" in line]


@pytest.mark.parametrize(("how", "live"), [("stock", "warm"), ("path", "warm"), ("path", "more"), ("path", "fresh")])
def test_a_load_changes_values_of_state_and_groups_only(how: str, live: str, saved: Any, ranks: RankPool) -> None:
    world_size, path, _ = saved
    for changes in ranks.run(world_size, load_and_compare, path, how, live):
        assert changes
        for line in changes:
            assert re.match(r"state|group\[\d\]\['amsgrad'\]", line), line
        removed = [line for line in changes if "max_exp_avg_sq" in line and "added" not in line]
        assert bool(removed) == (live == "more")
        added = [line for line in changes if "added" in line]
        assert bool(added) == (live == "fresh")


def add_stale_state(path: str) -> tuple[list[str], list[str]]:
    """Keys of ``scale``'s state before and after a load; the checkpoint has none for it."""
    model = build("fsdp", SHAPE, seed=7)
    optimizer = make(model)
    set_gradients(model, 5)
    optimizer.step()
    before = sorted(optimizer.state[model.scale])
    dcp.load({"optim": optimizer}, checkpoint_id=path)
    assert model.scale not in optimizer.state
    assert "state.scale.exp_avg" in optimizer.state_dict()
    return before, sorted(map(str, optimizer.state.get(model.scale, [])))


def test_A6_a_parameter_without_saved_state_has_none_afterwards(saved: Any, ranks: RankPool, tmp_path: Path) -> None:
    world_size, path, _ = saved
    assert ranks.run(world_size, add_stale_state, path) == [(["exp_avg", "exp_avg_sq", "step"], [])] * world_size
