"""What is known of optimizer classes: which rules are element-wise, and what state they keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ClassSpec",
    "WholeSpec",
    "classes_like",
    "defaults_of",
    "spec_of",
    "whole_spec_of",
    "why_never",
    "why_refused",
]

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSpec:
    """One optimizer class.

    Attributes:
        entries: element-wise entries (shape of the parameter) that a group's options make it keep, in
            the order the class makes them.
        scalars: its other entries, 0-d tensors that are kept in the manifest.
        optional: element-wise entries that the class keeps under some options; state of them may be left from before
            an option was changed.
        initial: makes the state a new optimizer has before its first step, of a group's options and this rank's shard;
            None when that is none.
        scalars_on_parameter_device: whether 0-d entries live beside the parameter always, and not only
            under ``fused`` or ``capturable``.
        derived: entries that the optimizer makes of the parameter where a checkpoint lacks them.
        in_place: whether the tensors it has are all it can have: loads fill them, and what has none is refused.
    """

    entries: Callable[[Group], tuple[str, ...]]
    scalars: tuple[str, ...] = ("step",)
    optional: tuple[str, ...] = ()
    initial: Callable[[Group, Tensor], dict[str, Any]] | None = None
    scalars_on_parameter_device: bool = False
    derived: frozenset[str] = frozenset()
    in_place: bool = False


def _always(*names: str) -> Callable[[Group], tuple[str, ...]]:
    return lambda group: names


def _adam(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _sgd(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def _rmsprop(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    centered = ("grad_avg",) if group["centered"] else ()
    return ("square_avg", *momentum, *centered)


def _initial_adagrad(group: Group, shard: Tensor) -> dict[str, Any]:
    # As Adagrad.__init__ makes it: the counter beside the parameter only for the fused kernel.
    start = group["initial_accumulator_value"]
    filled = complex(start, start) if shard.is_complex() else start
    # A float counter of torch's default floating dtype, float32 for the fused kernel.
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return {
        "step": torch.zeros(
            (), dtype=torch.float64 if wide else torch.float32, device=shard.device if group["fused"] else "cpu"
        ),
        "sum": torch.full_like(shard.detach(), filled, memory_format=torch.preserve_format),
    }


# Exact classes: a subclass may override the rule, so it is not assumed to be element-wise.
_ELEMENTWISE: dict[type[torch.optim.Optimizer], ClassSpec] = {
    torch.optim.Adadelta: ClassSpec(entries=_always("square_avg", "acc_delta")),
    torch.optim.Adagrad: ClassSpec(entries=_always("sum"), initial=_initial_adagrad),
    torch.optim.Adam: ClassSpec(entries=_adam, optional=("max_exp_avg_sq",)),
    torch.optim.AdamW: ClassSpec(entries=_adam, optional=("max_exp_avg_sq",)),
    torch.optim.Adamax: ClassSpec(entries=_always("exp_avg", "exp_inf")),
    torch.optim.ASGD: ClassSpec(entries=_always("ax"), scalars=("step", "eta", "mu"), scalars_on_parameter_device=True),
    torch.optim.NAdam: ClassSpec(entries=_always("exp_avg", "exp_avg_sq"), scalars=("step", "mu_product")),
    torch.optim.RAdam: ClassSpec(entries=_always("exp_avg", "exp_avg_sq")),
    torch.optim.RMSprop: ClassSpec(entries=_rmsprop, optional=("momentum_buffer", "grad_avg")),
    torch.optim.Rprop: ClassSpec(entries=_always("prev", "step_size")),
    torch.optim.SGD: ClassSpec(entries=_sgd, scalars=(), optional=("momentum_buffer",)),
}


def _swap_adamw(master: str | None) -> ClassSpec:
    masters = {"fp32": ("master",), "remainder16": ("master_lo",)}.get(master or "", ())
    return ClassSpec(
        entries=lambda group: (*_adam(group), *masters),
        optional=("max_exp_avg_sq",),
        derived=frozenset(masters),
        in_place=True,
    )


# By module and name, since the class is in a layer above. What it keeps is the same for all of its groups.
_SWAP_ADAMW = "shardopt.swap.swap_adamw.SwapAdamW"
_SWAPPED: dict[str | None, ClassSpec] = {master: _swap_adamw(master) for master in (None, "fp32", "remainder16")}


@dataclass(frozen=True, slots=True)
class WholeSpec:
    """One optimizer class that needs whole parameters.

    Attributes:
        compute: the presentation that shows it what it needs.
        reason: what it needs, after "it".
        entries: element-wise entries that it keeps.
        needs_closure: whether it does not run without a closure.
    """

    compute: str
    reason: str
    entries: frozenset[str] = frozenset()
    needs_closure: bool = False


_WHOLE: dict[type[torch.optim.Optimizer], WholeSpec] = {
    torch.optim.Adafactor: WholeSpec("owner", "factors each matrix", frozenset({"variance"})),
    torch.optim.LBFGS: WholeSpec(
        "replicated", "keeps one direction for all parameters, and calls its closure often", needs_closure=True
    ),
    torch.optim.Muon: WholeSpec("owner", "orthogonalises each matrix", frozenset({"momentum_buffer"})),
}

_CREATE_GRAPH = (
    "it differentiates the gradients once more, and under FSDP2 gradients arrive reduced, without a graph behind them."
)
_FUSED_BACKWARD = (
    "it updates parameters while the backward pass runs, from hooks of its own and before FSDP2 has reduced gradients; "
    "there is no step to wrap."
)
_COMMUNICATES = (
    "it communicates by itself, over ranks and at times that nothing here knows, and would wait for ranks that do not "
    "come."
)
# By name, since their libraries need not be there.
_NEVER: dict[str, str] = {
    "AdaHessian": _CREATE_GRAPH,
    "SophiaH": _CREATE_GRAPH,
    "LOMO": _FUSED_BACKWARD,
    "AdaLOMO": _FUSED_BACKWARD,
    "DeMo": _COMMUNICATES,
    "DistributedMuon": _COMMUNICATES,
    "SaRA": "it keeps its masks in a table of its own under the very parameters, and would not find those it is shown.",
    "SparseAdam": "it updates rows by sparse gradients, and under FSDP2 gradients are dense; use Adam.",
}


def spec_of(optimizer: torch.optim.Optimizer) -> ClassSpec | None:
    """What is known of the optimizer's class, or None when it is not known to be element-wise."""
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__qualname__}" == _SWAP_ADAMW:
        return _SWAPPED[getattr(optimizer, "master", None)]
    return _ELEMENTWISE.get(kind)


def whole_spec_of(optimizer: torch.optim.Optimizer) -> WholeSpec | None:
    """What is known of a class that needs whole parameters, or None when it is not known to."""
    return _WHOLE.get(type(optimizer))


def why_never(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the class cannot be wrapped, whatever presentation is asked for; None when it can."""
    return next((_NEVER[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _NEVER), None)


@cache
def defaults_of(known: type[torch.optim.Optimizer]) -> Mapping[str, Any]:
    """What groups of a known class have when nothing is given."""
    make: Callable[..., torch.optim.Optimizer] = known
    return make([torch.zeros(1)]).defaults


def classes_like(values: Group, entries: Set[str]) -> list[type[torch.optim.Optimizer]]:
    """The known classes that may have written a group of these values and, if there is any, this state of a parameter.

    A class must have all its options among the values, as each version of torch writes them, and its entries in the
    state; users add keys of their own.
    """
    found: list[type[torch.optim.Optimizer]] = []
    for known, spec in _ELEMENTWISE.items():
        defaults = defaults_of(known)
        if defaults.keys() <= values.keys() and (not entries or entries >= set(spec.entries(values))):
            found.append(known)
    return found


def why_refused(optimizer: torch.optim.Optimizer, values: Group) -> str | None:
    """What the constructor of a known class has against a group of such values, in its own words; None for nothing.

    Makes an optimizer of one element on the CPU. Which kernel runs is not asked: that depends on the parameters.
    """
    if spec_of(optimizer) is None:
        return None
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    known = inspect.signature(make).parameters.keys() - {"params", "fused"}
    taken = {key: value for key, value in values.items() if key in known}
    try:
        make([torch.zeros(1)], **taken)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return None
