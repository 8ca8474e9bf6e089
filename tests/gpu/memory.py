"""Memory: of the device what the ring asks for, of the host what is pinned, once; and a step that asks for none."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardopt.swap.backend import CudaBackend, Stream
from shardopt.swap.slabs import Slabs
from tests.gpu.checks import Figure, check
from tests.gpu.engine import BUDGETS, Pair
from tests.gpu.target import Target

# What torch's allocator rounds up to.
_ROUNDING = 512
_COPY_BYTES = 256 << 20


def _one(target: Target) -> nn.Parameter:
    """A parameter whose state is many times the ring."""
    numel = 1 << (18 if target.is_dry else 26)
    param = nn.Parameter(torch.ones(numel, device=target.device))
    param.grad = torch.ones(numel, device=target.device)
    return param


def _chunk_bytes(target: Target) -> int:
    return (64 << 10) if target.is_dry else (16 << 20)


@check("memory: the device holds the ring and nothing more, and lets go of it (F11)")
def ring_alone(target: Target) -> Figure:
    param = _one(target)
    target.forget_peak()
    before = target.memory()
    optimizer = target.optimizer([param], chunk_bytes=_chunk_bytes(target))
    for _ in range(4):
        optimizer.step()
    target.finish()
    after, ring = target.memory(), optimizer._engine.device_bytes  # type: ignore[attr-defined]
    asked = after.peak - before.now
    assert asked <= 1.01 * ring + 8 * _ROUNDING, f"a step took {asked} bytes of device memory, the ring has {ring}"
    state = sum(one.nbytes for one in optimizer.state[param].values())
    assert ring < state / 4
    del optimizer
    if not target.is_dry:
        target.finish()
        left = target.memory().now - before.now
        assert left <= 0, f"{left} bytes of device memory outlive the optimizer"
    return {"peak over before": asked, "ring": ring, "state on the host": state}


@check("memory: a run that has loaded needs no more of the device than a fresh one (F1, F2)")
def resumed(target: Target) -> Figure:
    param = _one(target)
    saved = _trained(target, param).state_dict()
    saved = {**saved, "state": {0: {name: one.clone() for name, one in saved["state"][0].items()}}}
    found = {}
    for name, load in (("fresh", None), ("resumed", saved)):
        target.forget()
        target.forget_peak()
        before = target.memory()
        optimizer = target.optimizer([param], chunk_bytes=_chunk_bytes(target))
        if load is not None:
            optimizer.load_state_dict(load)
        optimizer.step()
        target.finish()
        found[name] = target.memory().peak - before.now
        del optimizer
    assert found["resumed"] <= found["fresh"], found
    return found


def _trained(target: Target, param: nn.Parameter) -> Any:
    optimizer = target.optimizer([param], chunk_bytes=_chunk_bytes(target))
    for _ in range(2):
        optimizer.step()
    return optimizer


@check("steady: a step allocates nothing and lets the host wait for nothing, with a scaler's numbers and without")
def steady(target: Target) -> Figure:
    for budget in BUDGETS:
        for scaled in (False, True):
            pair = Pair(target, budget=budget, eagerness=1.0)
            numbers = [torch.tensor(value, device=target.device) for value in (512.0, 0.0)]
            for number in range(8):
                pair.give(number)
                if scaled:
                    pair.there.grad_scale, pair.there.found_inf = numbers  # type: ignore[attr-defined]
                target.seconds(lambda: None)
                before = target.memory().requests
                with target.nothing_waits():
                    pair.there.step()
                asked = target.memory().requests - before
                # The first steps compile, and make events.
                assert asked == 0 or number < 3, f"step {number} has asked for device memory {asked} times"
    return {"budgets": len(BUDGETS)}


@check("pinning: slabs are registered, once each, and without a warning (F9)", needs_gpu=True)
def pinned(target: Target) -> Figure:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = Pair(target, "fp32 masters")
    entries = [one for state in pair.there.state.values() for name, one in state.items() if name != "step"]
    pageable = [one.shape for one in entries if one.numel() and not one.is_pinned()]
    assert not pageable, f"state of shapes {pageable} is not pinned"
    return {"tensors": len(entries)}


@check("pinning: memory that is registered already is a warning, and no error of the next kernel (F8)", needs_gpu=True)
def registered_twice(target: Target) -> Figure:
    slabs = Slabs(pin=True, device=target.device)
    (region,) = slabs.regions([(1 << 20, torch.float32)])
    assert region.mapping is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slabs._register(region.mapping, 4 << 20)
    assert [one.category for one in caught] == [RuntimeWarning], [str(one.message) for one in caught]
    assert torch.ones(5, device=target.device).sum().item() == 5
    return {"warning": str(caught[0].message)}


@check("pinning: copies return before they are done, and run both ways at once", needs_gpu=True)
def overlap(target: Target) -> Figure:
    backend = CudaBackend(target.device)
    up, down = Slabs(pin=True, device=target.device).make([(_COPY_BYTES // 4, torch.float32)] * 2)
    there = [torch.empty(_COPY_BYTES // 4, device=target.device) for _ in range(2)]
    uploads = lambda: backend.copy(there[0], up, Stream.UPLOAD)  # noqa: E731
    downloads = lambda: backend.copy(down, there[1], Stream.DOWNLOAD)  # noqa: E731
    both = lambda: (uploads(), downloads())  # noqa: E731
    times = {
        name: min(target.seconds(work) for _ in range(3))
        for name, work in (("up", uploads), ("down", downloads), ("both", both))
    }
    enqueued = min(_enqueued(target, both) for _ in range(3))
    ratio = times["both"] / (times["up"] + times["down"])
    figure = {
        "GB/s up": _COPY_BYTES / times["up"] / 1e9,
        "GB/s down": _COPY_BYTES / times["down"] / 1e9,
        "both over the sum": ratio,
        "milliseconds to ask for both": 1e3 * enqueued,
    }
    assert enqueued < 0.25 * times["both"], f"the host waits for copies: {figure}"
    assert ratio < 0.85, f"copies run one after the other: {figure}"
    return figure


def _enqueued(target: Target, work: Callable[[], object]) -> float:
    target.finish()
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    target.finish()
    return seconds


@check("memory: state that is dropped with copies in flight is written by none of them")
def dropped(target: Target) -> Figure:
    kept: list[Tensor] = []
    for number in range(4):
        pair = Pair(target)
        pair.give(number)
        target.delay(pair.there, Stream.DOWNLOAD)
        pair.there.step()
        if target.is_dry:
            target.finish()
        del pair
        # Memory of that size comes from where the slab was.
        kept.append(torch.full((1 << 16,), 3.0))
    target.finish()
    assert all(bool((one == 3.0).all()) for one in kept)
    return {}
