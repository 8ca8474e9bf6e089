"""A snapshot sees every kind of corruption, and nothing where nothing changed."""

from __future__ import annotations

import copy
import pickle
import random
import struct
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.raw_values import raw_bytes, value_differences
from tests.support.snapshot import Snapshot, snapshot


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.register_buffer("offset", torch.tensor([0.0, -0.0]))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(rows))) + self.offset


@dataclass
class Run:
    """A trained model with an optimizer whose state has the kinds of values that are found in optimizers."""

    model: Model = field(default_factory=Model)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, betas=(0.9, 0.999))
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": torch.tensor(0.5)})
        for _ in range(2):
            self.model(torch.randn(4, 3)).square().sum().backward()
            self.optimizer.step()
        # Nested and plain values, and tensors whose values compare equal while their bytes do not.
        self.entries["history"] = [torch.zeros(2), {"scale": (1, 2.0)}]
        self.entries["window"] = deque([1, 2], maxlen=2)
        self.entries["count"] = 3
        self.entries["flag"] = True
        self.entries["nan"] = torch.full((2,), float("nan"))
        self.entries["codes"] = torch.arange(4, dtype=torch.bfloat16)

    @property
    def weight(self) -> nn.Parameter:
        return self.model.first.weight

    @property
    def entries(self) -> dict[str, Any]:
        return self.optimizer.state[self.weight]

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def look(self) -> Snapshot:
        return snapshot(self.optimizer, self.model)


def flip_bit(tensor: Tensor, byte: int, bit: int = 0) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[byte] ^= 1 << bit


def same_bytes(value: Tensor) -> Tensor:
    copied = value.clone()
    assert raw_bytes(copied) == raw_bytes(value)
    return copied


def negate_zero(run: Run) -> None:
    run.entries["history"][0][1] = -0.0


def change_nan_payload(run: Run) -> None:
    before = run.entries["nan"].clone()
    flip_bit(run.entries["nan"], 4)
    assert torch.equal(before.isnan(), run.entries["nan"].isnan()), "it must still be a NaN"


def draw_numpy(_: Run) -> None:
    np.random.random()


def draw_python(_: Run) -> None:
    random.random()


def draw_torch(_: Run) -> None:
    torch.rand(1)


def replace_group(run: Run) -> None:
    run.optimizer.param_groups[0] = dict(run.group)


def rebind_storage(run: Run) -> None:
    run.weight.data = same_bytes(run.weight.data)


def hook(*_: Any) -> None:
    pass


CORRUPTIONS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "lowest bit of a moment": (lambda r: flip_bit(r.entries["exp_avg"], 8), "state.first.weight['exp_avg']: 1 of 15"),
    "-0.0 for 0.0": (negate_zero, "state.first.weight['history'][0]: 1 of 2"),
    "nan payload": (change_nan_payload, "state.first.weight['nan']: 1 of 2"),
    "0-d step": (lambda r: r.entries["step"].add_(1), "state.first.weight['step']: 1 of 1"),
    "bfloat16 code": (lambda r: flip_bit(r.entries["codes"], 2), "state.first.weight['codes']: 1 of 4"),
    "dtype": (lambda r: r.entries.update(step=r.entries["step"].double()), "['step']: dtype torch.float32"),
    "shape": (lambda r: r.entries["exp_avg"].resize_(3, 5), "['exp_avg']: shape (5, 3)"),
    "equal tensor, other object": (
        lambda r: r.entries.update(exp_avg=same_bytes(r.entries["exp_avg"])),
        "state.first.weight['exp_avg']: replaced by another object",
    ),
    "same parameter, other memory": (rebind_storage, "parameter.first.weight: moved from address"),
    "lr to int": (lambda r: r.group.update(lr=0), "group[0]['lr']: type float -> int"),
    "lr to numpy float": (lambda r: r.group.update(lr=np.float64(0.1)), "group[0]['lr']: type float -> numpy.float64"),
    "lr by one ulp": (lambda r: r.group.update(lr=float(np.nextafter(0.1, 1))), "group[0]['lr']: 0.1 -> 0.1000000"),
    "lr tensor, other object": (
        lambda r: r.optimizer.param_groups[1].update(lr=torch.tensor(0.5)),
        "group[1]['lr']: replaced by another object",
    ),
    "bool to int": (lambda r: r.entries.update(flag=1), "state.first.weight['flag']: type bool -> int"),
    "int to int": (lambda r: r.entries.update(count=4), "state.first.weight['count']: 3 -> 4"),
    "betas to list": (lambda r: r.group.update(betas=[0.9, 0.999]), "group[0]['betas']: type tuple -> list"),
    "nested number": (lambda r: r.entries["history"][1].update(scale=(1, 2)), "['history'][1]['scale'][1]: type float"),
    "deque": (lambda r: r.entries["window"].append(3), "state.first.weight['window'][0]: 1 -> 2"),
    "torch rng": (draw_torch, "rng.torch"),
    "python rng": (draw_python, "rng.python"),
    "numpy rng": (draw_numpy, "rng.numpy"),
    "gradient byte": (lambda r: flip_bit(r.weight.grad, 0), "gradient.first.weight: 1 of 15"),
    "gradient gone": (
        lambda r: setattr(r.weight, "grad", None),
        "gradient.first.weight: type torch.Tensor -> NoneType",
    ),
    "parameter bit": (lambda r: flip_bit(r.weight, 3, bit=7), "parameter.first.weight: 1 of 15"),
    "buffer sign": (lambda r: r.model.offset.neg_(), "buffer.offset: 2 of 2"),
    "removed entry": (lambda r: r.entries.pop("exp_avg_sq"), "state.first.weight: keys removed: 'exp_avg_sq'"),
    "added entry": (lambda r: r.entries.update(extra=None), "state.first.weight: keys added: 'extra'"),
    "removed state": (lambda r: r.optimizer.state.pop(r.weight), "state: keys removed: first.weight"),
    "state made by a look": (lambda r: r.optimizer.state[torch.ones(1)], "state: keys added: <a tensor"),
    "group dict": (replace_group, "group[0]: replaced by another object"),
    "params list": (lambda r: r.group.update(params=list(r.group["params"])), "group[0]['params']: replaced"),
    "order of params": (lambda r: r.group["params"].reverse(), "group[0]['params']: params ('first.weight'"),
    "default": (lambda r: r.optimizer.defaults.update(eps=1e-7), "attribute.defaults['eps']: 1e-08 -> 1e-07"),
    "counter": (lambda r: setattr(r.optimizer, "_calls", 1), "attribute._calls: added"),
    "step hook": (lambda r: r.optimizer.register_step_pre_hook(hook), "_optimizer_step_pre_hooks[0]: added"),
    "module hook": (lambda r: r.model.second.register_forward_hook(hook), "hooks.module.second:_forward_hooks"),
    "gradient hook": (lambda r: r.weight.register_hook(hook), "hooks.parameter.first.weight:_backward_hooks"),
    "requires_grad": (lambda r: r.weight.requires_grad_(False), "parameter.first.weight: requires_grad True"),
    "eval mode": (lambda r: r.model.second.eval(), "training."),
}


def test_an_untouched_run_has_no_difference() -> None:
    run = Run()
    assert run.look().diff(run.look()) == []


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_caught_at_its_path(name: str) -> None:
    corrupt, expected = CORRUPTIONS[name]
    run = Run()
    before = run.look()
    corrupt(run)
    found = before.diff(run.look())
    assert any(expected in line for line in found), found


@pytest.mark.parametrize("name", ["equal tensor, other object", "same parameter, other memory", "group dict"])
def test_identities_can_be_left_out(name: str) -> None:
    run = Run()
    before = run.look()
    CORRUPTIONS[name][0](run)
    assert before.diff(run.look(), identities=False) == []


def test_two_runs_compare_by_bytes_also_after_a_journey() -> None:
    first = Run().look()
    second = pickle.loads(pickle.dumps(Run().look()))
    assert first.diff(second, identities=False) == []
    with pytest.raises(ValueError, match="no identities"):
        first.diff(second)
    other = Run()
    flip_bit(other.entries["exp_avg"], 0)
    assert len(first.diff(pickle.loads(pickle.dumps(other.look())), identities=False)) == 1


def test_ignored_paths_may_differ() -> None:
    run = Run()
    before = run.look()
    run.group["lr"] = 0.2
    run.entries["count"] = 9
    assert before.diff(run.look(), ignore=["group[0]['lr']", "state.*['count']"]) == []
    assert before.diff(run.look(), ignore=["group[0]['lr']"]) == ["state.first.weight['count']: 3 -> 9"]


def test_a_look_changes_nothing() -> None:
    run = Run()
    untouched = copy.deepcopy(run.optimizer.state_dict())
    versions = [param._version for param in run.model.parameters()]
    keys = list(run.optimizer.state)
    run.look()
    assert list(run.optimizer.state) == keys
    assert value_differences(untouched, run.optimizer.state_dict()) == []
    assert versions == [param._version for param in run.model.parameters()]


def test_a_wrapper_with_the_same_attributes_is_seen_with_what_it_wraps() -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizers = [inner]
            self.param_groups = inner.param_groups
            self.state = inner.state

    run = Run()
    wrapper = Wrapper(run.optimizer)
    before = snapshot(wrapper, run.model)
    run.optimizer.register_step_post_hook(hook)
    flip_bit(run.entries["exp_avg"], 0)
    found = before.diff(snapshot(wrapper, run.model))
    assert [line.partition(":")[0] for line in found] == [
        "state.first.weight['exp_avg']",
        "hooks.optimizer.optimizers[0].",
    ]


def test_several_models_keep_their_names_apart() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    before = snapshot(optimizer, models)
    flip_bit(models[1].bias, 0)
    (line,) = before.diff(snapshot(optimizer, models))
    assert line.startswith("parameter.1:bias: 1 of 2")


def test_values_differ_by_bits_and_types() -> None:
    nan, other_nan = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, (0x7FF8 << 48) | 1))
    assert value_differences({"a": nan}, {"a": nan}) == []
    assert len(value_differences({"a": nan}, {"a": other_nan})) == 1
    assert value_differences({"a": 0.0}, {"a": -0.0}) == ["a: 0.0 -> -0.0"]
    assert value_differences({"a": torch.Size([1])}, {"a": (1,)}) == ["a: type torch.Size -> tuple"]
    assert value_differences({"a": {1: 2}}, {"a": defaultdict(int, {1: 2})}) == [
        "a: type dict -> collections.defaultdict"
    ]
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,))
        assert value_differences({"a": sparse}, {"a": sparse.clone()}) == []
        assert len(value_differences({"a": sparse}, {"a": sparse * 2})) == 1
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    assert value_differences({"a": generators[0]}, {"a": generators[1]}) == []
    assert len(value_differences({"a": generators[0]}, {"a": generators[2]})) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    assert len(raw_bytes(torch.zeros(3, 2).to(dtype).t())) == 6 * dtype.itemsize
    assert len(raw_bytes(torch.zeros((), dtype=dtype))) == dtype.itemsize


def test_what_cannot_be_seen_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot see inside a object"):
        value_differences({"a": object()}, {"a": object()})


def test_a_value_that_contains_itself_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert value_differences({"a": loop}, {"a": loop}) == []
