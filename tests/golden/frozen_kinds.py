"""The second frozen checkpoint of format 1: parameters, four optimizers, and all that they hold. Never change it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardopt import ShardedStateOptimizer, Subject
from tests.golden.kinds import Coded, CodedCodec, Factors, Own, meant, numbers, plain_values
from tests.support.raw_values import Fact, facts

FOLDER = Path(__file__).resolve().parent / "format1_kinds"
SEED = 20260
# Of each optimizer's parameters the shapes, and the largest number in a gradient.
SHAPES: dict[str, dict[str, tuple[tuple[int, ...], int]]] = {
    "whole": {"matrix": ((5, 3), 9), "other": ((3, 7), 9), "vector": ((7,), 9), "idle": ((2, 2), 9), "sgd": ((3,), 9)},
    "drawn": {"matrix": ((3, 2), 9)},
    # In the order of the groups below. On 2 ranks: blocks that no shard cuts; blocks that one does; a shard too small.
    "coded": {
        "rows": ((8, 16), 127),
        "cells": ((4, 6), 127),
        "cut": ((6, 10), 127),
        "small": ((3, 20), 127),
        "dense": ((5,), 127),
        "idle": ((4, 4), 127),
        "bf16": ((7, 9), 127),
        "apart": ((5, 6), 7),
        "pairs": ((4, 16), 7),
        "cut_pairs": ((5, 6), 7),
        "means": ((4, 4), 9),
    },
    "own": {"sketched": ((5, 3), 9), "plain": ((2, 2), 9)},
}
# kind, block, smallest
CODED: dict[str, tuple[str, int, int]] = {
    "rows": ("numbers", 8, 0),
    "cells": ("numbers", 4, 0),
    "cut": ("numbers", 4, 0),
    "small": ("numbers", 8, 30),
    "dense": ("numbers", 8, 30),
    "idle": ("numbers", 8, 0),
    "bf16": ("bf16", 8, 0),
    "apart": ("apart", 4, 0),
    "pairs": ("pairs", 8, 0),
    "cut_pairs": ("pairs", 4, 0),
    "means": ("means", 4, 0),
}


class Kinds(nn.Module):
    """Parameters by name; one of them has two."""

    def __init__(self, key: str, mesh: DeviceMesh | None) -> None:
        super().__init__()
        for name, (shape, largest) in SHAPES[key].items():
            whole = numbers(shape, largest, first=1)
            sharded = mesh is not None and (key, name) != ("own", "plain")
            self.register_parameter(
                name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]) if sharded else whole)
            )
        if key == "whole":
            self.tied = self.matrix


def _mesh() -> DeviceMesh | None:
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def make(key: str, *, filled: bool) -> tuple[ShardedStateOptimizer, Kinds]:
    """The optimizer under this key; ``filled`` is as it was saved, else a fresh one with other options."""
    model = Kinds(key, _mesh())
    params: dict[str, Any] = dict(model.named_parameters())
    inner: Any
    more: dict[str, Any] = {}
    if key == "whole":
        groups = [
            {"params": [model.matrix], "lr": 0.0625 if filled else 0.5, "plain": plain_values() if filled else None},
            {"params": [model.other, model.vector, model.idle]},
        ]
        sgd = torch.optim.SGD([model.sgd], lr=torch.tensor(0.25 if filled else 0.5), momentum=0.5, foreach=False)
        inner = [Factors(groups), sgd]
        more = {"compute": "owner"}
    elif key == "drawn":
        torch.manual_seed(SEED if filled else SEED + 1)
        inner, more = torch.optim.SGD(params.values(), lr=0.5, momentum=0.5, foreach=False), {"compute": "replicated"}
    elif key == "coded":
        inner = Coded(
            {"params": [params[name]], "kind": kind, "block": block, "smallest": smallest}
            for name, (kind, block, smallest) in CODED.items()
        )
        more = {"compute": "local"}
    else:
        inner = Own(params.values(), dist.get_rank() if dist.is_initialized() else 0)
        more = {"compute": "local", "layouts": {"sketch": "rank_local"}, "plain": "per_rank"}
    optimizer = ShardedStateOptimizer(inner, model, vote_timeout=60.0, **more)
    if filled:
        _fill(optimizer, model, key)
    return optimizer, model


def _fill(optimizer: ShardedStateOptimizer, model: Kinds, key: str) -> None:
    for name, param in model.named_parameters():
        if name != "idle":
            shape, largest = SHAPES[key][name]
            # Of ``means`` the elements of a row are the same.
            whole = numbers(shape, largest) if name != "means" else numbers((4, 1), largest).expand(4, 4).contiguous()
            sharded = isinstance(param, DTensor)
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements) if sharded else whole
    optimizer.step()


def told(optimizer: ShardedStateOptimizer, model: Kinds, key: str) -> str:
    """All that ranks hold, as JSON: what is each rank's own by rank, quantised state as the values that it means."""
    names = {param: name for name, param in model.named_parameters()}
    mine: dict[str, Any] = {}
    for inner in optimizer.optimizers:
        for param, state in inner.state.items():
            named = param if isinstance(param, str) else names[param]
            mine.update(_told_state(inner, param, named, state))
        for group in inner.param_groups:
            for param in group["params"]:
                mine.update(_spelled(f"group.{names[param]}", {k: v for k, v in group.items() if k != "params"}))
        for name in ("seen", "moving", "fixed"):
            mine.update(_spelled(f"self.{name}", getattr(inner, name, None)))
    return json.dumps(_joined(mine, own=key == "own"), indent=0, sort_keys=True) + "\n"


def _told_state(inner: Any, param: Any, name: str, state: Any) -> dict[str, Any]:
    if not isinstance(inner, Coded):
        return _spelled(f"state.{name}", state)
    group = next(group for group in inner.param_groups if any(one is param for one in group["params"]))
    value = CodedCodec().read(Subject(inner, group, param.to_local() if dist.is_initialized() else param), state, "")
    assert value is not None
    return {f"state.{name}": {"values": meant(value).tolist()}, **_spelled(f"state.{name}.step", state["step"])}


def _joined(mine: dict[str, Any], *, own: bool) -> dict[str, Any]:
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    if own:
        return {str(rank): one for rank, one in enumerate(everyone)}
    result: dict[str, Any] = {}
    for one in everyone:
        for path, said in one.items():
            if isinstance(said, dict) and path in result:
                # Shards along the first dim, in order of ranks.
                result[path] = {"values": result[path]["values"] + said["values"]}
            elif result.setdefault(path, said) != said:
                raise ValueError(f"{path}: ranks differ: {result[path]} and {said}")
    return result


def _spelled(path: str, value: Any) -> dict[str, Any]:
    return {where: _fact(fact) for where, fact in facts(path, value)}


def _fact(fact: Fact) -> list[str]:
    details = {
        name: sorted(map(str, value)) if isinstance(value, frozenset) else str(value)
        for name, value in fact.details.items()
    }
    content = fact.content
    digest = f"SHA-256 {hashlib.sha256(content).hexdigest()}"
    return [fact.type_name, json.dumps(details, sort_keys=True), content.hex() if len(content) < 1000 else digest]
