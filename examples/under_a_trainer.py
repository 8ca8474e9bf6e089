"""The wrapper inside of other people's training loops: save on N ranks, resume on M.

    torchrun --standalone --nproc-per-node=2 examples/under_a_trainer.py fabric --ranks 2 --checkpoint out/c
    torchrun --standalone --nproc-per-node=4 examples/under_a_trainer.py fabric --ranks 4 --checkpoint out/c --resume

``accelerate`` is Hugging Face's, with its FSDP2 plugin; ``fabric`` is Lightning Fabric with its ModelParallelStrategy;
``titan`` is a loop as torchtitan's, with several model parts and their optimizers in one container. Lines that differ
from a script without shardopt end in ``# shardopt``. On CPUs over gloo; nothing here was run on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt

STEPS = 6
BATCH = 8
Options = argparse.Namespace


def build() -> nn.Sequential:
    """The same model on every rank, in float64, where a lost piece of state cannot hide in rounding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 16)).double()


def batch_of(step: int) -> Tensor:
    """This rank's part of the step's batch, which depends on the step alone."""
    whole = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def under_accelerate(options: Options) -> Iterator[tuple[int, Tensor, Any]]:
    """Hugging Face accelerate: it shards, accumulates and clips; the wrapper goes inside of its own."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100, cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    # On CPUs accelerate ignores the plugin, without a word, and replicates. On GPUs leave out these lines and cpu=True.
    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, inner)
    optimizer.optimizer = shardopt.ShardedStateOptimizer(optimizer.optimizer, model)  # shardopt
    # Not prepared: accelerate would step it once for each rank.
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    state = {"model": model, "optim": optimizer.optimizer, "scheduler": scheduler}  # shardopt
    for step in steps(options, state):
        for half in (2 * step, 2 * step + 1):
            with accelerator.accumulate(model):
                loss = model(batch_of(half)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        yield step, loss, state


def under_fabric(options: Options) -> Iterator[tuple[int, Tensor, Any]]:
    """Lightning Fabric: it shards through a function of ours, and is given the optimizer afterwards."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for layer in model.children():
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=options.ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=options.ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(build())
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    inner = shardopt.ShardedStateOptimizer(inner, model.module)  # shardopt
    optimizer = fabric.setup_optimizers(inner)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = {"model": model.module, "optim": inner, "scheduler": scheduler}  # shardopt
    for step in steps(options, state):
        loss = model(batch_of(step)).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield step, loss, state


def titan_loop(options: Options) -> Iterator[tuple[int, Tensor, Any]]:
    """A loop as torchtitan's: a container of optimizers and one of schedulers, stateful objects in one dict."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    parts = [model[0], model[2]]
    for part in parts:
        fully_shard(part, mesh=mesh)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
    container = shardopt.ShardedStateOptimizer(optimizers, model)  # shardopt: in place of OptimizersContainer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(container, 0.9)
    state = {"model": model, "optimizer": container, "lr_scheduler": scheduler}
    for step in steps(options, state):
        container.zero_grad()
        loss = model(batch_of(step)).square().mean()
        loss.backward()
        shardopt.clip_grad_norm_(model.parameters(), 0.5)
        container.step()
        scheduler.step()
        yield step, loss, state


LOOPS: dict[str, Callable[[Options], Iterator[tuple[int, Tensor, Any]]]] = {
    "accelerate": under_accelerate,
    "fabric": under_fabric,
    "titan": titan_loop,
}


def steps(options: Options, state: dict[str, Any]) -> range:
    """The steps to take: all of them, or those after the checkpoint's, which is loaded."""
    if not options.resume:
        return range(STEPS)
    dcp.load(state, checkpoint_id=options.checkpoint)
    return range(options.save_at, STEPS)


def numbers(state: dict[str, Any]) -> dict[str, list[float]]:
    """Collective. All weights and moments, whole.

    Raises:
        TypeError: a trainer has not sharded the model.
    """
    optimizer = next(value for value in state.values() if isinstance(value, shardopt.ShardedStateOptimizer))
    found = {**state["model"].state_dict(), **optimizer.sharded_state()}
    if not all(isinstance(value, DTensor) for value in found.values()):
        raise TypeError(f"not sharded: {[key for key, value in found.items() if not isinstance(value, DTensor)]}")
    return {key: value.full_tensor().detach().flatten().tolist() for key, value in found.items()}


def main() -> None:
    """Collective. Trains, and writes what came out to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--save-at", type=int, default=3, metavar="STEP", help="the checkpoint's step (default: 3)")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--ranks", type=int, required=True, help="as --nproc-per-node")
    parser.add_argument("--out", type=Path, help="file for losses, weights and moments, as JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {"losses": {}}
    for step, loss, state in LOOPS[options.loop](options):
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        results["losses"][step] = mean.item() / dist.get_world_size()
        if step + 1 == options.save_at and not options.resume:
            dcp.save(state, checkpoint_id=options.checkpoint)
            results["saved"] = numbers(state)
        results["end"] = numbers(state)
    if dist.get_rank() == 0:
        print(json.dumps(results["losses"]))
        if options.out:
            options.out.write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
