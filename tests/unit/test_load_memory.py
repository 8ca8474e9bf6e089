"""What a load has read is dead when it is done, or is the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import ShardedStateOptimizer
from shardopt.portable.scratch import Scratch
from tests.support.live_tensors import live_memory, memory_of

# DCP says so without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

Made = tuple[ShardedStateOptimizer, nn.Module]


def stock(optimizer: ShardedStateOptimizer, path: Path) -> None:
    dcp.load({"optim": optimizer}, checkpoint_id=path)


def own(optimizer: ShardedStateOptimizer, path: Path) -> None:
    shardopt.load({"optim": optimizer}, path)


def from_path(optimizer: ShardedStateOptimizer, path: Path) -> None:
    optimizer.prepare_load(path).commit()


LOADS = [stock, own, from_path]


def made(mesh: DeviceMesh | None, compute: str, steps: int) -> Made:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), amsgrad=True), model, compute=compute)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param, requires_grad=False)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, model


def state_memory(optimizer: ShardedStateOptimizer) -> dict[int, int]:
    return memory_of(value for entries in optimizer.state.values() for value in entries.values())


@pytest.fixture
def scratched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of scratch each load has asked for, so far."""
    sizes: list[int] = []
    genuine = Scratch.__init__

    def counted(self: Scratch, *args: Any, **options: Any) -> None:
        genuine(self, *args, **options)
        sizes.append(self.tensor().nbytes)

    monkeypatch.setattr(Scratch, "__init__", counted)
    return sizes


def check(load: Callable[..., None], optimizer: ShardedStateOptimizer, path: Path, scratched: list[int]) -> None:
    """All that lives after a load and did not before it is the state."""
    before = live_memory()
    del scratched[:]
    load(optimizer, path)
    # Moments and maxima of both layers.
    assert sum(scratched) >= 3 * 4 * (30 * 20 + 20 + 20 * 10 + 10)
    left = {place: size for place, size in live_memory().items() if place not in before}
    assert {place: size for place, size in left.items() if place not in state_memory(optimizer)} == {}


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
@pytest.mark.parametrize(("kind", "steps"), [("plain", 0), ("plain", 2), ("auto", 0), ("owner", 2)])
def test_scratch_is_dead_after_a_load_or_is_the_state_F1_F3_A17(
    kind: str, steps: int, load: Callable[..., None], mesh: DeviceMesh, tmp_path: Path, scratched: list[int]
) -> None:
    over, compute = (None, "auto") if kind == "plain" else (mesh, kind)
    optimizer, model = made(over, compute, 2)
    shardopt.save({"optim": optimizer}, tmp_path)
    # What is made once, and what is learnt of a class.
    load(made(over, compute, steps)[0], tmp_path)
    optimizer, model = made(over, compute, steps)
    places = state_memory(optimizer)
    check(load, optimizer, tmp_path, scratched)
    assert len(state_memory(optimizer)) == 4 * len(list(model.parameters()))
    assert steps == 0 or state_memory(optimizer) == places


def test_a_prepared_load_that_is_kept_holds_nothing_once_committed_F1(tmp_path: Path, scratched: list[int]) -> None:
    shardopt.save({"optim": made(None, "auto", 2)[0]}, tmp_path)
    optimizer, _ = made(None, "auto", 1)
    kept: list[object] = []

    def load(optimizer: ShardedStateOptimizer, path: Path) -> None:
        kept.append(optimizer.prepare_load(path))
        kept[-1].commit()  # type: ignore[attr-defined]

    check(load, optimizer, tmp_path, scratched)
    check(load, optimizer, tmp_path, scratched)
