"""Jobs with a rule that keeps one kind of state after another beside sharded parameters."""

from __future__ import annotations

from collections import Counter, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardopt import LoadError, PlacementError, RankFailureError, ShardedStateOptimizer
from tests.support.gather import whole
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot
from tests.unit.test_unknown_classes import Keeper, entries, step

Pair = namedtuple("Pair", ["first", "second"])
Keep = Callable[[Tensor, int], Any]

VOTE_TIMEOUT_S = 30.0


class Model(nn.Module):
    """5 rows are uneven on 2 and 4 ranks, 1 row leaves all ranks but one without any; 6 dims; plain on every rank."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=source).to(dtype))

        self.uneven = drawn(5, 3)
        self.single = drawn(1, 3)
        self.deep = drawn(3, 2, 1, 2, 3, 2)

    def forward(self) -> None:
        raise AssertionError("never run")


def like(param: Tensor, local_part: Tensor) -> Tensor:
    """This rank's part, placed like the parameter."""
    if not isinstance(param, DTensor):
        return local_part
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(local_part, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def drawn(param: Tensor, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values of the parameter's shape, placed like it."""
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 40
    if isinstance(param, DTensor):
        # gloo moves no 8-bit floats, so the conversion comes last.
        values = distribute_tensor(values, param.device_mesh, param.placements).to_local()
    return like(param, values.to(dtype))


def strided(param: Tensor, seed: int) -> Tensor:
    """The same with this rank's part in column-major memory with gaps."""
    values = local(drawn(param, seed))
    gaps = torch.empty((*reversed(values.shape), 2)).select(-1, 0).permute(*reversed(range(values.dim())))
    return like(param, gaps.copy_(values))


def dense(values: Tensor) -> Tensor:
    """A copy whose strides are those of its shape."""
    return torch.empty(values.shape, dtype=values.dtype).copy_(values)


def of_dtype(dtype: torch.dtype) -> Keep:
    return lambda param, seed: drawn(param, seed, dtype)


def placed(placement: Any) -> Keep:
    return lambda param, seed: DTensor.from_local(torch.ones(4), param.device_mesh, [placement])


def value(make: Callable[[int], Any]) -> Keep:
    return lambda param, seed: make(seed)


_DTYPES = ("float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "int64", "bool", "complex64")
OK: dict[str, Keep] = {
    "like the parameter": drawn,
    "strided": strided,
    **{dtype: of_dtype(getattr(torch, dtype)) for dtype in _DTYPES},
    "0-d tensor": value(lambda seed: torch.tensor(0.5 + seed)),
    "0-d int64": value(lambda seed: torch.tensor(2**60 + seed)),
    "float": value(lambda seed: 0.1 + seed),
    "int": value(lambda seed: 2**80 + seed),
    "bool": value(lambda seed: seed % 2 == 0),
    "None": value(lambda seed: None),
    "str": value(lambda seed: f"text ä {seed}"),
    "complex": value(lambda seed: complex(seed, -0.0)),
    "bytes": value(lambda seed: bytes([seed, 255])),
    "tuple": value(lambda seed: (seed, (2.5, None))),
    "list": value(lambda seed: [seed, []]),
    "deque": value(lambda seed: deque([seed, 2], maxlen=4)),
    "dict with int keys": value(lambda seed: {0: seed, 1: 1.5, "0": None}),
}
REFUSED: dict[str, Keep] = {
    "plain, this rank's shard": lambda param, seed: torch.ones(local(param).shape),
    "plain, global shape": lambda param, seed: torch.ones(tuple(param.shape)),
    "plain, the same on all ranks": lambda param, seed: torch.ones(7),
    "factored rows and columns": lambda param, seed: {"row": torch.ones(len(local(param))), "col": torch.ones(3)},
    "codes and scales": lambda param, seed: [torch.ones(4, dtype=torch.int8), torch.ones(1)],
    "list of local tensors": lambda param, seed: [torch.ones(local(param).shape)],
    "list of DTensors": lambda param, seed: [drawn(param, seed)],
    "dict of DTensors": lambda param, seed: {"m": drawn(param, seed)},
    "tuple of DTensors": lambda param, seed: (drawn(param, seed),),
    "deque of DTensors": lambda param, seed: deque([drawn(param, seed)]),
    "list of 0-d tensors": lambda param, seed: [torch.tensor(1.0)],
    "0-d tensor, another on each rank": lambda param, seed: torch.tensor(float(dist.get_rank())),
    "float, another on each rank": lambda param, seed: float(dist.get_rank()),
    "str, another on each rank": lambda param, seed: f"rank {dist.get_rank()}",
    "Counter, another on each rank": lambda param, seed: Counter({"steps": dist.get_rank()}),
    "dtype, another on each rank": lambda param, seed: drawn(
        param, seed, torch.float32 if dist.get_rank() else torch.float64
    ),
    "only on one rank": lambda param, seed: (drawn(param, seed), None)[dist.get_rank()],
    "namedtuple": value(lambda seed: Pair(1, 2)),
    "Generator": value(lambda seed: torch.Generator()),
    "DTensor of another shape": placed(Shard(0)),
    "replicated DTensor": placed(Replicate()),
    "partial DTensor": placed(Partial()),
}


@dataclass
class Wrapped:
    """A model with an optimizer that keeps one kind of state."""

    kind: str
    seed: int
    sharded: bool = True
    dtype: torch.dtype = torch.float32
    model: Model = field(init=False)
    optimizer: ShardedStateOptimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model(self.dtype)
        if self.sharded:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        keep = {**OK, **REFUSED}[self.kind]
        inner = Keeper(self.model.parameters(), lambda param: {"kept": keep(param, self.seed)})
        self.optimizer = ShardedStateOptimizer(inner, self.model, compute="dtensor", vote_timeout=VOTE_TIMEOUT_S)

    def step(self) -> None:
        step(self.optimizer, self.model)

    def held(self) -> dict[str, Any]:
        """Collective. State by name, whole; without the strides, which are each rank's own."""
        found = whole(entries(self.optimizer, self.model))
        return {key: dense(one) if isinstance(one, Tensor) else one for key, one in found.items()}


def save_kinds(root: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Saves each kind; what was saved, by kind and name."""
    saved = {}
    for kind in OK:
        made = Wrapped(kind, 1, dtype=dtype)
        made.step()
        dcp.save({"optim": made.optimizer}, checkpoint_id=f"{root}/{kind}")
        saved[kind] = made.held()
    return saved


def load_kinds(root: str, saved: dict[str, dict[str, Any]], sharded: bool, dtype: torch.dtype) -> dict[str, list[str]]:
    """Loads each kind into fresh and warm optimizers; how their state differs from the saved, by kind."""
    found = {}
    for kind in OK:
        found[kind] = []
        # Stock loads of unsharded state that was saved sharded are refused, for a class nothing is known of.
        for how, steps in (("path", 0), ("path", 1), *([("stock", 1)] if sharded else [])):
            made = Wrapped(kind, 2, sharded, dtype)
            for _ in range(steps):
                made.step()
            if how == "path":
                made.optimizer.prepare_load(f"{root}/{kind}").commit()
            else:
                dcp.load({"optim": made.optimizer}, checkpoint_id=f"{root}/{kind}")
            found[kind] += [f"{how}, {steps} steps: {text}" for text in value_differences(saved[kind], made.held())]
            made.step()
    return found


def refuse_kinds(root: str) -> dict[str, tuple[str, str, list[str]]]:
    """Tries to save each kind: type and text of the error, and what is other than before."""
    found = {}
    for kind in REFUSED:
        made = Wrapped(kind, 1)
        made.step()
        before = snapshot(made.optimizer, made.model)
        try:
            dcp.save({"optim": made.optimizer}, checkpoint_id=f"{root}/{kind}")
            error: Exception | None = None
        except (PlacementError, RankFailureError, LoadError) as raised:
            error = raised
        changes = before.diff(snapshot(made.optimizer, made.model))
        found[kind] = (type(error).__name__, str(error), changes)
    return found
