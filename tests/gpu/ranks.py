"""Two ranks that share the GPU: trained under FSDP2, saved and loaded by stock DCP; the bits of one rank on a host."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardopt import ShardedStateOptimizer, SwapAdamW
from shardopt.torch_compat import local_box, local_shard
from tests.gpu.checks import Figure, check
from tests.gpu.target import CudaTarget, Target, same_bits

_TIMEOUT = timedelta(seconds=60)
_WORLD_SIZE = 2
_STEPS = 6
_OPTIONS: dict[str, Any] = {"lr": 0.05, "amsgrad": True}


class Model(nn.Module):
    """Of odd sizes: the second rank has less of each, and of one parameter nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(33, 65)
        self.second = nn.Linear(65, 1)

    def fill(self) -> Model:
        """Weights that hang on their names alone."""
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(_drawn(name, tuple(param.shape)))
        return self


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def _part(param: Any, whole: Tensor) -> Tensor:
    """This rank's part of a tensor of the parameter's shape."""
    offset, size = local_box(param)
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        for name, param in model.named_parameters():
            whole = _drawn(f"{name} {step}", tuple(param.shape))
            param.grad = torch.zeros_like(param)
            if isinstance(param, DTensor):
                local_shard(param.grad).copy_(_part(param, whole))
            else:
                param.grad.copy_(whole)
        optimizer.step()


def _sharded(target: Target, *, budget: int) -> tuple[nn.Module, Any, SwapAdamW]:
    mesh = init_device_mesh(target.device.type, (_WORLD_SIZE,))
    model = Model().fill().to(target.device)
    fully_shard(model, mesh=mesh)
    inner = target.optimizer(model.parameters(), device_budget_bytes=budget, **_OPTIONS)
    return model, ShardedStateOptimizer(inner, model), inner


def _reference() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and state of an unsharded run on the host."""
    model = Model().fill()
    optimizer = SwapAdamW(model.parameters(), **_OPTIONS)
    _train(model, optimizer, range(_STEPS))
    named = dict(model.named_parameters())
    return named, {name: dict(optimizer.state[param]) for name, param in named.items()}


def _compare(target: Target, model: nn.Module, inner: SwapAdamW) -> None:
    weights, state = _reference()
    for name, param in model.named_parameters():
        for entry, wanted in state[name].items():
            found = inner.state[param][entry]
            if entry != "step":
                assert local_shard(found).device.type == "cpu", f"{name}.{entry} is on {local_shard(found).device}"
                found, wanted = local_shard(found), _part(param, wanted)
            assert same_bits(found, wanted), f"{name}.{entry} differs from the unsharded run's"
    target.finish()
    for name, param in model.named_parameters():
        assert same_bits(local_shard(param), _part(param, weights[name])), f"{name} differs from the unsharded run's"


def _as_rank(*args: Any) -> dict[str, Any]:
    try:
        return _run(*args)
    except Exception:  # not all of them can be sent to another process
        raise RuntimeError(traceback.format_exc()) from None


def _run(rank: int, port: int, folder: str, is_dry: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    target = Target() if is_dry else CudaTarget()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    backends = "gloo" if is_dry else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=_WORLD_SIZE, timeout=_TIMEOUT)
    try:
        model, optimizer, inner = _sharded(target, budget=0)
        _train(model, optimizer, range(_STEPS // 2))
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder)
        _train(model, optimizer, range(_STEPS // 2, _STEPS))
        _compare(target, model, inner)
        again, resumed, inner = _sharded(target, budget=20_000)
        before = target.memory()
        dcp.load({"model": again, "optim": resumed}, checkpoint_id=folder)
        after = target.memory()
        _train(again, resumed, range(_STEPS // 2, _STEPS))
        _compare(target, again, inner)
        return {"load took of the device": after.now - before.now}
    finally:
        dist.destroy_process_group()


@check("ranks: 2 share the device under fully_shard; dcp.save, dcp.load and further steps give an unsharded run's bits")
def share(target: Target) -> Figure:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(_WORLD_SIZE, mp_context=context) as pool:
        futures = [pool.submit(_as_rank, rank, store.port, folder, target.is_dry) for rank in range(_WORLD_SIZE)]
        found = [future.result(timeout=2 * _TIMEOUT.total_seconds()) for future in futures]
    return {"ranks": _WORLD_SIZE, "load took of the device": [one["load took of the device"] for one in found]}
