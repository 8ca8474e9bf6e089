"""``step``: closures, and what a step that raised leaves behind."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardopt import PresentationError, ShardedStateOptimizer, ShardoptError
from shardopt.torch_compat import local_shard
from tests.support.rules import Awkward, state, train, weights
from tests.support.snapshot import snapshot

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def wrap(model: nn.Module, compute: str = "auto") -> ShardedStateOptimizer:
    return ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model, compute=compute)


class Closure:
    """Re-evaluates the model; counts its calls and notes whether gradients were enabled."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.grad_enabled: list[bool] = []

    def __call__(self) -> torch.Tensor:
        self.grad_enabled.append(torch.is_grad_enabled())
        self.model.zero_grad()
        loss = sum((p.float() - 1).square().sum() for p in self.model.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("compute", ["local", "dtensor"])
def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned(compute: str) -> None:
    model, other = Awkward(), Awkward()
    bare, optimizer = torch.optim.AdamW(model.parameters()), wrap(other, compute)
    closure = Closure(other)
    with torch.no_grad():
        losses = [bare.step(Closure(model)), bare.step(Closure(model))]
        assert [optimizer.step(closure), optimizer.step(closure=closure)] == losses
        assert not torch.is_grad_enabled()
    assert losses[1] < losses[0]
    assert closure.grad_enabled == [True, True]
    assert weights(other) == weights(model)
    assert optimizer.step() is None


def test_a_closure_feeds_several_optimizers_once() -> None:
    model, other = Awkward(), Awkward()
    bare, (first, *rest) = torch.optim.AdamW(model.parameters()), other.parameters()
    optimizer = ShardedStateOptimizer([torch.optim.AdamW([first]), torch.optim.AdamW(rest)], other)
    closure = Closure(other)
    assert optimizer.step(closure) == bare.step(Closure(model))
    assert len(closure.grad_enabled) == 1
    assert weights(other) == weights(model)


def test_a_closure_with_several_optimizers_of_which_one_calls_it_itself_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inners = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in model]
    optimizer = ShardedStateOptimizer(inners, model, compute="dtensor")
    before = snapshot(optimizer, model)
    with pytest.raises(
        PresentationError, match="a closure with several optimizers needs all of them to be element-wise"
    ):
        optimizer.step(lambda: torch.tensor(0.0))
    assert before.diff(snapshot(optimizer, model), ignore=["attribute._*"]) == []


class Failing:
    """Makes AdamW raise in its update, with the state it has made so far."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.original = inner._init_group

    def __enter__(self) -> None:
        def raising(group: dict[str, Any], *rest: Any) -> None:
            self.original(group, *rest)
            raise MemoryError("no memory left")

        self.inner._init_group = raising

    def __exit__(self, *_: object) -> None:
        self.inner._init_group = self.original


def test_a_step_that_raised_poisons_until_a_good_load(tmp_path: Path) -> None:
    model, other = Awkward(), Awkward()
    bare, optimizer = wrap(model), wrap(other)
    train(bare, model, range(2))
    train(optimizer, other, range(2))
    good = tmp_path / "good"
    dcp.save({"model": other, "optim": optimizer}, checkpoint_id=good)
    other.give_gradients(2)
    with Failing(optimizer.optimizers[0]), pytest.raises(MemoryError, match="no memory left"):
        optimizer.step()
    sentence = (
        r"an earlier step failed .*\(MemoryError.*: no memory left\).*load a good checkpoint \(model and optimizer\)"
    )
    before = weights(other)
    with pytest.raises(ShardoptError, match=sentence):
        optimizer.step()
    assert weights(other) == before
    # Saving it is refused: the checkpoint would look good.
    with pytest.raises(CheckpointException, match=sentence):
        dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / "bad")
    assert not (tmp_path / "bad" / ".metadata").exists()
    dcp.load({"model": other, "optim": optimizer}, checkpoint_id=good)
    train(bare, model, range(2, 4))
    train(optimizer, other, range(2, 4))
    assert weights(other) == weights(model)
    assert state(optimizer, other) == state(bare, model)


@pytest.mark.parametrize("where", ["closure", "pre hook", "gradient"])
def test_what_raises_before_the_update_does_not_poison(where: str, mesh: DeviceMesh) -> None:
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = wrap(model)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    before = snapshot(optimizer, model)

    def fail(*_: Any) -> None:
        raise OSError("data set is gone")

    if where == "closure":
        with pytest.raises(OSError, match="data set is gone"):
            optimizer.step(fail)
    elif where == "pre hook":
        handle = optimizer.optimizers[0].register_step_pre_hook(fail)
        with pytest.raises(OSError, match="data set is gone"):
            optimizer.step()
        handle.remove()
    else:
        grad, model.weight.grad = model.weight.grad, torch.ones(2, 2)
        with pytest.raises(
            PresentationError, match=r"weight: the parameter is a DTensor.*assign gradients as DTensors"
        ):
            optimizer.step()
        model.weight.grad = grad
    assert before.diff(snapshot(optimizer, model)) == []
    optimizer.step()


@pytest.mark.parametrize("refused", [False, True], ids=["stepped", "refused"])
def test_gradients_do_not_outlive_zero_grad(refused: bool, mesh: DeviceMesh) -> None:
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = wrap(model)
    model(torch.ones(1, 64)).sum().backward()
    memory = weakref.ref(local_shard(model.weight.grad))
    if refused:
        # The last thing that can refuse a step: the preflight has seen the gradients by then.
        optimizer._scope.vote = _no_vote
        with pytest.raises(OSError, match="store is gone"):
            optimizer.step()
    else:
        optimizer.step()
    assert memory() is not None
    optimizer.zero_grad()
    assert memory() is None


def _no_vote(*_: Any, **__: Any) -> int:
    raise OSError("store is gone")
