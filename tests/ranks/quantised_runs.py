"""Runs of optimizers with quantised state on one layout: train, save, train on; load, save again, train on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardopt import Blocks, Form, ShardedStateOptimizer
from shardopt.geometry import Box
from shardopt.layouts.quantised import Piece, Stored, values_of
from shardopt.torch_compat import local_box

Array = npt.NDArray[Any]

VOTE_TIMEOUT_S = 60.0
SAVED_AFTER, STEPS = 3, 8

# Blocks of 256 (128 with 4 bits), no quantisation under 4,096 elements of what the optimizer sees.
SHAPES: dict[str, tuple[int, ...]] = {
    "aligned": (64, 512),  # at least 8,192 elements and whole blocks on 4 ranks, along either dim
    "odd": (66, 130),  # 8,580: blocks cross rows, 2 ranks begin within one, 4 ranks have too few to quantise
    "uneven": (31, 256),  # 16 and 15 rows on 2 ranks: one is quantised, the other is too small
    "vector": (9001,),
    "small": (3, 5),  # the last of 4 ranks has nothing
}


class Net(nn.Module):
    """Never run: gradients are set."""

    def __init__(self) -> None:
        super().__init__()
        self.column = nn.Linear(512, 64, bias=False)
        self.row = nn.Linear(128, 64, bias=False)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(drawn(name, param.shape, 0))


def drawn(name: str, shape: Iterable[int], number: int) -> Tensor:
    """The same for a name and number in every process; of very different sizes, as moments have them."""
    seed = number * 1009 + sum(name.encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator) * 10 ** torch.empty(tuple(shape)).uniform_(
        -3, 0, generator=generator
    )


def _fsdp(model: nn.Module, world_size: int, **options: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), **options)


def _along_dim_1(model: nn.Module) -> None:
    _fsdp(model, 2, shard_placement_fn=lambda param: Shard(1) if param.dim() == 2 and param.shape[1] > 5 else Shard(0))


def _hsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"column": ColwiseParallel(), "row": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])


LAYOUTS: dict[str, tuple[int, Callable[[nn.Module], None]]] = {
    "1": (1, lambda model: _fsdp(model, 1)),
    "2": (2, lambda model: _fsdp(model, 2)),
    "3": (3, lambda model: _fsdp(model, 3)),
    "4": (4, lambda model: _fsdp(model, 4)),
    "dim1": (2, _along_dim_1),
    "hsdp": (4, _hsdp),
    "tp": (4, _tensor_parallel),
}


def make(kind: str, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An optimizer of a library, with its options as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind.startswith("bnb-"):
            import bitsandbytes

            return getattr(bitsandbytes.optim, kind[4:])(params, lr=1e-2)
        if kind.startswith("gefen"):
            from gefen import Gefen

            return Gefen(params, lr=1e-2, fused=False, factored_v_2d=kind == "gefen-factored")
        import torchao.optim

    # Its kernel is compiled for each shape, for 10 s and more; what it computes is tried here, not how it is compiled.
    torchao.optim.adam.torch = Uncompiled()
    return getattr(torchao.optim, kind[3:])(params, lr=1e-2)


class Uncompiled:
    """torch, with a ``compile`` that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return (lambda function, **options: function) if name == "compile" else getattr(torch, name)


@dataclass(repr=False)
class Kept:
    """What one rank keeps of one entry.

    Attributes:
        box: of the parameter.
        codes: one for each element, or pair; None if it is not quantised.
        scales: of the blocks, or the values.
        values: what they mean, fp32, shape of the box.
        steps: of each element, how far apart two codes of its block are at most; 0 where it is not quantised.
    """

    box: Box
    codes: Array | None
    scales: Array
    values: Array
    steps: Array


@dataclass(repr=False)
class Seen:
    """One rank's part of a run at one moment.

    Attributes:
        weights: by name, with their boxes.
        state: quantised entries by ``<name>/<entry>``; of parameters whose state is here.
        requantised: parameters that the report of a load named.
    """

    weights: dict[str, tuple[Box, Array]] = field(default_factory=dict)
    state: dict[str, Kept] = field(default_factory=dict)
    requantised: list[str] = field(default_factory=list)


class Run:
    """One model on one layout, or unsharded, with one optimizer."""

    net: type[nn.Module] = Net

    def __init__(self, layout: str | None, kind: str, compute: str) -> None:
        self.model: nn.Module = self.net()
        if layout is not None:
            LAYOUTS[layout][1](self.model)
        self.params = dict(self.model.named_parameters())
        inner = make(kind.removesuffix("-dense"), self.params.values())
        if kind.endswith("-dense"):
            # Everything is too small to be quantised.
            vars(inner)["args"].min_8bit_size = 1 << 30
        self.optimizer: Any = inner
        if layout is not None:
            self.optimizer = ShardedStateOptimizer(inner, self.model, compute=compute, vote_timeout=VOTE_TIMEOUT_S)

    def box(self, name: str) -> Box:
        param = self.params[name]
        return Box(*local_box(param)) if isinstance(param, DTensor) else Box.whole(tuple(param.shape))

    def part(self, name: str, whole: Tensor) -> Tensor:
        box = self.box(name)
        return whole[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))].contiguous()

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for name, param in self.params.items():
                grad = self.part(name, drawn(name, param.shape, step + 1))
                param.grad = _like(param, grad)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def put(self, weights: dict[str, Array]) -> None:
        with torch.no_grad():
            for name, param in self.params.items():
                local = param.to_local() if isinstance(param, DTensor) else param
                local.copy_(self.part(name, torch.from_numpy(weights[name])))

    def seen(self) -> Seen:
        found = Seen()
        for name, param in self.params.items():
            local = param.to_local() if isinstance(param, DTensor) else param
            found.weights[name] = self.box(name), local.detach().clone().numpy()
        if isinstance(self.optimizer, ShardedStateOptimizer):
            inventory = self.optimizer._inventory
            for tracked in inventory.tracked:
                box = tracked.state_box
                for entry, value in inventory.quantised(tracked).items():
                    assert box is not None
                    found.state[f"{tracked.fqn}/{entry}"] = kept(box, value)
        return found


def _like(param: Tensor, local: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def kept(box: Box, value: Blocks | Tensor) -> Kept:
    """What a rank keeps, with what it means."""
    if isinstance(value, Tensor):
        values = value.detach().clone().reshape(box.size).numpy()
        return Kept(box, None, values, values, np.zeros_like(values))
    form, raw = value.form, value.codes
    if raw is None:
        values = values_of(box, None, [Piece(box, Stored(form, box, value.scales))]).numpy()
        return Kept(box, None, value.scales.clone().reshape(-1).numpy(), values, np.zeros_like(values))
    flat = raw.reshape(-1)
    apart = torch.stack((flat >> 4, flat & 15), -1) if form.per_byte == 2 else flat
    stored = Stored(form, box, value.scales)
    values = values_of(box, apart.reshape(box.size), [Piece(box, stored)])
    scales = values_of(box, None, [Piece(box, Stored(replace(form, codes=None, table=None), box, value.scales))])
    codes = flat.clone().view(torch.uint8).numpy()
    return Kept(
        box, codes, value.scales.clone().reshape(-1).numpy(), values.numpy(), (scales * widest_step(form)).numpy()
    )


def widest_step(form: Form) -> float:
    """The widest gap between two numbers that codes stand for."""
    numbers = form.table
    if numbers is None:
        assert form.codes is not None
        numbers = torch.arange(256, dtype=torch.uint8).view(form.codes).float()
    return float(numbers[numbers.isfinite()].unique().diff().max())


def train_job(layout: str | None, kind: str, compute: str, root: str | None) -> tuple[Seen, Seen]:
    """At the save, and at the end."""
    run = Run(layout, kind, compute)
    run.train(range(SAVED_AFTER))
    middle = run.seen()
    if root is not None:
        dcp.save({"optim": run.optimizer}, checkpoint_id=root)
    run.train(range(SAVED_AFTER, STEPS))
    return middle, run.seen()


def resume_job(
    layout: str, kind: str, compute: str, root: str, weights: dict[str, Array], again: str | None, by_path: bool
) -> tuple[Seen, Seen]:
    """After the load, and at the end; saves once more in between."""
    run = Run(layout, kind, compute)
    names: list[str] = []
    if by_path:
        prepared = run.optimizer.prepare_load(root)
        names = sorted({name for one in prepared.report.requantised.values() for name in one})
        prepared.commit()
    else:
        dcp.load({"optim": run.optimizer}, checkpoint_id=root)
    loaded = run.seen()
    loaded.requantised = names
    if again is not None:
        dcp.save({"optim": run.optimizer}, checkpoint_id=again)
    run.put(weights)
    run.train(range(SAVED_AFTER, STEPS))
    return loaded, run.seen()


def whole(seen: list[Seen], net: type[nn.Module] = Net) -> dict[str, Array]:
    """The weights, put together."""
    result: dict[str, Array] = {}
    for one in seen:
        for name, (box, part) in one.weights.items():
            shape = tuple(net().get_parameter(name).shape)
            target = result.setdefault(name, np.zeros(shape, dtype=np.float32))
            target[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))] = part
    return result


def meant(seen: list[Seen], key: str, *, steps: bool = False, net: type[nn.Module] = Net) -> Array:
    """What an entry means, put together from all ranks; or how far apart two codes are there."""
    shape = tuple(net().get_parameter(key.partition("/")[0]).shape)
    result = np.full(shape, np.nan, dtype=np.float32)
    for one in seen:
        if key in one.state:
            box = one.state[key].box
            result[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))] = (
                one.state[key].steps if steps else one.state[key].values
            )
    return result


def explained_job(layout: str, kind: str, compute: str) -> str:
    """What a wrapper says of itself."""
    return Run(layout, kind, compute).optimizer.explain()


def async_job(kind: str, compute: str, root: str) -> tuple[Seen, Seen]:
    """A save in a thread, during which the run goes on: what was there, and what a load brings."""
    run = Run("2", kind, compute)
    run.train(range(SAVED_AFTER))
    middle = run.seen()
    saved = dcp.async_save({"optim": run.optimizer}, checkpoint_id=root)
    run.train(range(SAVED_AFTER, STEPS))
    saved.result()  # type: ignore[union-attr]
    other = Run("2", kind, compute)
    dcp.load({"optim": other.optimizer}, checkpoint_id=root)
    return middle, other.seen()


def granularity_job(layers: bool) -> list[tuple[str, bool]]:
    """Which entries are quantised, with every layer sharded by itself, or all at once."""
    run = Run(None, "bnb-AdamW8bit", "")
    mesh = init_device_mesh("cpu", (2,))
    if layers:
        for layer in (run.model.column, run.model.row):
            fully_shard(layer, mesh=mesh)
    fully_shard(run.model, mesh=mesh)
    run.params = dict(run.model.named_parameters())
    inner = make("bnb-AdamW8bit", run.params.values())
    run.optimizer = ShardedStateOptimizer(inner, run.model, vote_timeout=VOTE_TIMEOUT_S)
    run.train([0])
    return sorted((key, part.codes is not None) for key, part in run.seen().state.items())


def twice_job(kind: str, root: str) -> tuple[bool, list[str]]:
    """A load into an optimizer that has stepped: whether tensors kept their identity; and what a second commit says."""
    run = Run("2", kind, "local")
    run.train(range(SAVED_AFTER))
    dcp.save({"optim": run.optimizer}, checkpoint_id=root)
    inventory = run.optimizer._inventory
    before = {
        (item.fqn, name): (value if isinstance(value, Tensor) else value.scales).data_ptr()
        for item in inventory.tracked
        for name, value in inventory.quantised(item).items()
    }
    run.train(range(SAVED_AFTER, STEPS))
    state = run.optimizer.state_dict()
    dcp.load({"optim": run.optimizer}, checkpoint_id=root)
    after = {
        (item.fqn, name): (value if isinstance(value, Tensor) else value.scales).data_ptr()
        for item in inventory.tracked
        for name, value in inventory.quantised(item).items()
    }
    errors: list[str] = []
    try:
        run.optimizer.prepare_load(state)
    except Exception as error:
        errors.append(str(error))
    return before == after, errors
