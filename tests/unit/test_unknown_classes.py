"""Optimizers that nothing is known of, with compute='dtensor': whatever they keep is saved exactly, or refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardopt import LoadError, PlacementError, ShardedStateOptimizer
from shardopt.errors import FormatError
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot


class Keeper(torch.optim.Optimizer):
    """Its rule is of no interest; each parameter gets the state that ``keep`` makes of it."""

    def __init__(self, params: Any, keep: Callable[[Tensor], dict[str, Any]]) -> None:
        super().__init__(params, {"lr": 0.5})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].update(self.keep(param))
                    param.add_(param.grad, alpha=-group["lr"])


def wrap(model: nn.Module, keep: Callable[[Tensor], dict[str, Any]]) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(Keeper(model.parameters(), keep), model, compute="dtensor")


def stepped(keep: Callable[[Tensor], dict[str, Any]], model: nn.Module | None = None) -> tuple[Any, nn.Module]:
    model = nn.Linear(3, 2) if model is None else model
    optimizer = wrap(model, keep)
    step(optimizer, model)
    return optimizer, model


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def quietly(operation: Callable[..., Any], parts: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        # DCP warns of every save and load without a process group.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        operation(parts, checkpoint_id=path)


def entries(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    return {f"{name}.{key}": v for name, p in model.named_parameters() for key, v in optimizer.state.get(p, {}).items()}


def nothing(param: Tensor) -> dict[str, Any]:
    return {}


def python_values(param: Tensor) -> dict[str, Any]:
    return {
        "int": 2**70,
        "float": -0.0,
        "bool": True,
        "none": None,
        "text": "ä\n",
        "bytes": b"\0\xff",
        "tuple": (1, 2.5, ("nested", None)),
        "list": [1, [2, {"deep": float("inf")}]],
        "set": {1, 2},
        "dict": {"a": 1, "b": {"c": (True,)}},
        "step": torch.tensor(3.0),
        "count": torch.tensor(7, dtype=torch.int64),
    }


def tensors(param: Tensor) -> dict[str, Any]:
    return {
        "same": torch.randn(param.shape),
        "row": torch.randn(param.shape[-1], dtype=torch.float64),
        "half": torch.randn(4, 3).to(torch.bfloat16),
        "eighth": torch.randn(5).to(torch.float8_e4m3fn),
        "codes": torch.randint(0, 255, (3, 1), dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "none of it": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "history": [torch.randn(3), None, torch.randn(2)],
        "nested": {"q": torch.randn(2, 2), "meta": (1, "x")},
    }


def everything(param: Tensor) -> dict[str, Any]:
    return python_values(param) | tensors(param)


def large(param: Tensor) -> dict[str, Any]:
    return {"first": torch.randn(1_500_001), "second": torch.arange(1_000_003, dtype=torch.int64)}


KEEPS = {"python values": python_values, "tensors": tensors, "everything": everything, "many MiB": large}


@pytest.mark.parametrize("how", ["stock", "path"])
@pytest.mark.parametrize("name", KEEPS)
def test_A13_what_plain_parameters_keep_round_trips_into_a_warm_optimizer(name: str, how: str, tmp_path: Path) -> None:
    source, model = stepped(KEEPS[name])
    quietly(dcp.save, {"optim": source}, tmp_path)
    torch.manual_seed(1)
    optimizer, other = stepped(KEEPS[name])
    kept = entries(optimizer, other)
    pointers = {key: value.data_ptr() for key, value in kept.items() if isinstance(value, Tensor)}
    if how == "stock":
        quietly(dcp.load, {"optim": optimizer}, tmp_path)
    else:
        optimizer.prepare_load(tmp_path).commit()
    loaded = entries(optimizer, other)
    assert value_differences(entries(source, model), loaded) == []
    assert all(loaded[key] is kept[key] and loaded[key].data_ptr() == pointers[key] for key in pointers)


@pytest.mark.parametrize("name", KEEPS)
def test_a_fresh_optimizer_of_an_unknown_class_loads_by_path(name: str, tmp_path: Path) -> None:
    source, model = stepped(KEEPS[name])
    quietly(dcp.save, {"optim": source}, tmp_path)
    other = nn.Linear(3, 2)
    optimizer = wrap(other, KEEPS[name])
    optimizer.prepare_load(tmp_path).commit()
    assert value_differences(entries(source, model), entries(optimizer, other)) == []


def test_stock_load_of_whole_values_works_on_fresh_plain_parameters(tmp_path: Path) -> None:
    source, model = stepped(everything)
    quietly(dcp.save, {"optim": source}, tmp_path)
    other = nn.Linear(3, 2)
    optimizer = wrap(other, everything)
    quietly(dcp.load, {"optim": optimizer}, tmp_path)
    assert value_differences(entries(source, model), entries(optimizer, other)) == []


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=3, history_size=4)


def run_closure(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 2.0]])).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def single_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    step(optimizer, model)


REAL = {
    "LBFGS": (lbfgs, run_closure),
    "Adafactor": (lambda params: torch.optim.Adafactor(params, lr=0.25), single_gradients),
    "Adafactor, closure": (lambda params: torch.optim.Adafactor(params, lr=0.25), run_closure),
}


@pytest.mark.parametrize("how", ["stock", "path"])
@pytest.mark.parametrize("name", REAL)
def test_torchs_own_whole_value_optimizers_resume_in_one_process(name: str, how: str, tmp_path: Path) -> None:
    build, take_step = REAL[name]
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    source = ShardedStateOptimizer(build(model.parameters()), model, compute="dtensor")
    for _ in range(3):
        take_step(source, model)
    quietly(dcp.save, {"model": model, "optim": source}, tmp_path)
    optimizer = ShardedStateOptimizer(build(other.parameters()), other, compute="dtensor")
    quietly(dcp.load, {"model": other, **({"optim": optimizer} if how == "stock" else {})}, tmp_path)
    if how == "path":
        optimizer.prepare_load(tmp_path).commit()
    assert value_differences(entries(source, model), entries(optimizer, other)) == []
    for _ in range(2):
        take_step(source, model)
        take_step(optimizer, other)
    assert value_differences(dict(model.named_parameters()), dict(other.named_parameters())) == []


class Opaque:
    """Nothing says how to save it."""


@pytest.mark.parametrize(
    "value",
    [Opaque(), lambda: None, {"inner": [Opaque()]}, [torch.ones(2), Opaque()], torch.Generator()],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_no_known_kind_is_refused_by_name(value: Any) -> None:
    optimizer, model = stepped(lambda param: {"odd": value})
    before = snapshot_without(optimizer, model)
    with pytest.raises((PlacementError, FormatError), match=r"(weight|bias).*odd"):
        optimizer.state_dict()
    assert snapshot_without(optimizer, model) == before


def snapshot_without(optimizer: Any, model: nn.Module) -> list[tuple[str, int]]:
    return [(key, id(value)) for key, value in entries(optimizer, model).items()]


def dtensor_state(param: Tensor) -> dict[str, Any]:
    return {"moment": torch.full_like(param, 0.25), "step": torch.tensor(1.0)}


@pytest.fixture
def saved_dtensors(mesh: DeviceMesh, tmp_path: Path) -> tuple[DeviceMesh, Path, Any]:
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh)
    source, model = stepped(dtensor_state, model)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    return mesh, tmp_path, entries(source, model)


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh)
    return model


def test_stock_load_works_on_a_warm_optimizer_of_an_unknown_class(saved_dtensors: Any) -> None:
    mesh, path, saved = saved_dtensors
    optimizer, model = stepped(lambda param: {k: v + 1 for k, v in dtensor_state(param).items()}, sharded(mesh))
    dcp.load({"optim": optimizer}, checkpoint_id=path)
    assert value_differences(saved, entries(optimizer, model)) == []


def test_stock_load_on_a_fresh_one_is_an_error_that_names_the_way_that_works(saved_dtensors: Any) -> None:
    mesh, path, saved = saved_dtensors
    model = sharded(mesh)
    optimizer = wrap(model, dtensor_state)
    before = snapshot(optimizer, model)
    with pytest.raises(LoadError, match=r"weight: state 'moment' is in the checkpoint, but .*use prepare_load\(path\)"):
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    assert before.diff(snapshot(optimizer, model)) == []
    optimizer.prepare_load(path).commit()
    assert value_differences(saved, entries(optimizer, model)) == []


def test_whole_values_do_not_load_into_a_sharded_parameter(mesh: DeviceMesh, tmp_path: Path) -> None:
    source, _ = stepped(tensors)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer = wrap(sharded(mesh), dtensor_state)
    with pytest.raises(LoadError, match="weight: its whole values were saved from a parameter that was whole; nothing"):
        optimizer.prepare_load(tmp_path)


def b11_refusals(kind: str) -> str:
    """The error of a save when a rule keeps plain tensors of the global shape, or a list of tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    model = nn.Linear(3, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    keeps = {
        "global": lambda param: {"moment": torch.zeros(tuple(param.shape))},
        "local": lambda param: {"moment": torch.zeros_like(param.to_local())},
        "list": lambda param: {"moment": [torch.zeros_like(param)]},
    }
    optimizer, _ = stepped(keeps[kind], model)
    try:
        optimizer.state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "global",
            r"plain tensor of shape \(5, 3\) beside a parameter of global shape \(5, 3\) sharded.*it was made on",
        ),
        ("local", r"plain tensor of shape \(\d, 3\) beside a parameter of global shape \(5, 3\) sharded"),
        ("list", r"weight: state 'moment' is a list that holds tensors; nothing says how they are sharded"),
    ],
)
def test_B11_plain_tensors_beside_a_sharded_parameter_are_refused(kind: str, sentence: str, ranks: RankPool) -> None:
    for text in ranks.run(2, b11_refusals, kind):
        assert text.startswith("RankFailureError: state_dict failed on ranks 0-1: ")
        assert re.search(sentence, text), text
        assert "weight: state 'moment'" in text
        assert "as DTensors placed like the parameter" in text or "as a DTensor placed like the parameter" in text
