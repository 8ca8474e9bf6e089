"""Kinds of state that a rule may keep, in one process: back exactly, or refused by name before anything changes."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardopt import ShardedStateOptimizer
from shardopt.errors import FormatError, PlacementError
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot
from tests.unit.test_unknown_classes import Keeper, entries, step

# Saved without a process group, by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Pair = namedtuple("Pair", ["first", "second"])
Keep = Callable[[Tensor], Any]
HOWS = ("stock", "path")


class Tagged(Tensor):
    """A subclass that says more than its numbers do."""


class Opaque:
    """Nothing says how to save it."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(0, 100, shape).to(dtype)


OK: dict[str, Keep] = {
    "tensor like the parameter": lambda param: drawn(*param.shape),
    "0-d tensor": lambda param: torch.tensor(3.5),
    "float": lambda param: 0.1 + param.numel(),
    "negative zero, inf, NaN": lambda param: [-0.0, float("inf"), float("-inf"), float("nan")],
    "int": lambda param: 2**80 + param.numel(),
    "None": lambda param: None,
    "bool": lambda param: True,
    "str": lambda param: "ä \n \0 \ud800",
    "bytes": lambda param: bytes(range(256)),
    "complex": lambda param: complex(-0.0, float("inf")),
    "NumPy scalars": lambda param: [np.float32(0.1), np.int8(-3), np.bool_(True), np.float64(0.1)],
    "factored rows and columns": lambda param: {"row": drawn(param.shape[0]), "col": drawn(param.shape[-1])},
    "codes and scales": lambda param: {"codes": codes(8), "absmax": drawn(2)},
    "uint8": lambda param: codes(5, 2, dtype=torch.uint8),
    "int16": lambda param: codes(3, dtype=torch.int16),
    "int64": lambda param: torch.tensor([2**62 + 1, -(2**63)]),
    "bool tensor": lambda param: torch.tensor([[True], [False]]),
    "complex64": lambda param: drawn(3, dtype=torch.complex64) * 1j,
    "complex128, conjugated": lambda param: (drawn(3, dtype=torch.complex128) * 1j).conj(),
    "float64": lambda param: drawn(2, 2, dtype=torch.float64),
    "float16": lambda param: drawn(4, dtype=torch.float16),
    "bfloat16": lambda param: drawn(4, dtype=torch.bfloat16),
    "float8_e4m3fn": lambda param: drawn(4, dtype=torch.float8_e4m3fn),
    "float8_e5m2": lambda param: drawn(4, dtype=torch.float8_e5m2),
    "list of tensors": lambda param: [drawn(3), drawn(*param.shape), None],
    "dict of tensors": lambda param: {"m": drawn(3), "deep": {"v": drawn(2, 2)}},
    "tuple of tensors": lambda param: (drawn(3), (drawn(2), 1)),
    "list": lambda param: [1, [2.5, []], {}],
    "tuple": lambda param: (1, (2.5, ()), None),
    "set": lambda param: {1, "a", (2, None)},
    "deque with maxlen": lambda param: deque([1, 2, 3], maxlen=3),
    "deque without": lambda param: deque([1, 2, 3]),
    "deque of tensors": lambda param: deque([drawn(2), drawn(3)], maxlen=2),
    "dict with int keys": lambda param: {0: 3, 1: 1.5, "0": "text", (1, 2): None},
    "dict of tensors with int keys": lambda param: {0: drawn(2), 1: drawn(3)},
    "torch.Size, dtype, device": lambda param: [param.shape, param.dtype, param.device],
    "empty tensor": lambda param: torch.empty(0, 3),
    "transposed": lambda param: drawn(3, 2).t(),
    "requires grad": lambda param: drawn(3).requires_grad_(),
}
STRIDED: dict[str, Keep] = {
    "six dims": lambda param: drawn(2, 3, 1, 2, 2, 3),
    "six dims, strided": lambda param: drawn(3, 2, 4, 1, 6, 2).permute(5, 1, 3, 0, 2, 4)[:, :, :, ::2, 1:, ::3],
    "like the parameter, strided": lambda param: drawn(*reversed(param.shape), 2)[..., 1].permute(
        *reversed(range(param.dim()))
    ),
    "channels last": lambda param: drawn(2, 3, 2, 2).to(memory_format=torch.channels_last),
}
REFUSED: dict[str, Keep] = {
    "namedtuple": lambda param: Pair(1, 2),
    "namedtuple of tensors": lambda param: Pair(drawn(2), 2),
    "Counter": lambda param: Counter("aab"),
    "OrderedDict": lambda param: OrderedDict(a=1),
    "Generator": lambda param: torch.Generator(),
    "object": lambda param: Opaque(),
    "object beside a tensor": lambda param: [drawn(2), Opaque()],
    "function": lambda param: len,
    "NumPy array": lambda param: np.ones(3),
    "tensor subclass": lambda param: drawn(3).as_subclass(Tagged),
    "tensor subclass in a list": lambda param: [drawn(3).as_subclass(Tagged)],
    "0-d tensor subclass": lambda param: torch.tensor(1.0).as_subclass(Tagged),
    "parameter": lambda param: nn.Parameter(drawn(3)),
    "sparse tensor": lambda param: drawn(3).to_sparse(),
    "meta tensor": lambda param: torch.empty(3, device="meta"),
    "dict keyed by objects": lambda param: {Opaque(): 1},
}


def made(keep: Keep, *, steps: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, nn.Module]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).to(dtype)
    inner = Keeper(model.parameters(), lambda param: {"kept": keep(param)})
    optimizer = ShardedStateOptimizer(inner, model, compute="dtensor")
    for _ in range(steps):
        step(optimizer, model)
    return optimizer, model


def loaded(path: Path, how: str, optimizer: Any) -> None:
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    else:
        optimizer.prepare_load(path).commit()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", OK)
def test_lifecycle_1c_comes_back_exactly(name: str, how: str, tmp_path: Path) -> None:
    source, model = made(OK[name], steps=1, seed=1)
    saved = entries(source, model)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    assert value_differences(saved, entries(source, model)) == []
    for steps in (0, 2):
        optimizer, other = made(OK[name], steps=steps, seed=2)
        loaded(tmp_path, how, optimizer)
        assert value_differences(saved, entries(optimizer, other)) == []
        step(optimizer, other)


def dense(held: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.empty(one.shape, dtype=one.dtype).copy_(one.detach()) for key, one in held.items()}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", STRIDED)
def test_lifecycle_1c_strided_state_comes_back_bit_for_bit(name: str, how: str, tmp_path: Path) -> None:
    source, model = made(STRIDED[name], steps=1, seed=1)
    saved = dense(entries(source, model))
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    for steps in (0, 2):
        optimizer, other = made(STRIDED[name], steps=steps, seed=2)
        loaded(tmp_path, how, optimizer)
        assert value_differences(saved, dense(entries(optimizer, other))) == []


@pytest.mark.parametrize("name", REFUSED)
def test_lifecycle_1c_is_refused_by_name_and_nothing_changes(name: str, tmp_path: Path) -> None:
    optimizer, model = made(REFUSED[name], steps=1, seed=1)
    kept = {key: id(value) for key, value in entries(optimizer, model).items()}
    path = tmp_path / "checkpoint"
    with pytest.raises((PlacementError, FormatError), match=r"weight.*kept") as caught:
        dcp.save({"optim": optimizer}, checkpoint_id=path)
    assert "bias" in str(caught.value), "one error lists all"
    assert not path.exists()
    assert {key: id(value) for key, value in entries(optimizer, model).items()} == kept
    step(optimizer, model)


@pytest.mark.parametrize("how", HOWS)
def test_lifecycle_1c_wide_state_of_narrow_parameters_stays_wide(how: str, tmp_path: Path) -> None:
    def keep(param: Tensor) -> Any:
        return torch.randn(param.shape)

    source, model = made(keep, steps=1, seed=1, dtype=torch.bfloat16)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    for steps in (0, 1):
        optimizer, other = made(keep, steps=steps, seed=2, dtype=torch.bfloat16)
        loaded(tmp_path, how, optimizer)
        assert value_differences(entries(source, model), entries(optimizer, other)) == []
        assert other.weight in optimizer.state
        assert optimizer.state[other.weight]["kept"].dtype == torch.float32


def keeps_all(all_of_it: dict[Any, Any]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = ShardedStateOptimizer(Keeper(model.parameters(), lambda param: all_of_it), model, compute="dtensor")
    step(optimizer, model)
    return optimizer, model


@pytest.mark.parametrize("how", HOWS)
def test_lifecycle_1c_keys_with_dots_are_not_paths(how: str, tmp_path: Path) -> None:
    source, model = keeps_all({"a.b": 1, "a": {"b": 2}, "a.t": torch.ones(2), "": 3, "a/b[0]": torch.zeros(2, 3)})
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    optimizer, other = keeps_all({"a.b": 5, "a": {"b": 6}, "a.t": torch.zeros(2), "": 7, "a/b[0]": torch.ones(2, 3)})
    loaded(tmp_path, how, optimizer)
    assert value_differences(entries(source, model), entries(optimizer, other)) == []


@pytest.mark.parametrize("key", [0, None, ("a", 1), torch.float32], ids=repr)
def test_lifecycle_1c_keys_of_state_that_are_no_strings_are_refused(key: Any) -> None:
    optimizer, model = keeps_all({key: 1})
    before = snapshot(optimizer, model)
    with pytest.raises(PlacementError, match=r"weight: state key .* only strings are saved"):
        optimizer.state_dict()
    assert before.diff(snapshot(optimizer, model)) == []
