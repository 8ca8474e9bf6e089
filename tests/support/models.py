"""Small models with odd sizes on every FSDP2 topology, with values and gradients that are the same on all of them.

Everything global (initial parameters, gradients, batches) is drawn from a seed and a name, whole; each rank then takes
the elements it holds. So two runs of different world sizes can be compared bit for bit, and no test depends on how
torch shards, which it learns by sharding a twin whose parameters are the numbers of their own elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = [
    "ROWS",
    "Shape",
    "SmallModel",
    "Topology",
    "backward",
    "build",
    "local_part",
    "local_tensor",
    "set_gradients",
]

Topology = Literal["plain", "fsdp", "hsdp", "fsdp_tp"]

ROWS = (1, 2, 3, 5, 7)
"""On 4 ranks FSDP2 gives out 1000, 1100, 1110, 2210 and 2221 rows: empty shards, and uneven ones with and without."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and kinds of a `SmallModel`'s parameters.

    Attributes:
        rows: of the heads, one linear layer each.
        width: features of the input and of the residual, columns of the heads.
        hidden: between ``up`` and ``down``; tensor parallelism splits it.
        dtype: of all parameters.
        ignored: names of parameters that ``fully_shard`` leaves plain and whole on every rank.
        gain: add ``gain``, a 0-d parameter; FSDP2 shards none, so it must be among ``ignored``, except on ``plain``.
    """

    rows: Sequence[int] = ROWS
    width: int = 5
    hidden: int = 6
    dtype: torch.dtype = torch.float32
    ignored: tuple[str, ...] = ()
    gain: bool = False


class SmallModel(nn.Module):
    """An MLP block and a few heads: matrices, vectors, one 3-d parameter, one buffer.

    Attributes:
        global_indices: parameter name -> which elements of the whole parameter, in row-major numbering, this rank
            holds; int64, the shape of the local tensor.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.heads = nn.ModuleList(nn.Linear(shape.width, rows) for rows in shape.rows)
        self.scale = nn.Parameter(torch.empty(shape.width))
        self.kernel = nn.Parameter(torch.empty(3, 2, shape.width))
        if shape.gain:
            self.gain = nn.Parameter(torch.empty(()))
        self.register_buffer("offset", torch.zeros(shape.width))
        self.global_indices: dict[str, Tensor] = {}
        self.to(shape.dtype)

    def forward(self, inputs: Tensor) -> Tensor:  # [batch, width] -> [batch, sum of rows]
        hidden = self.down(torch.relu(self.up(inputs))) * self.scale + self.offset + self.kernel.sum((0, 1))
        if hasattr(self, "gain"):
            hidden = hidden * self.gain
        return torch.cat([head(hidden) for head in self.heads], dim=-1)


def build(topology: Topology, shape: Shape | None = None, *, seed: int = 0) -> SmallModel:
    """A model on this job's ranks. Collective, unless ``plain``.

    Args:
        topology: ``plain``: no DTensors; ``fsdp``: a 1-D mesh over the world; ``hsdp``: 2 replicas x the rest;
            ``fsdp_tp``: the rest x 2 of tensor parallelism for ``up`` and ``down``, whose dim 0 is then split by both
            (``_StridedShard``), with the other parameters on the 1-D mesh of FSDP.
        shape: sizes; the default has ``ROWS`` in fp32.
        seed: of the initial values, which are the same on every topology.
    """
    shape = shape or Shape()
    twin = SmallModel(shape).to(torch.float64)
    with torch.no_grad():
        for param in twin.parameters():
            param.copy_(torch.arange(param.numel()).reshape(param.shape))
    _distribute(twin, topology, shape)
    model = SmallModel(shape)
    _distribute(model, topology, shape)
    model.global_indices = {name: local_tensor(param).long() for name, param in twin.named_parameters()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            local_tensor(param).copy_(local_part(model, name, _draw(f"{seed}/{name}", param.shape)))
    return model


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, over the same memory; a plain tensor itself. Detached."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_part(model: SmallModel, name: str, whole: Tensor) -> Tensor:
    """The part of a whole tensor of the parameter's shape that goes with what this rank holds of the parameter."""
    return whole.reshape(-1)[model.global_indices[name]]


def set_gradients(model: SmallModel, step: int, *, without: Collection[str] = ()) -> None:
    """Writes every gradient: a function of name, shape and step alone, distributed like its parameter.

    One element of each is -0.0. No communication.

    Args:
        model: made by `build`.
        step: different steps have different gradients.
        without: names of parameters whose gradient becomes None.
    """
    for name, param in model.named_parameters():
        if name in without:
            param.grad = None
            continue
        whole = _draw(f"gradient/{step}/{name}", param.shape)
        if whole.numel() > 2:
            whole.view(-1)[1] = -0.0
        gradient = torch.zeros_like(param, requires_grad=False)
        local_tensor(gradient).copy_(local_part(model, name, whole))
        param.grad = gradient


def backward(model: SmallModel, step: int, *, batch: int = 4) -> Tensor:
    """Forward and backward of a whole batch that is the same on every rank; the loss. Collective, unless plain.

    The gradients equal those of one process bit for bit on ``fsdp`` and ``hsdp`` of 1, 2 or 4 ranks: the mean of two
    or four equal numbers is exact, that of three is not, and tensor parallelism adds in another order.
    """
    dtype = model.scale.dtype
    inputs = _draw(f"inputs/{step}", (batch, model.scale.shape[0])).to(dtype)
    loss = model(inputs).float().square().mean()
    loss.backward()
    return loss.detach()


def _draw(key: str, shape: Sequence[int]) -> Tensor:
    """Normal fp32 numbers that depend on the key and the shape only."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def _distribute(model: SmallModel, topology: Topology, shape: Shape) -> None:
    if topology == "plain":
        return
    if topology == "fsdp_tp":
        mesh = _mesh(topology, ("fsdp", "tp"), (-1, 2))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["fsdp"]
    elif topology == "hsdp":
        mesh = _mesh(topology, ("replicate", "shard"), (2, -1))
    else:
        mesh = _mesh(topology, ("fsdp",), (-1,))
    ignored = {model.get_parameter(name) for name in shape.ignored}
    for part in [model.up, model.down, *model.heads, model]:
        fully_shard(part, mesh=mesh, ignored_params=ignored)


def _mesh(topology: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh over the world; the size given as -1 is what remains."""
    fixed = -torch.Size(sizes).numel()
    if dist.get_world_size() % fixed:
        raise ValueError(f"{topology} needs a multiple of {fixed} ranks, not {dist.get_world_size()}")
    rest = dist.get_world_size() // fixed
    return init_device_mesh("cpu", tuple(rest if size == -1 else size for size in sizes), mesh_dim_names=names)
