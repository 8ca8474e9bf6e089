"""Compiled steps, and names of tied parameters in what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ExponentialLR

from shardopt import ShardedStateOptimizer
from tests.support.gather import gathered, gathered_parameters
from tests.support.raw_values import value_differences
from tests.support.tamper import read_tensors

# Of torch's own, in what Dynamo imports when it first compiles an optimizer.
COMPILES = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A wrapped AdamW whose own step is compiled, and a count of the graphs that were made of it."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        # A tensor lr: every new value of a float is a new graph, whoever sets it.
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.125), foreach=False)
        self.optimizer = ShardedStateOptimizer(self.inner, self.model)
        self.counter = CompileCounter()
        self.inner.step = torch.compile(self.inner.step, backend=self.counter)  # type: ignore[method-assign]
        self.scheduler = ExponentialLR(self.optimizer, gamma=0.5)

    def train(self, steps: range) -> list[int]:
        """Takes these steps; how many graphs there are after each."""
        graphs: list[int] = []
        for step in steps:
            for index, param in enumerate(self.model.parameters()):
                param.grad = torch.full_like(param, 1.0 + step + index)
            self.optimizer.step()
            self.scheduler.step()
            graphs.append(self.counter.frame_count)
        return graphs

    def held(self) -> dict[str, Any]:
        return {**gathered(self.optimizer, self.model), **gathered_parameters(self.model)}

    def addresses(self) -> dict[tuple[str, str], int]:
        state = self.optimizer.sharded_state()
        found = {(key, ""): value for key, value in state.items()}
        for name, param in self.model.named_parameters():
            found[name, "step"] = self.optimizer.state[param]["step"]
        return {key: getattr(value, "_local_tensor", value).data_ptr() for key, value in found.items()}


def compiled(sharded: bool, request: pytest.FixtureRequest) -> Compiled:
    return Compiled(request.getfixturevalue("mesh") if sharded else None)


@KINDS
@COMPILES
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_compiled_step_goes_on_with_what_was_loaded_J7(
    sharded: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    mesh = request.getfixturevalue("mesh") if sharded else None
    source, live = Compiled(mesh), Compiled(mesh)
    source.train(range(2))
    dcp.save({"model": source.model, "optim": source.optimizer}, checkpoint_id=tmp_path)
    live.train(range(5, 8))
    addresses, graphs = live.addresses(), live.counter.frame_count
    assert graphs >= 1
    dcp.load({"model": live.model, "optim": live.optimizer}, checkpoint_id=tmp_path)
    assert live.addresses() == addresses
    live.scheduler.load_state_dict(source.scheduler.state_dict())
    assert value_differences(source.held(), live.held()) == []
    source.train(range(2, 4))
    assert live.train(range(2, 4)) == [graphs, graphs]
    assert value_differences(source.held(), live.held()) == []


@KINDS
@COMPILES
def test_a_scheduler_does_not_make_a_compiled_step_compile_again_J9(
    sharded: bool, request: pytest.FixtureRequest
) -> None:
    one = compiled(sharded, request)
    lr = one.inner.param_groups[0]["lr"]
    graphs = one.train(range(6))
    assert graphs[0] >= 1
    assert graphs == [graphs[0]] * 6
    assert one.inner.param_groups[0]["lr"] is lr
    assert lr == 0.125 * 0.5**6
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    assert one.train(range(6, 8)) == [graphs[0]] * 2
    assert one.inner.param_groups[0]["lr"] is lr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_name_that_is_listed_can_be_read_and_aliases_list_nothing_K2(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("embed", "inner", "head")})
    model["head"].weight = model["embed"].weight
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    stored = read_tensors(tmp_path)
    parameters = json.loads(stored.pop("optim.manifest").numpy().tobytes())["parameters"]
    assert parameters["embed.weight"]["aliases"] == ["head.weight"]
    listed = {
        f"optim.state.{fqn}.{entry}": optimizer.state[model.get_parameter(fqn)][entry]
        for fqn, record in parameters.items()
        for entry, described in record["entries"].items()
        if "dtype" in described
    }
    assert set(listed) == set(stored)
    assert len(listed) == 4
    assert value_differences(listed, stored) == []
