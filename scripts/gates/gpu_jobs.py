"""What the gates of GPUs run, on every rank: the CPU gates' headlines with meshes on CUDA, and what only GPUs show.

    torchrun --standalone --nproc-per-node=N gpu_jobs.py --device cuda --out FILE JOB...

This has run on no GPU, and on no NCCL: its jobs have run on CPU meshes with gloo (tests/ranks/test_gpu_jobs.py), which
tries their logic and nothing of the hardware. It lies in a folder with the tests, whose models it uses, and imports the
installed shardopt. With as many GPUs as ranks CUDA tensors travel by NCCL; with fewer, ranks share a GPU over gloo.

Each job returns if what it claims holds, and raises if not. ``FILE`` gets, for each job that every rank has left, "ok"
or the error of each rank. After a job that failed anywhere none is tried: ranks may be in different collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shardopt
from tests.ranks.topologies import Net

__all__ = ["JOBS", "Place", "main"]

# NCCL waits for ever otherwise; well above the slowest job's start.
_TIMEOUT = timedelta(seconds=180)
_VOTE_S = 60.0
_STEPS = 3

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs.

    Attributes:
        device: type of the meshes' devices, ``"cuda"`` or ``"cpu"``.
        folder: that all ranks see.
        words: a group of all ranks over gloo, by which they tell each other what they have found.
    """

    device: str
    folder: str
    words: dist.ProcessGroup

    @property
    def world(self) -> DeviceMesh:
        """All ranks in a row."""
        return init_device_mesh(self.device, (dist.get_world_size(),))

    def agree(self, problem: str) -> None:
        """Collective. Raises on every rank if one has found a problem: alone it would leave the others waiting."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, problem, group=self.words)
        if any(found):
            raise AssertionError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text))


def _adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.125, amsgrad=True, foreach=True)


def _adafactor(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.125, foreach=False)


def _net(place: Place, mesh: DeviceMesh | None) -> Net:
    model = Net().to(place.device)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model


def _wrap(model: nn.Module, make: Make, **options: Any) -> shardopt.ShardedStateOptimizer:
    return shardopt.ShardedStateOptimizer(make(list(model.parameters())), model, vote_timeout=_VOTE_S, **options)


def _give_gradients(model: nn.Module, step: int) -> None:
    """The same whole gradients on every mesh, of which a rank gets its part."""
    source = torch.Generator().manual_seed(1000 + step)
    for param in model.parameters():
        whole = torch.randn(param.shape, generator=source).to(param.device)
        placed = isinstance(param, DTensor)
        param.grad = distribute_tensor(whole, param.device_mesh, param.placements) if placed else whole


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        _give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(param) for name, param in model.named_parameters()}


def _state(optimizer: shardopt.ShardedStateOptimizer) -> dict[str, Tensor]:
    return {name: _whole(value) for name, value in optimizer.sharded_state().items()}


def _local(model: nn.Module, optimizer: shardopt.ShardedStateOptimizer) -> dict[str, bytes]:
    """This rank's bytes of weights and state."""
    held: dict[str, Any] = {}
    for name, param in model.named_parameters():
        held[name] = param
        held.update((f"{name}/{entry}", value) for entry, value in (optimizer.state.get(param) or {}).items())
    return {name: _bytes(value) for name, value in held.items() if isinstance(value, Tensor)}


def _bytes(value: Tensor) -> bytes:
    part = value.to_local() if isinstance(value, DTensor) else value
    return part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _check_bits(place: Place, what: str, got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    different = [name for name in wanted if name not in got or not _same(got[name], wanted[name])]
    problem = ""
    if got.keys() != wanted.keys() or not wanted:
        problem = f"{what}: has {sorted(got)}; expected {sorted(wanted)}"
    elif different:
        problem = f"{what}: {len(different)} of {len(wanted)} differ: {', '.join(different[:5])}"
    place.agree(problem)


def _same(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.dtype, _bytes(left)) == (right.shape, right.dtype, _bytes(right))


def _load_elsewhere(place: Place, path: str, mesh: DeviceMesh, saved: dict[str, Tensor]) -> None:
    model = _net(place, mesh)
    optimizer = _wrap(model, _adamw)
    group = mesh.get_group() if mesh.ndim == 1 else None
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=path, process_group=group)
    _check_bits(place, f"state loaded on {mesh}", _state(optimizer), saved)


def resume(place: Place) -> None:
    """What stock DCP saves on all ranks loads bit for bit on all, on half of them, and on a grid of them."""
    model = _net(place, place.world)
    optimizer = _wrap(model, _adamw)
    _train(model, optimizer, range(_STEPS))
    path = os.path.join(place.folder, "resume")
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    saved = _state(optimizer)
    half = dist.get_world_size() // 2
    grid = init_device_mesh(place.device, (2, half), mesh_dim_names=("replicate", "shard"))
    for mesh in (place.world, grid["shard"], grid):
        _load_elsewhere(place, path, mesh, saved)


def presentations(place: Place) -> None:
    """Every presentation ends with the weights of an unsharded run on the same device, bit for bit."""
    for make, compute in ((_adamw, "local"), (_adafactor, "owner"), (_adafactor, "replicated")):
        plain, model = _net(place, None), _net(place, place.world)
        _train(plain, make(list(plain.parameters())), range(_STEPS))
        _train(model, _wrap(model, make, compute=compute), range(_STEPS))
        _check_bits(place, f"weights with compute={compute!r}", _weights(model), _weights(plain))


def zero_size(place: Place) -> None:
    """Ranks that hold nothing of any parameter take part in exchanges of nothing, and the update is right."""

    def build(mesh: DeviceMesh | None) -> nn.Linear:
        torch.manual_seed(0)
        model = nn.Linear(8, 1, device=place.device)  # one row: the first rank's
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        return model

    plain, model = build(None), build(place.world)
    optimizer = _wrap(model, _adafactor, compute="owner")
    held = [param.to_local().numel() for param in model.parameters() if isinstance(param, DTensor)]
    place.agree(f"holds {held} elements, and was meant to hold none" if dist.get_rank() and any(held) else "")
    _train(plain, _adafactor(list(plain.parameters())), range(_STEPS))
    _train(model, optimizer, range(_STEPS))
    _check_bits(place, "weights", _weights(model), _weights(plain))
    path = os.path.join(place.folder, "zero_size")
    shardopt.save({"optim": optimizer}, path, timeout_s=_VOTE_S)
    shardopt.load({"optim": _wrap(model, _adafactor, compute="owner")}, path, timeout_s=_VOTE_S)


def failure(place: Place) -> None:
    """One rank's failure is every rank's error; nothing has changed, and the ranks go on."""
    model = _net(place, place.world)
    optimizer = _wrap(model, _adamw)
    _train(model, optimizer, range(1))
    before = _local(model, optimizer)
    last = dist.get_world_size() - 1

    def hook(*_: Any) -> None:
        if dist.get_rank() == last:
            raise ArithmeticError("on purpose")

    handle = optimizer.register_step_pre_hook(hook)
    said = ""
    try:
        _train(model, optimizer, range(1, 2))
    except (ArithmeticError, shardopt.RankFailureError) as error:
        said = str(error)
    handle.remove()
    named = "on purpose" in said and (dist.get_rank() == last or f"rank {last}" in said)
    place.agree("" if named else f"the error was {said!r}; expected one that names rank {last} and its cause")
    place.agree("" if _local(model, optimizer) == before else "weights or state have changed")
    _train(model, optimizer, range(1, 2))
    still = _local(model, optimizer) == before and any(param.to_local().numel() for param in model.parameters())
    place.agree("the step after the failure did nothing" if still else "")


def gradients(place: Place) -> None:
    """One norm and one decision on an overflow on all ranks."""
    plain, model = _net(place, None), _net(place, place.world)
    for one in (plain, model):
        _give_gradients(one, 0)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    norm = shardopt.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm.cpu(), wanted.cpu())
    optimizer, scaler = _wrap(model, _adamw), shardopt.GradScaler(place.device, init_scale=4.0)
    scaler.scale(torch.zeros((), device=place.device))  # as a loss would: the scale is made with the first one
    before = _weights(model)
    _give_gradients(model, 0)
    last = dist.get_world_size() - 1
    for param in model.parameters():
        if dist.get_rank() == last and isinstance(param.grad, DTensor) and param.grad.to_local().numel():
            param.grad.to_local().view(-1)[0] = float("inf")
            break
    scaler.step(optimizer)
    scaler.update()
    _check_bits(place, "weights after an overflow on one rank", _weights(model), before)
    scale = scaler.get_scale()
    place.agree("" if scale == 2.0 else f"the scale is {scale} after an overflow at 4.0; expected 2.0")


def quantised(place: Place) -> None:
    """8-bit state of bitsandbytes comes back on the same ranks, code for code."""
    import bitsandbytes as bnb

    def build() -> tuple[nn.Linear, shardopt.ShardedStateOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(256, 256, bias=False, device=place.device)
        fully_shard(model, mesh=place.world)
        return model, _wrap(model, lambda params: bnb.optim.AdamW8bit(params, lr=0.125), compute="local")

    model, optimizer = build()
    _train(model, optimizer, range(_STEPS))
    path = os.path.join(place.folder, "quantised")
    shardopt.save({"model": model, "optim": optimizer}, path, timeout_s=_VOTE_S)
    other, loaded = build()
    shardopt.load({"model": other, "optim": loaded}, path, timeout_s=_VOTE_S)
    place.agree("" if _local(other, loaded) == _local(model, optimizer) else "codes or scales differ after the load")


def pinning(place: Place) -> None:
    """Moments of parameters that FSDP keeps on the host are pinned, and the step is that of one process."""
    mesh = place.world
    torch.manual_seed(0)
    plain = nn.Linear(64, 48)
    model = nn.Linear(64, 48)
    model.load_state_dict(plain.state_dict())
    if place.device == "cuda":
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    else:
        fully_shard(model, mesh=mesh)
    # Left to itself it pins what is copied to a device, which nothing is here.
    optimizer = shardopt.SwapAdamW(model.parameters(), lr=0.125, pin_memory=place.device == "cuda")
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(place.device)
    model(batch).square().mean().backward()
    there = {mine.device.type for mine in model.parameters()}
    place.agree("" if there == {"cpu"} else f"parameters are on {there}; CPUOffloadPolicy keeps them on the host")
    for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        # FSDP sums up on the device; the host's copy has its own placement's mesh, which full_tensor needs.
        param.grad = _whole(DTensor.from_local(mine.grad.to_local().to(place.device), mesh, mine.grad.placements))
    loose = [
        name
        for entries in optimizer.state.values()
        for name, value in entries.items()
        if name != "step" and not (value.to_local() if isinstance(value, DTensor) else value).is_pinned()
    ]
    place.agree(f"not pinned: {', '.join(sorted(set(loose)))}" if loose and place.device == "cuda" else "")
    optimizer.step()
    shardopt.SwapAdamW(plain.parameters(), lr=0.125).step()
    pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
    own = [
        distribute_tensor(one.detach().to(place.device), mesh, mine.placements).to_local().cpu() for one, mine in pairs
    ]
    same = all(torch.equal(one, mine.detach().to_local().cpu()) for one, (_, mine) in zip(own, pairs, strict=True))
    place.agree("" if same else "weights differ from one process's")


def streaming(place: Place) -> None:
    """SwapAdamW of parameters on the device gives the bits of one on the host, and a step of it allocates nothing."""
    kinds: list[dict[str, Any]] = [{}, {"amsgrad": True, "maximize": True}, {"moment_dtype": torch.bfloat16, "seed": 7}]
    for options in kinds:
        model, twin = _net(place, place.world), _net(replace(place, device="cpu"), None)
        optimizer = shardopt.SwapAdamW(model.parameters(), lr=0.125, chunk_bytes=16 << 10, **options)
        other = shardopt.SwapAdamW(twin.parameters(), lr=0.125, **options)
        for step in range(_STEPS):
            _give_gradients(model, step)
            _give_gradients(twin, step)
            before = torch.cuda.memory_stats().get("allocation.all.allocated")
            optimizer.step()
            other.step()
            allocated = torch.cuda.memory_stats().get("allocation.all.allocated") != before
            place.agree(f"{options}: a step has allocated device memory" if step and allocated else "")
        _check_bits(place, f"{options}", _weights(model), _weights(twin))


JOBS: dict[str, Callable[[Place], None]] = {
    job.__name__: job for job in (resume, presentations, zero_size, failure, gradients, quantised, pinning, streaming)
}


def _said(job: Callable[[Place], None], place: Place) -> str:
    # What a rank raises has to reach the others, whatever it is: torch's own failures are BaseExceptions.
    try:
        job(place)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        said = f"{type(error).__name__}: {error}"[:2000]
        # At once: the others may be in a collective that this rank has left, and end without a word of it.
        print(f"rank {dist.get_rank()}: {job.__name__}: {said}", file=sys.stderr, flush=True)
        return said
    return "ok"


def run(names: Sequence[str], place: Place, out: Path) -> bool:
    """Runs the jobs in order, until one has failed; whether all have ended well.

    Args:
        names: of jobs.
        place: this rank's.
        out: written by the first rank, after each job.
    """
    done: dict[str, list[str]] = {}
    device = torch.cuda.get_device_name() if place.device == "cuda" else ""
    for name in names:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, _said(JOBS[name], place), group=place.words)
        done[name] = said
        if dist.get_rank() == 0:
            out.write_text(json.dumps({"gpu": device, "jobs": done}), encoding="utf-8")
        if any(text != "ok" for text in said):
            return False
    return True


def main() -> int:
    """As torchrun starts it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", choices=sorted(JOBS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    backend = "gloo"
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} shows no GPU to this process; install its CUDA build.")
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        if gpus >= int(os.environ["WORLD_SIZE"]):
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=_TIMEOUT)
    words = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared, src=0, group=words)
        passed = run(options.jobs, Place(device=options.device, folder=shared[0], words=words), options.out)
        dist.barrier(group=words)
    # A rank that is lost cannot be waited for; what it was to say is missing from the results.
    with suppress(RuntimeError):
        dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
