"""Runs of Gefen on one layout, with small parameters: for large ones its first step takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import ShardedStateOptimizer
from shardopt.geometry import Box
from shardopt.staging import quantised as staging
from tests.ranks.quantised_runs import Array, Run, Seen, drawn, make

SAVED_AFTER, STEPS = 3, 8

SHAPES: dict[str, tuple[int, ...]] = {
    "aligned": (16, 24),  # whole rows on any number of ranks up to 4, whole blocks of 8 along either dim on 2
    "odd": (10, 14),  # 4 ranks have 3, 3, 3 and 1 rows
    "vector": (101,),
    "lone": (1, 40),  # the first rank has all of it
    "few": (3, 5),  # the last of 4 ranks has nothing
}


class Small(nn.Module):
    """Never run: gradients are set."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(drawn(name, shape, 0)))


@dataclass(repr=False)
class Learnt:
    """One rank's part of a run.

    Attributes:
        seen: weights and state.
        table: what codes mean, as bytes; empty before that is learnt.
        counters: of the optimizer and its parameters.
        exact: by key, the values that a load has quantised anew, as they were before.
        named: parameters that the report of a load named.
        said: that report.
    """

    seen: Seen
    table: bytes
    counters: dict[str, Any]
    exact: dict[str, tuple[Box, Array]] = field(default_factory=dict)
    named: list[str] = field(default_factory=list)
    said: str = ""


class GefenRun(Run):
    """One model on one layout, or unsharded."""

    net = Small

    @property
    def gefen(self) -> Any:
        return self.optimizer.optimizers[0] if isinstance(self.optimizer, ShardedStateOptimizer) else self.optimizer

    def learnt(self) -> Learnt:
        table = self.gefen._gefen_codebook
        counters = {"global": self.gefen._gefen_global_step}
        for name, param in self.params.items():
            state = self.gefen.state.get(param, {})
            counters |= {f"{name}/{key}": value for key, value in state.items() if type(value) is int}
        return Learnt(self.seen(), b"" if table is None else table.numpy().tobytes(), counters)


@contextmanager
def recorded() -> Iterator[dict[str, tuple[Box, Array]]]:
    """Notes what is quantised anew by loads."""
    found: dict[str, tuple[Box, Array]] = {}
    kept = staging._Planning._kept

    def noted(self: Any, label: str, name: str, values: Tensor, *rest: Any) -> Any:
        found[f"{self.tracked.fqn}/{name}"] = self.tracked.state_box, values.clone().numpy()
        return kept(self, label, name, values, *rest)

    staging._Planning._kept = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        staging._Planning._kept = kept  # type: ignore[method-assign]


def train_job(layout: str | None, kind: str, compute: str, root: str | None) -> tuple[Learnt, Learnt]:
    """At the save, and at the end."""
    run = GefenRun(layout, kind, compute)
    run.train(range(SAVED_AFTER))
    middle = run.learnt()
    if root is not None:
        dcp.save({"optim": run.optimizer}, checkpoint_id=root)
    run.train(range(SAVED_AFTER, STEPS))
    return middle, run.learnt()


def resume_job(
    layout: str, kind: str, compute: str, root: str, weights: dict[str, Array], again: str | None, by_path: bool
) -> tuple[Learnt, Learnt]:
    """After the load, and at the end; saves once more in between."""
    run = GefenRun(layout, kind, compute)
    names: list[str] = []
    said = ""
    with recorded() as exact:
        if by_path:
            prepared = run.optimizer.prepare_load(root)
            names = sorted({name for one in prepared.report.requantised.values() for name in one})
            said = str(prepared.report)
            prepared.commit()
        else:
            dcp.load({"optim": run.optimizer}, checkpoint_id=root)
    loaded = run.learnt()
    loaded.exact, loaded.named, loaded.said = exact, names, said
    if again is not None:
        dcp.save({"optim": run.optimizer}, checkpoint_id=again)
    run.put(weights)
    run.train(range(SAVED_AFTER, STEPS))
    return loaded, run.learnt()


def back_job(root: str) -> tuple[Learnt, Learnt, Learnt, str]:
    """A save, a run on with another codebook, and a load back into it; and a load that leaves a parameter out."""
    run = GefenRun("2", "gefen-blocks", "local")
    run.train(range(SAVED_AFTER))
    middle = run.learnt()
    dcp.save({"optim": run.optimizer}, checkpoint_id=root)
    weights = {name: box_and_part[1].copy() for name, box_and_part in middle.seen.weights.items()}
    run.train(range(SAVED_AFTER, STEPS))
    end = run.learnt()
    other = GefenRun("2", "gefen-blocks", "local")
    other.train(range(STEPS, STEPS + 2))
    assert other.learnt().table != middle.table
    refused = ""
    names = [name for name in SHAPES if name != "odd"]
    part = GefenRun("2", "gefen-blocks", "local")
    part.train(range(STEPS, STEPS + 2))
    smaller = _without_odd(names)
    dcp.save({"optim": smaller}, checkpoint_id=root + "-part")
    try:
        part.optimizer.prepare_load(root + "-part", strict=False)
    except Exception as error:
        refused = str(error)
    dcp.load({"optim": other.optimizer}, checkpoint_id=root)
    loaded = other.learnt()
    with torch.no_grad():
        for name, param in other.params.items():
            param.to_local().copy_(torch.from_numpy(weights[name]))
    other.train(range(SAVED_AFTER, STEPS))
    assert loaded.table == middle.table
    return middle, end, other.learnt(), refused


def _without_odd(names: list[str]) -> ShardedStateOptimizer:
    """An optimizer of a model that lacks a parameter, which has stepped."""
    model = nn.Module()
    for name in names:
        setattr(model, name, nn.Parameter(drawn(name, SHAPES[name], 0)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = ShardedStateOptimizer(make("gefen-blocks", model.parameters()), model, compute="local")
    for name, param in model.named_parameters():
        grad = distribute_tensor(drawn(name, param.shape, 1), param.device_mesh, param.placements)  # pyrefly: ignore
        param.grad = grad
    optimizer.step()
    return optimizer


def refused_job() -> dict[str, str]:
    """What wrapping says of what would be wrong, by what it is."""
    mesh = init_device_mesh("cpu", (2,))
    both = init_device_mesh("cpu", (1, 2))

    def said(kind: str, compute: str, model: nn.Module, **options: Any) -> str:
        inner: Any = make(kind, model.parameters())
        for name, value in options.items():
            setattr(inner, name, value)
        try:
            return ShardedStateOptimizer(inner, model, compute=compute).explain()
        except Exception as error:
            return f"refused: {error}"

    def sharded() -> nn.Module:
        model = Small()
        fully_shard(model, mesh=mesh)
        return model

    mixed, copies = sharded(), nn.Module()
    mixed.register_parameter("plain", nn.Parameter(torch.ones(8)))
    copies.a = nn.Parameter(distribute_tensor(torch.ones(8, 8), both, [Shard(0), Shard(0)]))
    copies.b = nn.Parameter(distribute_tensor(torch.ones(8), both, [Shard(0), Replicate()]))
    assert dist.get_world_size() == 2
    return {
        "owner": said("gefen-blocks", "owner", sharded()),
        "dtensor": said("gefen-blocks", "dtensor", sharded()),
        "factored": said("gefen-factored", "local", sharded()),
        "mixed": said("gefen-blocks", "local", mixed),
        "copies": said("gefen-blocks", "local", copies),
        "capturable": said("gefen-blocks", "auto", sharded(), capturable=True),
        "substrings": said("gefen-blocks", "auto", sharded(), _period_one_substrings=("odd",)),
        "local": said("gefen-blocks", "local", sharded()),
        "auto": said("gefen-factored", "auto", sharded()),
    }
