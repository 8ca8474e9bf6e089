"""Models as plain data, random edits of them, and what a load must make of the edited one, said by names alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.raw_values import raw_bytes

LR = {"a": 0.5, "b": 0.25}
WRAPPERS = ("", "checkpoint", "compile")


@dataclass(frozen=True)
class Layer:
    """A module with one weight.

    Attributes:
        name: of the module.
        rows: of its weight, which has 2 columns.
        group: the optimizer's group that it is in; None when it is frozen.
        tied_to: the name of an earlier layer whose weight it has.
        wrapper: what wraps the module: ``""``, ``"checkpoint"`` or ``"compile"``.
    """

    name: str
    rows: int
    group: str | None = "a"
    tied_to: str | None = None
    wrapper: str = ""


Model = tuple[Layer, ...]


class Holder(nn.Module):
    """One weight; never run, for gradients are set."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Root(nn.Module):
    """Layers by name; no ModuleDict, which ``fully_shard`` does not take."""

    def __setitem__(self, name: str, module: nn.Module) -> None:
        self.add_module(name, module)

    def __getitem__(self, name: str) -> Any:
        return self.get_submodule(name)

    def forward(self) -> None:
        raise AssertionError("never run")


def build(model: Model) -> Root:
    """Collective. The model under ``fully_shard``."""
    modules = Root()
    weights: dict[str, nn.Parameter] = {}
    for layer in model:
        weight = weights.get(layer.tied_to or "")
        weights[layer.name] = nn.Parameter(torch.zeros(layer.rows, 2)) if weight is None else weight
        holder: Any = Holder(weights[layer.name])
        if layer.wrapper:
            holder = checkpoint_wrapper(holder) if layer.wrapper == "checkpoint" else torch.compile(holder)
        modules[layer.name] = holder
    fully_shard(modules, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return modules


def optimize(model: Model, modules: Root) -> ShardedStateOptimizer:
    """Collective. The wrapped optimizer, with the groups that the model names."""
    groups: dict[str, list[Any]] = {}
    for layer in model:
        if layer.tied_to is None and layer.group is not None:
            groups.setdefault(layer.group, []).append(weight_of(modules, layer.name))
    return ShardedStateOptimizer(
        torch.optim.AdamW([{"params": params, "lr": LR[label]} for label, params in groups.items()]), modules
    )


def weight_of(modules: Root, name: str) -> DTensor:
    """The weight of one layer, whatever wraps it."""
    module = modules[name]
    inner = getattr(module, "_orig_mod", getattr(module, "_checkpoint_wrapped_module", module))
    return inner.weight


def step(model: Model, modules: Root, optimizer: ShardedStateOptimizer, number: int) -> None:
    """Collective. One step; the gradients depend on the layer's place and the step."""
    for index, layer in enumerate(model):
        if layer.tied_to is None and layer.group is not None:
            weight = weight_of(modules, layer.name)
            whole = torch.arange(2.0 * layer.rows).reshape(layer.rows, 2) * (index + 1) + number + 1
            weight.grad = distribute_tensor(whole, weight.device_mesh, weight.placements)
    optimizer.step()


def whole_state(optimizer: ShardedStateOptimizer) -> dict[str, bytes]:
    """Collective. The gathered element-wise state, by key."""
    return {
        key: raw_bytes(value.full_tensor() if isinstance(value, DTensor) else value)
        for key, value in sorted(optimizer.sharded_state().items())
    }


def save_job(models: Sequence[Model], root: str) -> list[dict[str, bytes]]:
    """Collective. Trains and saves every model; the states."""
    states = []
    for index, model in enumerate(models):
        modules = build(model)
        optimizer = optimize(model, modules)
        for number in range(2):
            step(model, modules, optimizer, number)
        dcp.save({"optim": optimizer}, checkpoint_id=f"{root}/{index}")
        states.append(whole_state(optimizer))
    return states


@dataclass(frozen=True)
class Loaded:
    """What came of one load.

    Attributes:
        refusals: the error of each attempt that was refused.
        before: gathered state before the load.
        after: gathered state after it.
        report: the report's lists of names.
        lr: by parameter.
    """

    refusals: tuple[str, ...]
    before: dict[str, bytes]
    after: dict[str, bytes]
    report: dict[str, list[str]]
    lr: dict[str, float]


def load_job(models: Sequence[Model], options: Sequence[Sequence[dict[str, Any]]], root: str) -> list[Loaded]:
    """Collective. Loads every checkpoint into the model at its index, with one set of options after another."""
    return [
        _load(model, attempts, f"{root}/{index}", steps=index % 2)
        for index, (model, attempts) in enumerate(zip(models, options, strict=True))
    ]


def _load(model: Model, attempts: Sequence[dict[str, Any]], path: str, *, steps: int) -> Loaded:
    modules = build(model)
    optimizer = optimize(model, modules)
    for number in range(steps):
        step(model, modules, optimizer, number + 10)
    before = whole_state(optimizer)
    refusals: list[str] = []
    report: dict[str, list[str]] = {}
    for chosen in attempts:
        try:
            prepared = optimizer.prepare_load(path, **chosen)
        except LoadError as error:
            refusals.append(str(error))
            if whole_state(optimizer) != before:
                raise AssertionError("a refused load has changed state") from error
            continue
        prepared.commit()
        report = {name: sorted(getattr(prepared.report, name)) for name in ("missing", "unused", "fresh")}
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    lr = {
        f"{layer.name}.weight": group_of[id(weight_of(modules, layer.name))]["lr"]
        for layer in model
        if layer.tied_to is None and layer.group is not None
    }
    return Loaded(tuple(refusals), before, whole_state(optimizer), report, lr)


def edit(model: Model, kind: str, at: int, number: int) -> Model:
    """The model after one edit of the layer at ``at``; an edit that makes no sense there changes nothing."""
    at %= len(model)
    if kind == "add":
        return (*model, Layer(f"n{len(model)}x{number}", 1 + number % 4))
    if kind == "swap":
        return model if any(layer.tied_to for layer in model) else (*model[at:], *model[:at])
    changed = EDITS[kind](model, at, number)
    return (*model[:at], changed, *model[at + 1 :])


def _lone(model: Model, at: int) -> bool:
    return model[at].tied_to is None and all(other.tied_to != model[at].name for other in model)


def _freeze(model: Model, at: int, number: int) -> Layer:
    layer = model[at]
    return replace(layer, group="a" if layer.group is None else None) if _lone(model, at) and at else layer


def _regroup(model: Model, at: int, number: int) -> Layer:
    return replace(model[at], group={"a": "b", "b": "a", None: None}[model[at].group])


def _wrap(model: Model, at: int, number: int) -> Layer:
    return replace(model[at], wrapper=WRAPPERS[number % 3])


def _rename(model: Model, at: int, number: int) -> Layer:
    return replace(model[at], name=f"{model[at].name}r{number}") if _lone(model, at) else model[at]


def _resize(model: Model, at: int, number: int) -> Layer:
    return replace(model[at], rows=model[at].rows + 1 + number % 2) if _lone(model, at) else model[at]


def _tie(model: Model, at: int, number: int) -> Layer:
    owner = model[number % at] if at else model[0]
    fits = owner.tied_to is None and owner.rows == model[at].rows and owner.group is not None
    return replace(model[at], tied_to=owner.name, group=owner.group) if at and fits and _lone(model, at) else model[at]


def _untie(model: Model, at: int, number: int) -> Layer:
    return replace(model[at], tied_to=None)


EDITS = {
    "freeze": _freeze,
    "regroup": _regroup,
    "rename": _rename,
    "resize": _resize,
    "tie": _tie,
    "untie": _untie,
    "wrap": _wrap,
}


def names(model: Model) -> dict[str, tuple[list[str], Layer]]:
    """Trained parameters by name: all their names, and the layer that owns the weight."""
    found: dict[str, tuple[list[str], Layer]] = {}
    for layer in model:
        if layer.group is None and layer.tied_to is None:
            continue
        if layer.tied_to is None:
            found[f"{layer.name}.weight"] = ([f"{layer.name}.weight"], layer)
        elif f"{layer.tied_to}.weight" in found:
            found[f"{layer.tied_to}.weight"][0].append(f"{layer.name}.weight")
    return found


@dataclass(frozen=True)
class Expected:
    """What must come of loading one model's checkpoint into another.

    Attributes:
        source: live name -> saved name of the parameters whose state comes from the checkpoint.
        missing: live names that the checkpoint has not.
        unused: saved names that the live model has not.
        resized: live names whose shape is another one.
        conflict: whether a live group has members that were saved with different lr.
        lr: of every live parameter whose group is in the checkpoint, when there is no conflict.
    """

    source: dict[str, str]
    missing: list[str]
    unused: list[str]
    resized: list[str]
    conflict: bool
    lr: dict[str, float]


def expect(saved: Model, live: Model) -> Expected:
    """Works it out from the names."""
    old, new = names(saved), names(live)
    canonical = {alias: fqn for fqn, (aliases, _) in old.items() for alias in aliases}
    source = {}
    for fqn, (aliases, _) in new.items():
        hits = [canonical.get(alias, alias) for alias in aliases if alias in old or alias in canonical]
        if hits:
            source[fqn] = hits[0]
    live_names = {alias for aliases, _ in new.values() for alias in aliases}
    resized = sorted(fqn for fqn, was in source.items() if old[was][1].rows != new[fqn][1].rows)
    saved_lr: dict[str, set[float]] = {}
    for fqn, was in source.items():
        saved_lr.setdefault(str(new[fqn][1].group), set()).add(LR[str(old[was][1].group)])
    lr = {fqn: min(saved_lr.get(str(layer.group), {LR[str(layer.group)]})) for fqn, (_, layer) in new.items()}
    return Expected(
        source={fqn: was for fqn, was in source.items() if fqn not in resized},
        missing=sorted(set(new) - set(source)),
        unused=sorted(fqn for fqn in old if fqn not in source.values() and fqn not in live_names),
        resized=resized,
        conflict=any(len(values) > 1 for values in saved_lr.values()),
        lr=lr,
    )
