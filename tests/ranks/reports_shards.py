"""Jobs in which every element of state has a value of its own, so that one in the wrong place is seen."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardopt import RankFailureError, ShardedStateOptimizer
from shardopt.torch_compat import same_spec
from tests.support.models import Shape, SmallModel, Topology, build, local_part, local_tensor
from tests.support.snapshot import snapshot

SHAPE = Shape(rows=(1, 3), width=17, hidden=5)
"""17 columns and 5 rows: tensor parallelism over 2 ranks cuts both unevenly, and FSDP what is left of the rows."""

VOTE_TIMEOUT_S = 30.0


def numbered(name: str, shape: Sequence[int]) -> Tensor:
    """A whole tensor without two equal elements; float32 holds every one of them exactly."""
    start = zlib.crc32(name.encode()) % 1000 * 1000
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(tuple(shape))


def momentum_sgd(model: nn.Module) -> ShardedStateOptimizer:
    """After its first step the momentum is the gradient."""
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return ShardedStateOptimizer(inner, model, vote_timeout=VOTE_TIMEOUT_S)


def stepped(topology: Topology, shape: Shape = SHAPE) -> tuple[SmallModel, ShardedStateOptimizer]:
    """Collective, unless plain. A model whose optimizer has taken one step with numbered gradients."""
    model = build(topology, shape)
    optimizer = momentum_sgd(model)
    for name, param in model.named_parameters():
        param.grad = torch.zeros_like(param, requires_grad=False)
        local_tensor(param.grad).copy_(local_part(model, name, numbered(name, param.shape)))
    optimizer.step()
    return model, optimizer


def misplaced(model: SmallModel, optimizer: ShardedStateOptimizer) -> list[str]:
    """What of this rank's momentum is not the number that belongs there, or is not laid out like its parameter."""
    found: list[str] = []
    shown = optimizer.sharded_state()
    for name, param in model.named_parameters():
        momentum = optimizer.state[param]["momentum_buffer"]
        if isinstance(momentum, DTensor) or momentum.shape != local_tensor(param).shape:
            found.append(f"{name}: {tuple(momentum.shape)}, this rank's shard is {tuple(local_tensor(param).shape)}")
        elif not torch.equal(momentum, local_part(model, name, numbered(name, param.shape))):
            found.append(f"{name}: {momentum.tolist()}")
        whole = shown[f"state.{name}.momentum_buffer"]
        if whole.shape != param.shape or isinstance(whole, DTensor) != isinstance(param, DTensor):
            found.append(f"{name}: shown with shape {tuple(whole.shape)}")
        elif isinstance(whole, DTensor) and isinstance(param, DTensor) and not same_spec(whole, param):
            found.append(f"{name}: placed {whole.placements}, the parameter {param.placements}")
    return found


class CountingWriter(dcp.FileSystemWriter):
    """Notes which chunks this rank writes."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.written: list[tuple[str, tuple[int, ...]]] = []

    def write_data(self, plan: Any, planner: Any) -> Any:
        """As the base class does."""
        indices = [item.index for item in plan.items]
        self.written += [(index.fqn, tuple(index.offset or ())) for index in indices]
        return super().write_data(plan, planner)


def save_job(
    path: str, topology: Topology, shape: Shape = SHAPE
) -> tuple[list[str], list[tuple[str, tuple[int, ...]]]]:
    """Saves.

    Returns:
        What was misplaced before it, and the chunks this rank has written.
    """
    model, optimizer = stepped(topology, shape)
    writer = CountingWriter(path)
    dcp.save({"optim": optimizer}, storage_writer=writer)
    return misplaced(model, optimizer), writer.written


def load_job(path: str, topology: Topology, how: str, shape: Shape = SHAPE) -> list[str]:
    """Loads into a fresh optimizer, or one that has other values; what is misplaced afterwards."""
    model = build(topology, shape)
    optimizer = momentum_sgd(model)
    if how == "warm":
        for param in model.parameters():
            param.grad = torch.full_like(param, -1.0)
        optimizer.step()
    if how == "path":
        optimizer.prepare_load(path).commit()
    else:
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    return misplaced(model, optimizer)


def make_strided(optimizer: ShardedStateOptimizer) -> None:
    """Puts every momentum into column-major memory with gaps; the values stay."""
    for entries in optimizer.state.values():
        momentum = entries["momentum_buffer"]
        gaps = torch.empty((*reversed(momentum.shape), 2)).select(-1, 0).permute(*reversed(range(momentum.dim())))
        entries["momentum_buffer"] = gaps.copy_(momentum)


def save_strided_job(path: str, topology: Topology) -> list[str]:
    """Saves; what was misplaced before it."""
    model, optimizer = stepped(topology)
    make_strided(optimizer)
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    return misplaced(model, optimizer)


def load_strided_job(path: str, topology: Topology) -> list[str]:
    """Loads into an optimizer that has other values in such memory; what is misplaced afterwards."""
    model = build(topology, SHAPE)
    optimizer = momentum_sgd(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, -1.0)
    optimizer.step()
    make_strided(optimizer)
    dcp.load({"optim": optimizer}, checkpoint_id=path)
    return misplaced(model, optimizer)


def keys_job(topology: Topology, steps: int) -> tuple[list[str], list[list[str]]]:
    """The keys of the state dict, and each group's members by shape, on this rank."""
    model = build(topology, Shape(rows=(1, 2, 3), width=3, hidden=5))
    optimizer = momentum_sgd(model)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    groups = [[str(tuple(param.shape)) for param in group["params"]] for group in optimizer.param_groups]
    return sorted(optimizer.state_dict()), groups


def collectives_job(path: str) -> list[int]:
    """How many of torch's collectives a load of what was read needs: checking it, and putting it in place."""
    model, optimizer = stepped("fsdp_tp")
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    counts = []
    state_dict = optimizer.state_dict()
    dcp.load({"optim": state_dict}, checkpoint_id=path)
    for action in (lambda: optimizer.prepare_load(state_dict).commit(), optimizer.state_dict, optimizer.sharded_state):
        with CommDebugMode() as mode:
            action()
        counts.append(mode.get_total_counts())
    return [*counts, len(misplaced(model, optimizer))]


class Columns(nn.Module):
    """A matrix of which each rank of a tensor parallel group holds some columns, in a plain parameter."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2, bias=False)
        self.part = nn.Parameter(torch.zeros(2, columns))


def plain_parts_job(path: str, uneven: bool) -> None:
    """Saves, though plain parameters hold another part on each rank and nothing says which."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place = mesh["tensor"].get_local_rank()
    model = Columns(3 - place if uneven else 2)
    dense = distribute_tensor(model.dense.weight.detach(), mesh, [Shard(0), Replicate()])
    model.dense.weight = nn.Parameter(dense)
    optimizer = momentum_sgd(model)
    model.dense.weight.grad = torch.ones_like(model.dense.weight)
    model.part.grad = torch.full_like(model.part, 1.0 + place)
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=path)


class KeepsMasters(torch.optim.Optimizer):
    """A rule whose float32 copies and moments are not in its state."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, {"lr": 0.125})
        self.where = where
        masters = [param.detach().clone() for group in self.param_groups for param in group["params"]]
        if where == "list":
            self.masters: Any = masters
        elif where == "dict":
            self.masters = {"fp32": {index: master for index, master in enumerate(masters)}}
        elif where == "tensor":
            self.masters = masters[0]
        else:
            self.masters = torch.optim.SGD([nn.Parameter(masters[0])], lr=0.125, momentum=0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if isinstance(self.masters, torch.optim.Optimizer):
            (master,) = self.masters.param_groups[0]["params"]
            master.grad = torch.ones_like(master)
            self.masters.step()
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


def side_storage_job(path: str, where: str) -> None:
    """Saves an optimizer that keeps part of what its step reads outside of its state."""
    model = nn.Linear(3, 5)
    fully_shard(model)
    optimizer = ShardedStateOptimizer(
        KeepsMasters(model.parameters(), where), model, compute="dtensor", vote_timeout=VOTE_TIMEOUT_S
    )
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=path)


GROUP_VALUES: dict[str, Any] = {"betas": (0.5, 0.75), "eps": 1e-5, "weight_decay": 0.25, "tag": ["a", (1, None)]}


class Layers(nn.Module):
    """Weights whose order in the module is not that of the groups; ``one`` is a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.ones(5, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.ones(5))

    def forward(self) -> None:
        raise AssertionError("never run")


def grouped(order: Sequence[str], values: dict[str, dict[str, Any]]) -> tuple[Layers, ShardedStateOptimizer]:
    """Collective. Groups in this order, of the parameters that are listed in each name, with these values."""
    model = Layers()
    fully_shard(model)
    groups = [
        {"params": [model.get_parameter(name) for name in names.split()], **values.get(names, {})} for names in order
    ]
    return model, ShardedStateOptimizer(torch.optim.AdamW(groups, lr=0.5), model, vote_timeout=VOTE_TIMEOUT_S)


def step_numbered(model: nn.Module, optimizer: ShardedStateOptimizer) -> None:
    """Collective. One step with numbered gradients."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        param.grad = distribute_tensor(numbered(name, param.shape), param.device_mesh, param.placements)
    optimizer.step()


def whole_moments(model: nn.Module, optimizer: ShardedStateOptimizer) -> dict[str, Any]:
    """Collective. The first moment of each parameter as a list, and each parameter's own group values."""
    found: dict[str, Any] = {}
    for key, value in sorted(optimizer.sharded_state().items()):
        found[key] = value.full_tensor().flatten().tolist() if isinstance(value, DTensor) else value.tolist()
    names = {id(param): name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            found[f"group of {names[id(param)]}"] = {key: value for key, value in group.items() if key != "params"}
    return found


def save_groups_job(path: str, order: Sequence[str], values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Saves."""
    model, optimizer = grouped(order, values)
    step_numbered(model, optimizer)
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    return whole_moments(model, optimizer)


def load_groups_job(path: str, order: Sequence[str], how: str) -> dict[str, Any]:
    """Loads with groups in another order and with other values."""
    model, optimizer = grouped(order, {})
    if how == "path":
        optimizer.prepare_load(path).commit()
    else:
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    return whole_moments(model, optimizer)


def unlike_groups_job(what: str, path: str) -> None:
    """Saves, though ranks group their parameters differently."""
    orders = {
        "order": [["weight", "norm one bias"], ["norm one bias", "weight"]],
        "membership": [["weight norm", "one bias"], ["weight", "norm one bias"]],
        "an empty group": [["weight norm", "one bias"], ["weight norm one bias", ""]],
    }
    model, optimizer = grouped(orders[what][dist.get_rank()], {})
    step_numbered(model, optimizer)
    dcp.save({"optim": optimizer}, checkpoint_id=path)


def stage() -> tuple[nn.Module, ShardedStateOptimizer]:
    """This rank's stage of a pipeline: parameters that no other rank has, with an lr of their own."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    model = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 2 + rank)})
    for name in ("weight", "bias"):
        layer = model[f"layer{rank}"]
        setattr(layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(0)])))
    inner = torch.optim.AdamW(model.parameters(), lr=0.5)
    return model, ShardedStateOptimizer(inner, model, vote_timeout=VOTE_TIMEOUT_S)


def stages_job(path: str, own_keys: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saves and loads both stages in one checkpoint, under keys of their own or one.

    Returns:
        What this rank saved, and what a fresh optimizer of the same stage loaded.
    """
    key = f"optim{dist.get_rank()}" if own_keys else "optim"
    model, optimizer = stage()
    optimizer.param_groups[0]["lr"] = 0.25 + dist.get_rank()
    step_numbered(model, optimizer)
    dcp.save({key: optimizer}, checkpoint_id=path)
    other, fresh = stage()
    dcp.load({key: fresh}, checkpoint_id=path)
    return whole_moments(model, optimizer), whole_moments(other, fresh)


def unlike_targets_job(path: str, what: str, how: str) -> tuple[str, str, list[str], dict[str, Any]]:
    """Loads into optimizers that are not the same on both ranks.

    Returns:
        Type and text of the error, what it changed, and what is held afterwards if there was none.
    """
    options: dict[str, Any] = {"lr": 0.25 * (1 + dist.get_rank())} if what == "lr" else {}
    if what == "options":
        options = {"amsgrad": bool(dist.get_rank())}
    model = Layers()
    fully_shard(model)
    inner = torch.optim.AdamW(model.parameters(), **{"lr": 0.5, **options})
    optimizer = ShardedStateOptimizer(inner, model, vote_timeout=VOTE_TIMEOUT_S)
    if what == "state":
        step_numbered(model, optimizer)
        if dist.get_rank():
            optimizer.state.clear()
    before = snapshot(optimizer, model)
    try:
        if how == "path":
            optimizer.prepare_load(path).commit()
        else:
            dcp.load({"optim": optimizer}, checkpoint_id=path)
    except RankFailureError as error:
        return type(error).__name__, str(error), before.diff(snapshot(optimizer, model)), {}
    return "", "", [], whole_moments(model, optimizer)
