"""An optimizer of the same class and options over other, tiny parameters: what a probe can try things on."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardopt.errors import PresentationError

__all__ = ["make_replica"]

_MOST_COPIED_BYTES = 1 << 20
_NOT_COPIED = frozenset({"state", "param_groups", "defaults"})
# The choice of a kernel; fused ones round differently where a tensor ends than in its middle.
_KERNELS = {"fused": False, "capturable": False, "differentiable": False}


def make_replica(
    inner: torch.optim.Optimizer, params: Sequence[Sequence[Tensor]], *, construct: bool = False
) -> torch.optim.Optimizer:
    """A new optimizer without state, with these parameters in the groups of the given one.

    Its attributes are copied, since constructors take arguments that no attribute remembers; where that fails it is
    constructed from its defaults; with ``construct`` it is that at once, for rules that make state when they are made.
    Nothing of the given optimizer is changed or shared.

    Raises:
        PresentationError: neither way makes one.
    """
    problems: list[str] = []
    for make in (_constructed,) if construct else (_copied, _constructed):
        try:
            return make(inner, params)
        except Exception as error:
            problems.append(f"{make.__name__.strip('_')}: {type(error).__name__}: {error}")
    raise PresentationError(f"{type(inner).__name__} can be neither copied nor constructed ({'; '.join(problems)})")


def _groups(inner: torch.optim.Optimizer, params: Sequence[Sequence[Tensor]]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for group, members in zip(inner.param_groups, params, strict=True):
        copied = {key: _own(value) for key, value in group.items() if key not in ("params", "param_names")}
        copied |= {key: value for key, value in _KERNELS.items() if key in copied}
        if "lr" in copied and not float(copied["lr"]):
            # A warm-up begins with 0, where every rule looks element-wise.
            lr = inner.defaults.get("lr")
            copied["lr"] = float(lr) if isinstance(lr, (int, float)) and lr else 1e-2
        groups.append({"params": list(members), **copied})
    return groups


def _own(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _copied(inner: torch.optim.Optimizer, params: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    made = object.__new__(type(inner))
    for name, value in vars(inner).items():
        # What is bound to the optimizer, as a scheduler's step is, belongs to it alone.
        if name in _NOT_COPIED or "hooks" in name or getattr(value, "__self__", None) is inner or name == "step":
            continue
        _refuse_large(name, value)
        made.__dict__[name] = copy.deepcopy(value)
    for name in vars(inner):
        if "hooks" in name:
            made.__dict__[name] = OrderedDict()
    made.__dict__["defaults"] = {key: _own(value) for key, value in inner.defaults.items()}
    # Some rules keep counters there that their constructors make.
    made.state = defaultdict(
        dict, {key: _own(value) for key, value in inner.state.items() if not isinstance(key, Tensor)}
    )
    made.param_groups = _groups(inner, params)
    return made


def _refuse_large(name: str, value: Any) -> None:
    for tensor in tree_leaves(value):
        if isinstance(tensor, torch.optim.Optimizer) or (
            isinstance(tensor, Tensor) and tensor.numel() * tensor.element_size() > _MOST_COPIED_BYTES
        ):
            raise PresentationError(f"its attribute {name!r} holds a {type(tensor).__name__} that is not copied")


def _constructed(inner: torch.optim.Optimizer, params: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    make: Any = type(inner)
    return make(_groups(inner, params), **{key: _own(value) for key, value in inner.defaults.items()})
