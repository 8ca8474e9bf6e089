"""SwapAdamW on the device against SwapAdamW on the host: the same bits, whatever happens between steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardopt import SwapAdamW
from shardopt.swap.backend import Stream
from tests.gpu.checks import Figure, check
from tests.gpu.target import Target, same_bits

BF16 = torch.bfloat16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "bf16 moments": {"moment_dtype": BF16, "amsgrad": True, "seed": 7},
    "bf16": {"dtype": BF16},
    "fp32 masters": {"dtype": BF16, "master": "fp32", "moment_dtype": BF16},
    "remainders": {"dtype": BF16, "master": "remainder16"},
}
# A scalar's worth, a few, one that several chunks share, one in several chunks, none.
SHAPES = [(7,), (64, 33), (5000,), (3, 1), (0, 4), (33, 100), (1,)]
# Bytes of chunks that stay on the device: none, some, all.
BUDGETS = (0, 40_000, 1 << 30)


class Pair:
    """An optimizer on the device, and its twin on the host, over the same numbers."""

    def __init__(self, target: Target, kind: str = "plain", *, budget: int = 0, eagerness: float | None = None) -> None:
        given = {"lr": 0.05, **KINDS[kind]}
        dtype = given.pop("dtype", torch.float32)
        self.target = target
        self.twins = [nn.Parameter(_drawn(shape, place, dtype)) for place, shape in enumerate(SHAPES)]
        self.params = [nn.Parameter(twin.detach().to(target.device, copy=True)) for twin in self.twins]
        self.there = target.optimizer(grouped(self.params), device_budget_bytes=budget, eagerness=eagerness, **given)
        self.here = SwapAdamW(grouped(self.twins), **given)

    def give(self, number: int, *, without: Sequence[int] = ()) -> None:
        """Gradients of a step."""
        for place, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            grad = None if place in without else _drawn(twin.shape, 1000 * number + place, twin.dtype)
            twin.grad = grad
            param.grad = None if grad is None else grad.to(self.target.device, copy=True)

    def step(self, number: int) -> None:
        """One step of both, of all parameters but one."""
        self.give(number, without=(number % len(SHAPES),))
        self.there.step()
        self.here.step()

    def compare(self) -> None:
        """State, then weights: reading the state waits for the device."""
        for place, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            mine, wanted = self.there.state[param], self.here.state[twin]
            assert mine.keys() == wanted.keys()
            wrong = [name for name, one in wanted.items() if not same_bits(mine[name], one)]
            assert not wrong, f"parameter {place} of shape {SHAPES[place]}: state {wrong} differs from the host's"
            assert all(one.device.type == "cpu" for one in mine.values())
        wrong = [i for i, both in enumerate(zip(self.params, self.twins, strict=True)) if not same_bits(*both)]
        assert not wrong, f"parameters {wrong} differ from the host's"


def grouped(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Two groups."""
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.0}]


def _drawn(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


@check("engine: the host's bits after steps, all kinds, with chunks that stay on the device and without")
def every_kind(target: Target) -> Figure:
    for kind in KINDS:
        for budget in BUDGETS:
            pair = Pair(target, kind, budget=budget)
            for number in range(5):
                pair.step(number)
            pair.compare()
    return {"kinds": len(KINDS), "budgets": len(BUDGETS)}


@check("engine: a save right after a step has all of it, while copies are held up (F5, F6)")
def saves(target: Target) -> Figure:
    for kind in ("plain", "fp32 masters", "remainders"):
        for budget in BUDGETS:
            pair = Pair(target, kind, budget=budget)
            for number in range(3):
                pair.give(number)
                target.delay(pair.there, Stream.DOWNLOAD)
                pair.there.step()
                pair.here.step()
                saved, wanted = pair.there.state_dict()["state"], pair.here.state_dict()["state"]
                for place, entries in wanted.items():
                    assert all(same_bits(saved[place][name], one) for name, one in entries.items()), (kind, place)
    return {}


@check("engine: each stream held up in turn changes nothing (F4)")
def held_up(target: Target) -> Figure:
    for stream in Stream:
        for budget in BUDGETS:
            pair = Pair(target, budget=budget)
            for number in range(6):
                target.delay(pair.there, stream)
                pair.step(number)
                # As a forward pass does: right behind the step, on the same stream.
                seen = [param.detach() * 1 for param in pair.params]
                if not target.is_dry:
                    assert all(same_bits(one, twin) for one, twin in zip(seen, pair.twins, strict=True)), stream
            pair.compare()
    return {"streams": len(Stream)}


@check("engine: loads, groups that are added, and state that is written, all in flight")
def edits(target: Target) -> Figure:
    for budget in BUDGETS:
        pair = Pair(target, "fp32 masters", budget=budget)
        pair.step(0)
        saved = copy.deepcopy(pair.here.state_dict())
        for number in range(1, 7):
            target.delay(pair.there, Stream.DOWNLOAD)
            pair.step(number)
            if number == 2:
                pair.there.load_state_dict(copy.deepcopy(saved))
                pair.here.load_state_dict(copy.deepcopy(saved))
            if number == 3:
                for some, one in ((pair.params, pair.there), (pair.twins, pair.here)):
                    one.state[some[1]]["exp_avg"].mul_(0.5)
            if number == 4:
                _add_group(pair)
        pair.compare()
    return {}


def _add_group(pair: Pair) -> None:
    twin = nn.Parameter(_drawn((9, 300), 99, pair.twins[0].dtype))
    param = nn.Parameter(twin.detach().to(pair.target.device, copy=True))
    pair.there.add_param_group({"params": [param], "lr": 0.3})
    pair.here.add_param_group({"params": [twin], "lr": 0.3})
    param.grad, twin.grad = torch.ones_like(param), torch.ones_like(twin)
    pair.there.step()
    pair.here.step()
    assert same_bits(param, twin) or pair.target.is_dry


@check("engine: weights that are loaded have their masters follow (F12)")
def weights(target: Target) -> Figure:
    for kind in ("fp32 masters", "remainders"):
        pair = Pair(target, kind)
        for number in range(4):
            pair.step(number)
            # On a simulated device nothing but this waits for the writes to the weights.
            assert pair.there.state
            with torch.no_grad():
                for some in (pair.params, pair.twins):
                    some[1].fill_(0.25)
        pair.compare()
    return {}


@check("engine: another current stream at each step")
def streams(target: Target) -> Figure:
    pair = Pair(target, budget=40_000)
    if target.is_dry:
        for number in range(4):
            pair.step(number)
        pair.compare()
        return {"streams": 0}
    main, others = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(2)]
    for number in range(6):
        side = others[number % 2]
        pair.give(number)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            target.delay(pair.there, Stream.COMPUTE)
            pair.there.step()
        main.wait_stream(side)
        pair.here.step()
    pair.compare()
    return {"streams": len(others)}


@check("scaler: torch's GradScaler, with steps that overflow, gives the host's bits")
def scaler(target: Target) -> Figure:
    pair = Pair(target, budget=40_000)
    scalers = [torch.amp.GradScaler(one.type, init_scale=1024.0) for one in (target.device, torch.device("cpu"))]
    skips = (0, 2, 3)
    for number in range(6):
        pair.give(number)
        if number in skips:
            for some in (pair.params, pair.twins):
                some[1].grad.view(-1)[3] = float("inf")
        for scaling, one in zip(scalers, (pair.there, pair.here), strict=True):
            scaling.scale(torch.zeros((), device=target.device if one is pair.there else "cpu"))
            scaling.step(one)
            scaling.update()
    pair.compare()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    return {"skipped": len(skips)}


@check("clip: the norm, and weights as clipped on the host, to rounding")
def clip(target: Target) -> Figure:
    pair = Pair(target)
    furthest = 0.0
    for number in range(4):
        pair.give(number)
        norms = [one.clip_grad_norm_(0.5).item() for one in (pair.there, pair.here)]
        furthest = max(furthest, abs(norms[0] / norms[1] - 1))
        pair.there.step()
        pair.here.step()
    # Torch sums up squares in float32 on the device, the host's kernel in double.
    assert furthest < 1e-5, f"norms differ by {furthest}, relatively"
    assert pair.there.state
    for param, twin in zip(pair.params, pair.twins, strict=True):
        torch.testing.assert_close(param.detach().cpu(), twin.detach(), rtol=1e-4, atol=1e-5)
    return {"norms differ by": furthest}
