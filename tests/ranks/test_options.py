"""Options of a load, and options of the optimizer that have changed since the save, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardopt import RankFailureError, ShardedStateOptimizer
from tests.support.gather import gathered
from tests.support.models import Shape, SmallModel, build, set_gradients
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot

SHAPE = Shape()
CHANGED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, {"amsgrad": False}),
    "momentum": (torch.optim.SGD, {"momentum": 0.5}, {"momentum": 0.0}),
    "centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, {"centered": False, "momentum": 0.0}),
}


def made(cls: Any, options: dict[str, Any], steps: int) -> tuple[ShardedStateOptimizer, SmallModel]:
    model = build("fsdp", SHAPE)
    optimizer = ShardedStateOptimizer(cls(model.parameters(), lr=0.125, **options), model)
    for number in range(steps):
        set_gradients(model, number)
        optimizer.step()
    return optimizer, model


def save_after_an_option_was_changed(case: str, root: str) -> Any:
    cls, before, after = CHANGED[case]
    optimizer, model = made(cls, before, 2)
    for group in optimizer.param_groups:
        group.update(after)
    set_gradients(model, 2)
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    return gathered(optimizer, model)


def load_what_was_left(case: str, root: str) -> Any:
    cls, _, after = CHANGED[case]
    optimizer, model = made(cls, after, 0)
    optimizer.prepare_load(root).commit()
    return gathered(optimizer, model)


@pytest.mark.parametrize("case", CHANGED)
def test_state_left_from_before_an_option_was_changed_is_kept(case: str, ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(2, save_after_an_option_was_changed, case, str(tmp_path))
    for world_size in (1, 2, 4):
        for loaded in ranks.run(world_size, load_what_was_left, case, str(tmp_path)):
            assert value_differences(saved[0], loaded) == []


def load_with_options_that_differ(root: str) -> tuple[str, list[str]]:
    optimizer, model = made(torch.optim.AdamW, {}, 1)
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    before = snapshot(optimizer, model)
    with pytest.raises(RankFailureError) as refused:
        optimizer.prepare_load(root, hyperparameters={"lr": 0.5 + dist.get_rank()})
    changes = before.diff(snapshot(optimizer, model))
    optimizer.prepare_load(root).commit()
    return str(refused.value), changes


def test_ranks_with_different_options_do_not_load(ranks: RankPool, tmp_path: Path) -> None:
    for text, changes in ranks.run(2, load_with_options_that_differ, str(tmp_path)):
        assert "prepare_load: ranks disagree" in text
        assert changes == []


def keep_values_that_differ(root: str) -> tuple[str, list[str]]:
    optimizer, model = made(torch.optim.AdamW, {}, 1)
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    optimizer.param_groups[0]["lr"] = 0.5 + dist.get_rank()
    before = snapshot(optimizer, model)
    with pytest.raises(RankFailureError) as refused:
        optimizer.prepare_load(root, hyperparameters="keep")
    changes = before.diff(snapshot(optimizer, model))
    optimizer.prepare_load(root).commit()
    return str(refused.value), changes


def test_ranks_that_would_keep_different_values_do_not_load(ranks: RankPool, tmp_path: Path) -> None:
    for text, changes in ranks.run(2, keep_values_that_differ, str(tmp_path)):
        assert "or keep different group values" in text
        assert changes == []


def load_with_a_bad_option_on_one_rank(root: str) -> str:
    optimizer, _ = made(torch.optim.AdamW, {}, 1)
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    with pytest.raises((ValueError, RankFailureError)) as refused:
        optimizer.prepare_load(root, dtype="fp8" if dist.get_rank() == 1 else "same")
    optimizer.prepare_load(root).commit()
    return type(refused.value).__name__ + str(refused.value.__cause__ or refused.value)


BAD: dict[str, dict[str, Any]] = {
    "keys": {"hyperparameters": {1: 2, "lr": 3}},
    "no text": {"hyperparameters": {"lr": torch.ones(2).to_sparse()}},
    "meta": {"hyperparameters": {"lr": torch.ones((), device="meta")}},
    "fresh": {"fresh": 3},
}


def load_with_what_cannot_be_compared(root: str, case: str) -> tuple[str, str]:
    optimizer, _ = made(torch.optim.AdamW, {}, 1)
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    options = BAD[case] if dist.get_rank() == 0 else {}
    with pytest.raises(Exception, match=".") as refused:
        optimizer.prepare_load(root, **options)
    optimizer.prepare_load(root).commit()
    return type(refused.value).__name__, str(refused.value)


@pytest.mark.parametrize("case", BAD)
def test_an_option_that_has_no_text_is_an_error_on_both(case: str, ranks: RankPool, tmp_path: Path) -> None:
    (kind, _), (other, text) = ranks.run(2, load_with_what_cannot_be_compared, str(tmp_path), case, deadline_s=25.0)
    assert kind != "AssertionError"
    assert other == "RankFailureError"
    assert text.startswith("prepare_load failed on rank 0: ")


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no optimizer": (None, ..., "TypeError: expected a torch.optim.Optimizer, got NoneType"),
    "no model": (..., None, "TypeError: model: expected a torch.nn.Module or a list of them, got a NoneType"),
    "swapped": ("model", "optimizer", "TypeError: model: expected a torch.nn.Module"),
    "parameters": (
        ...,
        "parameters",
        "TypeError: model: expected a torch.nn.Module or a list of them, got a DTensor",
    ),
}


def construct_wrongly(case: str) -> str:
    model = build("fsdp", SHAPE)
    inner = torch.optim.AdamW(model.parameters())
    things: dict[Any, Any] = {"model": model, "optimizer": inner, "parameters": list(model.parameters()), None: None}
    optimizer, modules, _ = WRONG[case]
    given = (things.get(optimizer, inner), things.get(modules, model)) if dist.get_rank() == 0 else (inner, model)
    with pytest.raises(Exception, match=".") as refused:
        ShardedStateOptimizer(*given, vote_timeout=20.0)
    ShardedStateOptimizer(inner, model, vote_timeout=20.0).state_dict()
    return f"{type(refused.value).__name__}: {refused.value}"


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kind_of_argument_on_one_rank_is_an_error_on_both(case: str, ranks: RankPool) -> None:
    first, second = ranks.run(2, construct_wrongly, case, deadline_s=25.0)
    assert WRONG[case][2] in first
    assert second.startswith(f"RankFailureError: construct failed on rank 0: {WRONG[case][2]}")


def test_a_bad_option_on_one_rank_is_an_error_on_both(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, load_with_a_bad_option_on_one_rank, str(tmp_path), deadline_s=25.0):
        assert text.startswith("RankFailureError")
        assert "dtype='fp8' is unknown" in text


def load_where_one_shard_is_not_finite(root: str) -> str:
    optimizer, model = made(torch.optim.AdamW, {}, 1)
    if dist.get_rank() == 1:
        optimizer.state[model.up.weight]["exp_avg"][0, 0] = float("nan")
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    other, _ = made(torch.optim.AdamW, {}, 0)
    with pytest.raises(Exception, match=r"up\.weight: state 'exp_avg' holds NaN on this rank") as refused:
        other.prepare_load(root)
    other.prepare_load(root, finite="report").commit()
    return type(refused.value).__name__


def test_a_shard_that_is_not_finite_is_every_ranks_error(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, load_where_one_shard_is_not_finite, str(tmp_path)) == ["RankFailureError", "LoadError"]
