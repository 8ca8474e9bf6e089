"""SwapAdamW on ranks: trained, saved, resharded, clipped, failing. Run by the rank pool."""

from __future__ import annotations

import gc
import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardopt
from shardopt import ShardedStateOptimizer, SwapAdamW
from shardopt.swap import host_engine
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import Shape, SmallModel, Topology, backward, build, local_tensor, set_gradients

BF16 = torch.bfloat16

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "bf16 moments": {"moment_dtype": BF16, "amsgrad": True, "seed": 7},
    "bf16": {"dtype": BF16},
    "fp32 masters": {"dtype": BF16, "master": "fp32", "moment_dtype": BF16},
    "remainders": {"dtype": BF16, "master": "remainder16"},
}

IDLE = "heads.1.bias"


def make(topology: Topology, kind: str, *, seed: int = 0, wrapped: bool = True) -> tuple[SmallModel, Any]:
    """A model and its optimizer, of two groups."""
    options = dict(OPTIONS[kind])
    model = build(topology, Shape(dtype=options.pop("dtype", torch.float32)), seed=seed)
    return model, finish(model, SwapAdamW(grouped(model), lr=0.05, **options), wrapped)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    biases = [param for name, param in named.items() if name.endswith("bias")]
    return [
        {"params": [param for name, param in named.items() if not name.endswith("bias")]},
        {"params": biases, "lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.0},
    ]


def finish(model: nn.Module, inner: torch.optim.Optimizer, wrapped: bool) -> Any:
    return ShardedStateOptimizer(inner, model) if wrapped else inner


def train(model: SmallModel, optimizer: Any, steps: int, *, first: int = 0) -> None:
    """One parameter has no gradient in every other step."""
    for step in range(first, first + steps):
        set_gradients(model, step, without=(IDLE,) if step % 2 else ())
        optimizer.step()


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Collective: weights and state, whole."""
    held = gathered(optimizer, model)
    return {**{f"param.{key}": value for key, value in gathered_parameters(model).items()}, **held}


def places(optimizer: Any) -> list[int]:
    """Where the state's memory is."""
    inner = optimizer.optimizers[0] if isinstance(optimizer, ShardedStateOptimizer) else optimizer
    return [
        local_tensor(inner.state[param][name]).data_ptr()
        for group in inner.param_groups
        for param in group["params"]
        for name in sorted(inner.state[param])
    ]


def train_job(topology: Topology, kind: str, wrapped: bool, level: str, threads: int) -> dict[str, Any]:
    """Five steps at an ISA level."""
    before = os.environ.get("SHARDOPT_CPU_ISA")
    os.environ["SHARDOPT_CPU_ISA"] = level
    try:
        model, optimizer = make(topology, kind, wrapped=wrapped)
        inner = optimizer.optimizers[0] if wrapped else optimizer
        inner._engine.num_threads = threads
        train(model, optimizer, 5)
        return everything(model, optimizer)
    finally:
        if before is None:
            del os.environ["SHARDOPT_CPU_ISA"]
        else:
            os.environ["SHARDOPT_CPU_ISA"] = before


def cut_job(dims: list[int], reverse: bool) -> list[Tensor]:
    """Parameters cut along other dims than the first, in memory of another order; whole after four steps."""
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params: list[nn.Parameter] = []
    for number, dim in enumerate(dims):
        whole = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(number))
        # distribute_tensor makes shards contiguous; the other order is made after it.
        shard = distribute_tensor(whole, mesh, [Shard(dim)])
        if reverse:
            local = shard.to_local().permute(2, 1, 0).contiguous().permute(2, 1, 0)
            shard = DTensor.from_local(
                local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        params.append(nn.Parameter(shard))
    optimizer = SwapAdamW(params, lr=0.1, moment_dtype=BF16)
    for step in range(4):
        for number, (param, dim) in enumerate(zip(params, dims, strict=True)):
            whole = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(100 * step + number))
            param.grad = distribute_tensor(whole, mesh, [Shard(dim)])
        optimizer.step()
    tensors = [*params, *(optimizer.state[param][name] for param in params for name in ("exp_avg", "exp_avg_sq"))]
    return [tensor.detach().full_tensor().contiguous() for tensor in tensors]


def save_job(topology: Topology, kind: str, directory: str, rule: str) -> dict[str, Any]:
    """Trains three steps, saves ten times over; what there was, and that saving has moved nothing."""
    model, optimizer = trained(topology, kind, rule)
    before, size = places(optimizer), optimizer.optimizers[0].slab_bytes if rule == "swap" else 0
    for number in range(2):
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=os.path.join(directory, f"save {number}"))
    assert places(optimizer) == before
    assert rule != "swap" or optimizer.optimizers[0].slab_bytes == size
    return everything(model, optimizer)


def trained(topology: Topology, kind: str, rule: str) -> tuple[SmallModel, Any]:
    if rule == "swap":
        model, optimizer = make(topology, kind)
    else:
        model, optimizer = torchs(topology, kind)
    train(model, optimizer, 3)
    return model, optimizer


def torchs(topology: Topology, kind: str, *, seed: int = 0) -> tuple[SmallModel, ShardedStateOptimizer]:
    """The same with torch's AdamW."""
    model = build(topology, seed=seed)
    return model, ShardedStateOptimizer(torch.optim.AdamW(grouped(model), lr=0.05, **OPTIONS[kind]), model)


def move_job(topology: Topology, kind: str, source: str, target: str, rule: str, how: str) -> dict[str, Any]:
    """Loads into a fresh optimizer (or one that has stepped), and saves what is there."""
    model, optimizer = make(topology, kind, seed=3) if rule == "swap" else torchs(topology, kind, seed=3)
    if how == "warm":
        train(model, optimizer, 1, first=9)
    before = places(optimizer) if rule == "swap" else []
    if how == "path":
        dcp.load({"model": model}, checkpoint_id=source)
        optimizer.prepare_load(source).commit()
    elif how == "shardopt":
        shardopt.load({"model": model, "optim": optimizer}, source)
    else:
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=source)
    assert rule != "swap" or places(optimizer) == before
    found = everything(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=target)
    return found


def resume_job(topology: Topology, kind: str, source: str, steps: int) -> dict[str, Any]:
    """Loads into a fresh optimizer and trains on."""
    model, optimizer = make(topology, kind, seed=3)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=source)
    train(model, optimizer, steps, first=3)
    return everything(model, optimizer)


def model_only_job(kind: str, source: str) -> dict[str, Any]:
    """Weights are loaded alone into a run that has masters of others; a step that changes nothing by itself."""
    model, optimizer = make("fsdp", kind, seed=3)
    train(model, optimizer, 2)
    dcp.load({"model": model}, checkpoint_id=source)
    loaded = gathered_parameters(model)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for param, entries in optimizer.state.items():
        local_tensor(entries["exp_avg"]).zero_()
        param.grad = torch.zeros_like(param, requires_grad=False)
    optimizer.step()
    return {key: (value, loaded[key]) for key, value in gathered_parameters(model).items()}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def offload_job(accumulate: int, how: str) -> dict[str, Any]:
    """FSDP2 with parameters on the host; several backward passes to a step; a clip folded into it."""
    model = _Net()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer: Any = SwapAdamW(model.parameters(), lr=0.05)
    clip = optimizer.clip_grad_norm_
    if how == "wrapped":
        optimizer = ShardedStateOptimizer(optimizer, model)
    norms: list[float] = []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(accumulate):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + number))
            model(inputs).square().mean().backward()
        if how == "clipped":
            norms.append(clip(0.05).item())
        optimizer.step()
    return {**gathered_parameters(model), "norms": norms}


def clip_job(topology: Topology) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Norms by the kernel and by the package's own clip, and what steps with both have made."""
    model, optimizer = make(topology, "plain", wrapped=False)
    twin, other = make(topology, "plain", wrapped=False)
    norms: list[float] = []
    for step in range(3):
        for one in (model, twin):
            set_gradients(one, step, without=(IDLE,) if step % 2 else ())
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        norms.append(shardopt.clip_grad_norm_(other, 0.5).item())
        optimizer.step()
        other.step()
    return norms, everything(model, optimizer), everything(twin, other)


def clip_refusal_job() -> tuple[str, bool]:
    """On rank 1 a gradient cannot be counted; what every rank says, and whether a clip waits there."""
    model, optimizer = make("fsdp", "plain", wrapped=False)
    set_gradients(model, 0)
    optimizer.clip_grad_norm_(1.0)
    if dist.get_rank() == 1:
        model.scale.grad = None
        model.scale.grad = torch.ones(model.scale.shape)
    try:
        optimizer.clip_grad_norm_(1.0)
    except shardopt.RankFailureError as error:
        return str(error), optimizer._engine.clip is not None
    return "nothing", False


def bad_gradient_job() -> tuple[str, str, bool, bool]:
    """On rank 1 a gradient is a plain tensor; what every rank raises, whether anything moved, whether it steps on."""
    model, optimizer = make("fsdp", "plain")
    train(model, optimizer, 2)
    before = everything(model, optimizer)
    set_gradients(model, 2)
    if dist.get_rank() == 1:
        optimizer.optimizers[0].look = lambda: _raise(shardopt.PresentationError("scale: the gradient is bad"))
    try:
        optimizer.step()
        raised = ("nothing", "")
    except shardopt.ShardoptError as error:
        raised = (type(error).__name__, str(error))
    if dist.get_rank() == 1:
        del optimizer.optimizers[0].look
    same = unequal(before, everything(model, optimizer)) == []
    optimizer.step()
    return (*raised, same, unequal(before, everything(model, optimizer)) != [])


def _raise(error: Exception) -> Any:
    raise error


def unequal(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Keys of values that differ in any bit."""
    return [
        key
        for key in sorted({*left, *right})
        if key not in left or key not in right or not _equal(left[key], right[key])
    ]


def _equal(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor):
        return bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def kernel_failure_job(directory: str, failure: type[Exception]) -> list[tuple[str, str]]:
    """The kernel fails on rank 1, where others step; steps and saves are refused, and a load mends it."""
    model, optimizer = make("fsdp", "plain")
    train(model, optimizer, 2)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=directory)
    set_gradients(model, 2)
    genuine = host_engine.adamw_rows
    if dist.get_rank() == 1:
        host_engine.adamw_rows = lambda *args, **options: _raise(failure("half way"))  # type: ignore[assignment]
    found: list[tuple[str, str]] = []
    try:
        for attempt in (
            optimizer.step,
            optimizer.step,
            lambda: dcp.save({"optim": optimizer}, checkpoint_id=directory + " again"),
        ):
            try:
                attempt()
                found.append(("nothing", ""))
            # CheckpointException is a BaseException.
            except BaseException as error:
                found.append((type(error).__name__, str(error)))
            host_engine.adamw_rows = genuine
    finally:
        host_engine.adamw_rows = genuine
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=directory)
    train(model, optimizer, 1, first=2)
    return found


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def soak_job() -> tuple[list[str], int]:
    """Operations that a step dispatches, and by how many objects 50 steps grow the heap."""
    model, optimizer = make("fsdp", "plain", wrapped=False)
    train(model, optimizer, 3)
    with _Ops() as ops:
        optimizer.step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        optimizer.step()
    gc.collect()
    # Opened around every step of any torch optimizer.
    return [name for name in sorted(ops.seen) if "profiler" not in name], len(gc.get_objects()) - before


def partial_job(bad: int) -> tuple[str, list[float]]:
    """A replicated parameter whose gradient arrives as halves of a sum; on rank ``bad`` it arrives whole."""
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    model.scale = nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Replicate()]))
    optimizer = ShardedStateOptimizer(SwapAdamW(model.parameters(), lr=0.1), model)
    half = torch.arange(5.0) / 2
    whole = dist.get_rank() == bad
    model.scale.grad = DTensor.from_local(
        half * 2 if whole else half, mesh, [Replicate() if whole else Partial()], run_check=False
    )
    text = ""
    try:
        optimizer.step()
    except shardopt.RankFailureError as error:
        text = str(error)
    (entries,) = optimizer.state.values()
    return text, entries["exp_avg"].to_local().tolist()


def seeds_job() -> str:
    """Ranks that differ in the seed."""
    model = build("fsdp")
    try:
        ShardedStateOptimizer(SwapAdamW(model.parameters(), seed=dist.get_rank(), moment_dtype=BF16), model)
    except shardopt.RankFailureError as error:
        return str(error)
    return "nothing"


def backward_job(topology: Topology) -> dict[str, Any]:
    """Trained by FSDP2's own gradients."""
    model, optimizer = make(topology, "bf16 moments")
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer)
