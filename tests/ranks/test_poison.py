"""A step that fails half way on one rank: nobody steps or saves on, until a good checkpoint is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardopt import ShardedStateOptimizer
from tests.ranks.refusals import SHAPE, STEPS_SAVED, make, save, train
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import SmallModel, build, set_gradients
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot

REASON = r"an earlier step failed after it had begun to write \(ArithmeticError: after the first write\)"


def fail_in_the_second_group(optimizer: ShardedStateOptimizer) -> None:
    """The next step of the inner optimizer writes its first group, then raises; later ones are well."""
    inner: Any = optimizer.optimizers[0]
    genuine = inner._init_group

    def init_group(group: dict[str, Any], *rest: Any) -> Any:
        if group is inner.param_groups[1]:
            del inner._init_group
            raise ArithmeticError("after the first write")
        return genuine(group, *rest)

    inner._init_group = init_group


def caught(operation: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """Type and text of what it raises."""
    try:
        operation(*args, **options)
    # CheckpointException is a BaseException.
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def poisoned(bad: int) -> tuple[ShardedStateOptimizer, SmallModel, tuple[str, str], bool]:
    """An optimizer whose third step has failed on rank ``bad``; what was raised here, and whether a weight changed."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, STEPS_SAVED)
    set_gradients(model, 2)
    if dist.get_rank() == bad:
        fail_in_the_second_group(optimizer)
    before = snapshot(optimizer, model)
    failure = caught(optimizer.step)
    changes = before.diff(snapshot(optimizer, model))
    return optimizer, model, failure, any(line.startswith("parameter.") for line in changes)


def after_a_half_step(bad: int, directory: str, how: str, expected: dict[str, Any]) -> dict[str, Any]:
    """What each thing that may be tried raises, on this rank."""
    optimizer, model, failure, written = poisoned(bad)
    found: dict[str, Any] = {"failure": failure, "written": written}
    before = snapshot(optimizer, model)
    found["step"] = caught(optimizer.step)
    found["save"] = caught(dcp.save, {"optim": optimizer}, checkpoint_id=f"{directory}/bad")
    found["bad load"] = caught(optimizer.prepare_load, f"{directory}/none")
    found["step again"] = caught(optimizer.step)
    found["changes"] = before.diff(snapshot(optimizer, model))
    if how == "stock":
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=f"{directory}/good")
    else:
        dcp.load({"model": model}, checkpoint_id=f"{directory}/good")
        prepared = optimizer.prepare_load(f"{directory}/good")
        found["prepared only"] = caught(optimizer.step)
        prepared.commit()
    found["differences"] = value_differences(expected, gathered(optimizer, model))
    train(optimizer, model, [2])
    dcp.save({"optim": optimizer}, checkpoint_id=f"{directory}/{how}{bad}")
    found["after"] = {**gathered(optimizer, model), **gathered_parameters(model)}
    return found


def uninterrupted() -> dict[str, Any]:
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, (*STEPS_SAVED, 2))
    return {**gathered(optimizer, model), **gathered_parameters(model)}


@pytest.mark.parametrize("how", ["stock", "path"])
@pytest.mark.parametrize(("world_size", "bad"), [(2, 0), (2, 1), (4, 2), (4, 3)])
def test_a_half_step_on_one_rank_stops_all_until_a_good_load_E3_E10(
    world_size: int, bad: int, how: str, ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(world_size, save, str(tmp_path / "good"), SHAPE, {}, STEPS_SAVED)[0]
    well = ranks.run(world_size, uninterrupted)[0]
    for rank, found in enumerate(ranks.run(world_size, after_a_half_step, bad, str(tmp_path), how, expected)):
        # Of four ranks the last one holds no element of anything.
        assert found["written"] or rank == 3
        assert found["failure"] == (("ArithmeticError", "after the first write") if rank == bad else ("nothing", ""))
        for refused in ("step", "step again", *(["prepared only"] if how == "path" else [])):
            kind, text = found[refused]
            assert kind == "RankFailureError"
            assert text.startswith(f"step failed on rank {bad}: ShardoptError: ")
            assert re.search(REASON, text)
            assert "load a good checkpoint (model and optimizer) to go on" in text
        kind, text = found["save"]
        assert kind == "CheckpointException"
        assert re.search(REASON, text)
        assert found["bad load"][0] == "LoadError"
        assert found["changes"] == []
        assert found["differences"] == []
        assert value_differences(well, found["after"]) == []
    assert not (tmp_path / "bad" / ".metadata").exists()
