"""Jobs that save checkpoints, and that try to load damaged ones and say what became of it. Run by the rank pool."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardopt import ShardedStateOptimizer
from tests.support.gather import gathered
from tests.support.models import Shape, SmallModel, build, set_gradients
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot

SHAPE = Shape(rows=(1, 3), width=3, hidden=5)
VOTE_TIMEOUT_S = 30.0
STEPS_SAVED = (0, 1)


@dataclass(frozen=True)
class Attempt:
    """One try to load, on one rank.

    Attributes:
        case: which checkpoint.
        how: ``stock`` (``dcp.load``) or ``path`` (``prepare_load(path).commit()``).
        warm: whether the optimizer had state.
        error_type: of what was raised; None if the load went through.
        error: its text, and those of its causes.
        changes: how the optimizer, the model or the RNG differ from before.
    """

    case: str
    how: str
    warm: bool
    error_type: str | None
    error: str
    changes: list[str]


def make(model: SmallModel, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    """A wrapped optimizer of two groups, one with a tensor lr."""
    params = [*model.parameters()]
    groups = [{"params": params[:3], "lr": torch.tensor(0.25)}, {"params": params[3:], "weight_decay": 0.5}]
    return ShardedStateOptimizer(cls(groups, lr=0.125, **options), model, vote_timeout=VOTE_TIMEOUT_S)


def train(optimizer: ShardedStateOptimizer, model: SmallModel, steps: Sequence[int]) -> None:
    """Takes these steps; the gradients stay."""
    for step in steps:
        set_gradients(model, step, without=("scale",))
        optimizer.step()


def save(path: str, shape: Shape, options: dict[str, Any], steps: Sequence[int]) -> dict[str, Any]:
    """Trains and saves; the whole state."""
    model = build("fsdp", shape)
    optimizer = make(model, **options)
    train(optimizer, model, steps)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    return gathered(optimizer, model)


def save_without_shardopt(path: str) -> None:
    """What a user had before: the model, and torch's own optimizer state under the same key."""
    model = build("fsdp", SHAPE)
    inner = torch.optim.AdamW(model.parameters())
    set_gradients(model, 0)
    inner.step()
    state = {name: inner.state[param] for name, param in model.named_parameters()}
    dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=path)


def attempt(how: str, path: str, optimizer: ShardedStateOptimizer) -> BaseException | None:
    """Loads; what was raised."""
    try:
        if how == "stock":
            dcp.load({"optim": optimizer}, checkpoint_id=path)
        else:
            optimizer.prepare_load(path).commit()
    # CheckpointException is a BaseException.
    except BaseException as error:
        return error
    return None


def refuse_all(
    directory: str, cases: Sequence[tuple[str, dict[str, Any], tuple[str, ...]]], expected: dict[str, Any]
) -> list[Attempt]:
    """Tries every case with fresh and warm optimizers; after each, the group, a step and a good load still work.

    Args:
        directory: holds a checkpoint for each case under its name, and ``good``. A rank that has a directory of its
            own (``<case>.rank<r>``) reads that.
        cases: name, options of the optimizer, ways to load.
        expected: gathered state of ``good``.
    """
    return [one for case in cases for one in _refuse(directory, *case, expected)]


def _refuse(
    directory: str, case: str, options: dict[str, Any], ways: Sequence[str], expected: dict[str, Any]
) -> Iterator[Attempt]:
    rank = dist.get_rank()
    own = os.path.join(directory, f"{case}.rank{rank}")
    path = own if os.path.exists(own) else os.path.join(directory, case)
    model = build("fsdp", SHAPE, seed=7)
    optimizer = make(model, **options)
    for warm in (False, True):
        if warm:
            train(optimizer, model, [5])
        set_gradients(model, 6)
        for how in ways:
            before = snapshot(optimizer, model)
            error = attempt(how, path, optimizer)
            changes = before.diff(snapshot(optimizer, model))
            kind = None if error is None else type(error).__name__
            text = "" if error is None else "".join(traceback.format_exception(error))
            yield Attempt(case, how, warm, kind, text, changes)
    _works_after(os.path.join(directory, "good"), optimizer, model, expected if not options else None)


def _works_after(
    good: str, optimizer: ShardedStateOptimizer, model: SmallModel, expected: dict[str, Any] | None
) -> None:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    step = optimizer.state[model.up.weight]["step"].item()
    train(optimizer, model, [8])
    assert optimizer.state[model.up.weight]["step"].item() == step + 1
    if expected is None:
        optimizer.prepare_load(good).commit()
    else:
        dcp.load({"optim": optimizer}, checkpoint_id=good)
        assert value_differences(expected, gathered(optimizer, model)) == []


def load_good(path: str, options: dict[str, Any], how: str) -> dict[str, Any]:
    """Loads into a warm optimizer; the whole state."""
    model = build("fsdp", SHAPE, seed=7)
    optimizer = make(model, **options)
    train(optimizer, model, [5])
    error = attempt(how, path, optimizer)
    if error is not None:
        raise error
    return gathered(optimizer, model)
