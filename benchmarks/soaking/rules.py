"""The optimizers that the soak draws, each with the presentations that give what an unsharded run gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardopt import SwapAdamW

__all__ = ["RULES", "Drawn"]

_BF16 = torch.bfloat16
_LR = 0.125


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One way to make optimizers.

    Attributes:
        make: from a model's parameters to the optimizers over them, which have disjoint parameters.
        computes: presentations the soak may ask for.
        dtypes: of the parameters.
        rounds: whether a shard that is not a multiple of 64 elements may round otherwise when it is updated by itself.
        aligned: whether, where shards are updated by themselves, every one must be whole blocks of a quantised state.
        late: whether a parameter may get its first gradient later than others.
        hides_state: whether what the state holds depends on how it is cut, so that it is only
            compared from a save to a load that cuts it alike.
    """

    make: Callable[[Sequence[Tensor]], list[torch.optim.Optimizer]]
    computes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    rounds: bool = False
    aligned: bool = False
    late: bool = True
    hides_state: bool = False


def _grouped(params: Sequence[Tensor], **second: Any) -> list[dict[str, Any]]:
    return [{"params": [*params[::2]]}, {"params": [*params[1::2]], **second}]


@dataclass(frozen=True)
class _Torch:
    """A class of ``torch.optim`` with options and two groups."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, params: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
        options = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in {"lr": _LR, **self.options}.items()
        }
        return [getattr(torch.optim, self.name)(_grouped(params, **self.second), **options)]


@dataclass(frozen=True)
class _Public:
    """A class of ``pytorch_optimizer``."""

    name: str
    options: Mapping[str, Any]

    def __call__(self, params: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
        import pytorch_optimizer

        return [pytorch_optimizer.load_optimizer(self.name)([*params], **self.options)]


@dataclass(frozen=True)
class _Swap:
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, params: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
        return [SwapAdamW(_grouped(params, lr=0.0625), lr=_LR, **self.options)]


@dataclass(frozen=True)
class _Quantised:
    kind: str

    def __call__(self, params: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
        from tests.ranks.quantised_runs import make

        return [make(self.kind, [*params])]


def _muon(params: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for what is left."""
    matrices = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=_LR)] if matrices else []
    return [*made, *([torch.optim.AdamW(others, lr=_LR)] if others else [])]


def _seeded(make: Callable[[Sequence[Tensor]], list[torch.optim.Optimizer]]) -> Callable[..., Any]:
    def made(params: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
        with warnings.catch_warnings():
            # What a library has to say about its own future is no matter of the soak.
            warnings.simplefilter("ignore")
            return make(params)

    return made


_ANY = ("auto", "local", "owner", "replicated")
_BY_SHARD = (*_ANY, "dtensor")
_WHOLE = ("auto", "owner", "replicated")
_BOTH = (torch.float32, _BF16)

RULES: Mapping[str, Drawn] = {
    name: Drawn(make=_seeded(make), **kept)
    for name, make, kept in [
        ("AdamW", _Torch("AdamW", {}, {"weight_decay": 0.5}), {"computes": _BY_SHARD}),
        ("AdamW bf16", _Torch("AdamW"), {"computes": _ANY, "dtypes": (_BF16,), "rounds": True}),
        ("AdamW fused", _Torch("AdamW", {"fused": True}, {"lr": 0.25}), {"computes": _ANY, "rounds": True}),
        (
            "AdamW fused tensor lr",
            _Torch("AdamW", {"fused": True, "lr": torch.tensor(_LR), "amsgrad": True}),
            {"computes": _ANY, "rounds": True},
        ),
        (
            "AdamW foreach amsgrad",
            _Torch("AdamW", {"foreach": True, "amsgrad": True, "maximize": True}, {"betas": (0.8, 0.9)}),
            {"computes": _ANY},
        ),
        ("Adam", _Torch("Adam", {"weight_decay": 0.1, "foreach": True}), {"computes": _ANY}),
        ("SGD", _Torch("SGD", {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}), {"computes": _BY_SHARD}),
        # Torch's own fused SGD raises when some momenta are there and others are not.
        (
            "SGD fused",
            _Torch("SGD", {"momentum": 0.9, "fused": True}),
            {"computes": _ANY, "rounds": True, "late": False},
        ),
        ("SGD plain", _Torch("SGD"), {"computes": _BY_SHARD}),
        ("Adagrad", _Torch("Adagrad", {"initial_accumulator_value": 0.5}), {"computes": _ANY}),
        ("RMSprop", _Torch("RMSprop", {"momentum": 0.9, "centered": True}), {"computes": _ANY}),
        ("NAdam", _Torch("NAdam", {"decoupled_weight_decay": True}), {"computes": _ANY}),
        ("RAdam", _Torch("RAdam", {"foreach": True}), {"computes": _ANY}),
        ("ASGD", _Torch("ASGD"), {"computes": _ANY}),
        ("Rprop", _Torch("Rprop"), {"computes": _ANY}),
        ("Adafactor", _Torch("Adafactor"), {"computes": _WHOLE, "dtypes": _BOTH}),
        ("Muon + AdamW", _muon, {"computes": ("auto", "owner", "replicated")}),
        ("SwapAdamW", _Swap(), {"computes": ("auto",)}),
        ("SwapAdamW bf16 moments", _Swap({"moment_dtype": _BF16, "seed": 7, "amsgrad": True}), {"computes": ("auto",)}),
        (
            "SwapAdamW fp32 masters",
            _Swap({"master": "fp32", "moment_dtype": _BF16}),
            {"computes": ("auto",), "dtypes": (_BF16,)},
        ),
        ("SwapAdamW remainders", _Swap({"master": "remainder16"}), {"computes": ("auto",), "dtypes": (_BF16,)}),
        ("bnb AdamW8bit", _Quantised("bnb-AdamW8bit"), {"computes": ("owner", "auto"), "hides_state": True}),
        (
            "bnb AdamW8bit by shard",
            _Quantised("bnb-AdamW8bit"),
            {"computes": ("local",), "aligned": True, "hides_state": True},
        ),
        ("torchao AdamW8bit", _Quantised("ao-AdamW8bit"), {"computes": ("owner",), "hides_state": True}),
        ("Prodigy", _Public("prodigy", {"lr": 1.0}), {"computes": ("auto", "replicated")}),
        ("LAMB", _Public("lamb", {"lr": 0.1}), {"computes": _WHOLE}),
        ("SOAP", _Public("soap", {"lr": 0.1}), {"computes": ("auto", "owner")}),
        ("Lion", _Public("lion", {"lr": 0.01}), {"computes": _ANY}),
    ]
}
