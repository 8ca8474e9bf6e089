"""Dicts, ranks and checkpoints that do not fit, for ``shardopt.save`` and ``shardopt.load``. Run by the rank pool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt import ShardedStateOptimizer
from shardopt.checkpoint.files import Writer
from shardopt.scope import Scope
from tests.ranks.checkpoint_functions import LONG_S, SHORT_S, caught, everything, parts, works
from tests.ranks.refusals import make, train
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import Shape, Topology, build, set_gradients
from tests.support.ranks import reached, wait_until_reached
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot


def differently(what: str, directory: str) -> dict[str, Any]:
    """The last rank does something else than the others; what a save and a load raise here, and what they changed."""
    last = dist.get_rank() == dist.get_world_size() - 1
    good, path = os.path.join(directory, "good"), os.path.join(directory, "other")
    state = parts(7, (5,), 9.0)
    given, options = dict(state), {}
    if last and what == "keys":
        given["more"] = 1
    elif last and what == "classes":
        given["extra"] = torch.zeros(1)
    elif last and what == "path":
        path = os.path.join(directory, "elsewhere")
    elif last and what == "options":
        options = {"strict": False}
    elif last and what == "checkpoint":
        good = os.path.join(directory, "second")
    before = snapshot(state["optim"], state["model"])
    found: dict[str, Any] = {}
    if what not in ("options", "checkpoint"):
        found["save"] = caught(shardopt.save, given, path, timeout_s=LONG_S)
    if what != "path":
        found["load"] = caught(shardopt.load, given, good, timeout_s=LONG_S, **options)
    found["changes"] = before.diff(snapshot(state["optim"], state["model"]))
    found["written"] = os.path.exists(path)
    works(state, os.path.join(directory, "after"))
    return found


def alone(directory: str, met: bool) -> tuple[str, str]:
    """Only rank 0 saves."""
    state = parts(7, (5,), 9.0)
    if met:
        shardopt.save(state, directory, timeout_s=LONG_S)
    if dist.get_rank() == 0:
        kind, text, _ = caught(shardopt.save, state, directory, timeout_s=SHORT_S)
        reached("given up")
        return kind, text
    wait_until_reached("given up")
    return "nothing", ""


def misfits(directory: str, bad: int) -> dict[str, Any]:
    """On one rank the model does not fit, and on it alone the optimizer has options that do not."""
    good = os.path.join(directory, "good")
    state = parts(7, (5,), 9.0)
    if dist.get_rank() == bad:
        state["model"].register_buffer("offset", torch.zeros(9))
        state["optim"].param_groups[1]["weight_decay"] = 0.5
        state["optim"].state[state["model"].up.weight]["surprise"] = torch.zeros(3)
        state["nested"]["plain"] = torch.zeros(3)
    before = snapshot(state["optim"], state["model"])
    error = caught(shardopt.load, state, good, timeout_s=LONG_S)
    return {"error": error, "changes": before.diff(snapshot(state["optim"], state["model"]))}


def load_damaged(directory: str, name: str) -> dict[str, Any]:
    state = parts(7, (5,), 9.0)
    before = snapshot(state["optim"], state["model"])
    own = os.path.join(directory, f"{name}.rank{dist.get_rank()}")
    error = caught(
        shardopt.load, state, own if os.path.exists(own) else os.path.join(directory, name), timeout_s=LONG_S
    )
    changes = before.diff(snapshot(state["optim"], state["model"]))
    works(state, os.path.join(directory, "after"))
    return {"error": error, "changes": changes}


def die_in_finish(path: str, bad: int, point: str) -> tuple[str, str, dict[str, Any]]:
    """A rank is killed when all is written: the first one before or after it has published it, or another one."""
    state = parts(0, (0, 1, 2), 5.0)
    shardopt.load(parts(3, (), 0.0), path, timeout_s=LONG_S)
    genuine = Writer.publish

    def publish(self: Writer, *args: Any) -> None:
        if point == "before":
            reached("ready")
        genuine(self, *args)
        if point == "after":
            reached("ready")

    Writer.publish = publish
    if dist.get_rank() == bad and point == "other":
        vote = Scope.vote

        def stop_first(self: Scope, operation: str, **options: Any) -> int:
            if operation == "save: finish":
                reached("ready")
            return vote(self, operation, **options)

        Scope.vote = stop_first
    return caught(shardopt.save, state, path, timeout_s=SHORT_S)


def on_topology(path: str, topology: Topology, how: str) -> list[str]:
    """Saves and loads into another model; how that differs."""
    shape = Shape(ignored=("scale",))
    model = build(topology, shape)
    optimizer = make(model)
    train(optimizer, model, (0, 1))
    state = {"model": model, "optim": optimizer}
    shardopt.save(state, path) if how != "dcp first" else dcp.save(state, checkpoint_id=path)
    other = build(topology, shape, seed=7)
    fresh = make(other)
    shardopt.load({"model": other, "optim": fresh}, path)
    left = {**gathered(optimizer, model), **gathered_parameters(model)}
    return value_differences(left, {**gathered(fresh, other), **gathered_parameters(other)})


def plain_only(path: str) -> tuple[int, list[float], list[float]]:
    """Nothing is sharded: all ranks of the process group take part, and one rank's values are saved."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 2)
    shardopt.save({"model": model, "number": 3}, path, timeout_s=LONG_S)
    other = nn.Linear(2, 2)
    state = {"model": other, "number": 0}
    shardopt.load(state, path, timeout_s=LONG_S)
    return state["number"], *(one.weight.flatten().tolist() for one in (model, other))


def stages(directory: str) -> list[str]:
    """Ranks 0, 1 and ranks 2, 3 each save and load a model of their own, at the same time."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "fsdp"))
    path = os.path.join(directory, f"stage{rank // 2}")
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = stepped(torch.optim.AdamW(model.parameters()), model, rank // 2 + 1.0)
    shardopt.save({"model": model, "optim": optimizer}, path)
    expected = {key: local(value).clone() for key, value in optimizer.sharded_state().items()}
    for value in optimizer.sharded_state().values():
        local(value).zero_()
    shardopt.load({"model": model, "optim": optimizer}, path)
    return value_differences(expected, {key: local(value) for key, value in optimizer.sharded_state().items()})


def stepped(inner: torch.optim.Optimizer, model: nn.Module, gradient: float) -> ShardedStateOptimizer:
    optimizer = ShardedStateOptimizer(inner, model, vote_timeout=LONG_S)
    for param in model.parameters():
        param.grad = torch.full_like(param, gradient)
    optimizer.step()
    return optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def two_scopes(path: str) -> dict[str, Any]:
    """An optimizer over all four ranks beside one over ranks 0, 1 or 2, 3, whose load then fails on rank 3 alone."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "fsdp"))
    whole, part = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(whole, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(part, mesh=mesh["fsdp"])

    def state(gradient: float) -> dict[str, Any]:
        first = stepped(torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.5), whole, gradient)
        second = stepped(torch.optim.AdamW(part.parameters()), part, gradient + rank // 2)
        return {"whole": whole, "first": first, f"part{rank // 2}": part, f"second{rank // 2}": second}

    def values(given: dict[str, Any]) -> dict[str, Any]:
        shown = [one for key, one in given.items() if key.startswith(("first", "second"))]
        return {
            f"{n}.{key}": local(value).clone()
            for n, one in enumerate(shown)
            for key, value in one.sharded_state().items()
        }

    saved = state(1.0)
    shardopt.save(saved, path, timeout_s=LONG_S)
    other = state(5.0)
    before = values(other)
    if rank == 3:
        # Noticed while it is prepared, on this rank only.
        other["second1"].param_groups[0]["params"].reverse()
    error = caught(shardopt.load, other, path, timeout_s=LONG_S)
    kept = value_differences(before, values(other))
    if rank == 3:
        other["second1"].param_groups[0]["params"].reverse()
    shardopt.load(other, path, timeout_s=LONG_S)
    return {"error": error, "kept": kept, "loaded": value_differences(values(saved), values(other))}


class Hidden:
    """A state of the user's own with a DTensor that cannot be seen from outside."""

    def __init__(self, tensor: DTensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def beyond(path: str) -> str:
    """Ranks 0, 1 and ranks 2, 3 save what is on all of them, which cannot be told from outside."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "fsdp"))
    own = nn.Linear(4, 4)
    fully_shard(own, mesh=mesh["fsdp"])
    hidden = Hidden(DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (4,)), [Shard(0)]))
    return caught(shardopt.save, {"model": own, "hidden": hidden}, f"{path}{dist.get_rank() // 2}", timeout_s=LONG_S)[1]


def count_scopes(path: str) -> int:
    """How many scopes have been made by three saves and a load."""
    state = parts(7, (5,), 9.0)
    made = []
    genuine = Scope.over

    def over(*args: Any, **options: Any) -> Any:
        made.append(options["name"])
        return genuine(*args, **options)

    Scope.over = over
    try:
        for _ in range(3):
            shardopt.save(state, path)
        shardopt.load(state, path)
    finally:
        Scope.over = genuine
    return len(made)


def in_different_orders(path: str) -> list[str]:
    """Two optimizers, which the ranks have in their dicts in different orders."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for model in (first, second):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state: dict[str, Any] = {"a": stepped(torch.optim.AdamW(first.parameters()), first, 1.0)}
    state["b"] = stepped(torch.optim.SGD(second.parameters(), lr=0.5, momentum=0.5), second, 2.0)
    if dist.get_rank() == 1:
        state = dict(reversed(state.items()))
    shardopt.save(state, path, timeout_s=SHORT_S)
    before = {key: local(value).clone() for one in state.values() for key, value in one.sharded_state().items()}
    shardopt.load(state, path, timeout_s=SHORT_S)
    return value_differences(
        before, {key: local(value) for one in state.values() for key, value in one.sharded_state().items()}
    )


def after_a_forward(directory: str) -> list[str]:
    """Ranks 0, 1 and ranks 2, 3 save a model alone, which shows whole parameters after it was evaluated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "fsdp"))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["fsdp"])
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    path = os.path.join(directory, f"stage{dist.get_rank() // 2}")
    shardopt.save({"model": model}, path, timeout_s=SHORT_S)
    before = {name: local(param.detach()).clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model(torch.ones(1, 4))
    shardopt.load({"model": model}, path, timeout_s=SHORT_S)
    return value_differences(before, {name: local(param.detach()) for name, param in model.named_parameters()})


def refuse(*args: Any) -> None:
    raise ArithmeticError("not on this rank")


def verdict_of_the_optimizer(path: str, bad: int, what: str) -> tuple[str, str, list[str]]:
    """The optimizer's ranks fail in its own vote; what a save raises here, its cause, and the files it left."""
    shape = Shape(ignored=("scale",))
    model = build("fsdp", shape)
    optimizer = make(model)
    for step in (0, 1):
        train(optimizer, model, (step,))
    set_gradients(model, 2)
    optimizer.step()
    if dist.get_rank() == bad:
        if what == "hook":
            optimizer.register_state_dict_pre_hook(refuse)
        else:
            optimizer.state[model.scale]["exp_avg"].add_(1.0)
    _, text, said = caught(shardopt.save, {"model": model, "optim": optimizer}, path, timeout_s=LONG_S)
    return text, said["cause"], os.listdir(path) if os.path.exists(path) else []


def other_ways(path: str, how: str) -> list[str]:
    """Optimizers that never vote, that keep each rank's own state, or that torch saved."""
    shape = Shape(ignored=("scale",))

    def make_one(seed: int) -> tuple[Any, Any]:
        model = build("fsdp", shape, seed=seed)
        options = {"consensus": "off"} if how == "off" else {"plain": "per_rank"} if how == "per rank" else {}
        return model, ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model, **options)

    model, optimizer = make_one(0)
    set_gradients(model, 0)
    if how == "torch":
        optimizer = optimizer.optimizers[0]
    elif how == "per rank":
        model.scale.grad.add_(dist.get_rank())
    optimizer.step()
    if how == "torch":
        dcp.save({"model": model, "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    else:
        shardopt.save({"model": model, "optim": optimizer}, path)
    other, fresh = make_one(7)
    shardopt.load({"model": other, "optim": fresh}, path)
    left, right = (
        {f"{name}.{key}": local(one) for name, param in of.named_parameters() for key, one in state[param].items()}
        for of, state in ((model, optimizer.state), (other, fresh.state))
    )
    return value_differences(left, right)


def bytes_mailed(path: str) -> dict[str, int]:
    """How many bytes a rank sends to the first one, and gets from it, for each entry of the checkpoint."""
    sizes: dict[str, int] = {}
    state = parts(0, (0, 1), 4.0)
    genuine = Scope._mail

    def mail(self: Scope, operation: str, posted: Any, *rest: Any, **options: Any) -> Any:
        for payload in posted.values():
            sizes[operation] = max(sizes.get(operation, 0), len(payload))
        return genuine(self, operation, posted, *rest, **options)

    Scope._mail = mail
    try:
        shardopt.save(state, path, timeout_s=LONG_S)
    finally:
        Scope._mail = genuine
    num_entries = len(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    return {operation: size // num_entries for operation, size in sizes.items()}


def while_a_rank_sees_another_directory(path: str) -> list[str]:
    """Rank 1 does not see files that are there, as with a cache of NFS; saves over an old checkpoint and loads."""
    first, second = parts(0, (0,), 3.0), parts(0, (0, 1), 4.0)
    genuine = Path.exists
    if dist.get_rank() == 1:
        Path.exists = lambda self: False
    try:
        shardopt.save(first, path, timeout_s=SHORT_S)
        shardopt.save(second, path, timeout_s=SHORT_S)
        other = parts(7, (), 9.0)
        shardopt.load(other, path, timeout_s=SHORT_S)
    finally:
        Path.exists = genuine
    return value_differences(everything(second), everything(other))
