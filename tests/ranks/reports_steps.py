"""Steps of torch's rules in the wrapper: what they leave, what reaches torch, zero gradients. Run by the pool."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardopt import ShardedStateOptimizer
from tests.support.live_tensors import live_memory
from tests.support.models import Shape, SmallModel, build, local_part, local_tensor, set_gradients
from tests.support.raw_values import value_differences

VOTE_TIMEOUT_S = 60.0
NUM_STEPS = 50


class _Watch(TorchDispatchMode):
    """Notes what is dispatched.

    Attributes:
        calls: of each operation that updates parameters.
        num_sharded: operations that were given a DTensor.
        largest: elements of the largest tensor that was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_sharded = 0
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self.num_sharded += any(isinstance(one, DTensor) for one in given)
        if "adamw" in str(func) or "foreach" in str(func):
            self.calls[str(func)] += 1
        result = func(*args, **dict(kwargs or {}))
        theirs = {id(one) for one in given}
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor) and id(one) not in theirs]
        self.largest = max([self.largest, *(one.numel() for one in made)])
        return result


def _wrapped(model: SmallModel, rule: Mapping[str, Any]) -> ShardedStateOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, **rule)
    return ShardedStateOptimizer(inner, model, vote_timeout=VOTE_TIMEOUT_S)


def what_steps_leave(rule: Mapping[str, Any], rows: tuple[int, ...]) -> dict[str, Any]:
    """Steps with a parameter that is plain among those that are sharded: what they dispatch, and leave behind."""
    model = build("fsdp", Shape(rows=rows, ignored=("scale",)))
    optimizer = _wrapped(model, rule)
    set_gradients(model, 0)
    for _ in range(3):
        optimizer.step()
    with _Watch() as watch:
        optimizer.step()
    memory, num_objects = live_memory(), len(gc.get_objects())
    for _ in range(NUM_STEPS):
        optimizer.step()
    after = live_memory()
    return {
        "memory": {place: size for place, size in after.items() if place not in memory},
        "tensors": len(after) - len(memory),
        "objects": len(gc.get_objects()) - num_objects,
        "calls": dict(watch.calls),
        "sharded": watch.num_sharded,
        "largest": watch.largest,
        "parameters": len(list(model.parameters())),
    }


RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Muon": (torch.optim.Muon, {"lr": 0.1}),
}
# Zero gradients at the first step, after others, and after a load; None is no zero.
PLAN = ("zero", "drawn", "zero", "load", "zero", "drawn", "zero")


def zero_gradients(name: str, path: str) -> list[str]:
    """How a sharded run differs from one that is not, bit by bit, and what of it is not finite."""
    models = {"plain": build("plain"), "fsdp": build("fsdp")}
    found: dict[str, dict[str, Tensor]] = {}
    for topology, model in models.items():
        for part in (model.up, model.down):
            local_tensor(part.weight).zero_()
        run = _run(name, model, topology != "plain", path)
        found[topology] = (
            {key: local_part(models["fsdp"], key, value) for key, value in run.items()}
            if (topology == "plain")
            else run
        )
    odd = [key for key, value in found["fsdp"].items() if not value.isfinite().all()]
    return [*odd, *value_differences(found["plain"], found["fsdp"])]


def _run(name: str, model: SmallModel, is_sharded: bool, path: str) -> dict[str, Tensor]:
    make, options = RULES[name]

    def optimizer_of() -> torch.optim.Optimizer:
        inner = make([one for one in model.parameters() if name != "Muon" or one.dim() == 2], **options)
        return ShardedStateOptimizer(inner, model, vote_timeout=VOTE_TIMEOUT_S) if is_sharded else inner

    optimizer = optimizer_of()
    for number, what in enumerate(PLAN):
        if what == "load":
            saved, optimizer = optimizer, optimizer_of()
            if is_sharded:
                dcp.save({"optim": saved}, checkpoint_id=os.path.join(path, str(number)))
                dcp.load({"optim": optimizer}, checkpoint_id=os.path.join(path, str(number)))
            else:
                optimizer.load_state_dict(saved.state_dict())
            continue
        set_gradients(model, number)
        if what == "zero":
            for param in model.parameters():
                param.grad = torch.zeros_like(param, requires_grad=False)
        optimizer.step()
    return {key: local_tensor(param).clone() for key, param in model.named_parameters()}
