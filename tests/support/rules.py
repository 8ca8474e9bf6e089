"""Every element-wise class of torch.optim with each of its flags, a model of awkward shapes, and values as raw bits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# They need a whole parameter, its sparsity or a closure; everything else in torch.optim updates element by element.
NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    name: value
    for name, value in sorted(vars(torch.optim).items())
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
    and name not in NOT_ELEMENTWISE
}

# Values that change the update; a flag is tried on every class whose constructor has it.
_FLAGS: dict[str, Any] = {
    "amsgrad": True,
    "centered": True,
    "decoupled_weight_decay": True,
    "foreach": True,
    "fused": True,
    "maximize": True,
    "momentum": 0.9,
    "weight_decay": 0.1,
}
_COMBINED: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True, "fused": True}, {"amsgrad": True, "weight_decay": 0.1, "foreach": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}, {"momentum": 0.9, "centered": True, "foreach": True}],
    "SGD": [
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5, "foreach": True},
        {"momentum": 0.9, "dampening": 0.5, "fused": True},
    ],
}


@dataclass(frozen=True)
class Rule:
    """One class with one set of options."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]

    def build(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """A new optimizer; a tensor ``lr`` is its own."""
        return self.cls(params, **copy.deepcopy(dict(self.options)))

    def __str__(self) -> str:
        return ",".join([self.cls.__name__, *(f"{key}={value}" for key, value in self.options.items())])


def _rules(cls: type[torch.optim.Optimizer]) -> list[Rule]:
    accepted = inspect.signature(cls).parameters
    options: list[dict[str, Any]] = [{}]
    options += [{flag: value} for flag, value in _FLAGS.items() if flag in accepted]
    options += _COMBINED.get(cls.__name__, [])
    # 1/8 in float32: exact, so that a float and a tensor lr agree.
    options.append({"lr": torch.tensor(0.125), "foreach": False})
    if "fused" in accepted:
        options.append({"lr": torch.tensor(0.125), "fused": True})
    return [Rule(cls, {"lr": 0.125, **chosen}) for chosen in options]


RULES: list[Rule] = [rule for cls in ELEMENTWISE.values() for rule in _rules(cls)]


class Awkward(nn.Module):
    """Parameters that code for the usual case trips over."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)

        def made(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=source).to(dtype))

        self.matrix = made(5, 3)
        self.columns = nn.Parameter(made(4, 3).detach().t())  # not contiguous
        self.vector = made(7)
        self.scalar = made()
        self.empty = made(0, 3)
        self.narrow = made(6, dtype=torch.bfloat16)
        self.idle = made(4)  # never gets a gradient

    def give_gradients(self, step: int) -> None:
        """The gradients of one step, the same for every model."""
        source = torch.Generator().manual_seed(1000 + step)
        for name, param in self.named_parameters():
            if name != "idle":
                # Laid out like the parameter, as autograd does it: fused kernels of torch walk raw memory.
                param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=source))


class Unwritable(Tensor):
    """A tensor that looks like any other and cannot be copied into."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            raise RuntimeError("nothing can be written here")
        return super().__torch_function__(func, types, args, kwargs or {})


def train(optimizer: torch.optim.Optimizer, model: Awkward, steps: Iterable[int]) -> None:
    """Takes these steps."""
    for step in steps:
        model.give_gradients(step)
        optimizer.step()
        optimizer.zero_grad()


def bits(value: Any) -> Any:
    """The value with every tensor in it as (dtype, shape, raw bytes): NaN payloads and signed zeros count."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(bits, value))
    return type(value).__name__, value


def weights(model: nn.Module) -> dict[str, Any]:
    """The parameters' bits, by name."""
    return {name: bits(param) for name, param in model.named_parameters()}


def state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The state's bits, by the parameters' names; entries in no order."""
    return {name: bits(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' values, without their parameters."""
    return [
        {key: bits(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
