"""GradScaler on several ranks: one decision to skip and one scale, whatever kind of gradient overflows, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardopt
from shardopt import RankFailureError, ShardedStateOptimizer
from tests.support.models import Shape, SmallModel, build, local_tensor, set_gradients
from tests.support.ranks import RankPool
from tests.support.rules import state
from tests.support.snapshot import snapshot

MIXED = Shape(ignored=("scale", "gain"), gain=True)
SCALE = 1024.0
RULES: dict[str, Any] = {
    "unfused": lambda params: torch.optim.AdamW(params, lr=0.125),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.125, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
}


def make(rule: str, topology: Any = "fsdp", shape: Shape = MIXED) -> tuple[ShardedStateOptimizer, SmallModel]:
    model = build(topology, shape)
    return ShardedStateOptimizer(RULES[rule](model.parameters()), model), model


def scaled(model: SmallModel, step: int) -> None:
    """The gradients of a step as a scaled loss would leave them."""
    set_gradients(model, step)
    for param in model.parameters():
        param.grad.mul_(SCALE)


def local(param: Tensor) -> Tensor:
    grad = param.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad  # type: ignore[return-value]


def overflow(model: SmallModel, what: str, bad: int) -> None:
    if dist.get_rank() == bad:
        grad = local(model.up.weight if what == "sharded" else model.scale)
        grad.view(-1)[:1] = float("inf")


def scaler_of(cls: Any) -> Any:
    scaler = cls("cpu", init_scale=SCALE, growth_interval=2)
    scaler.scale(torch.ones(1))  # it is made with the first loss
    return scaler


def train(rule: str, what: str, bad: int, unscale: bool, topology: str) -> dict[str, Any]:
    """Three steps of which the second overflows on one rank; and what the same steps do without a scaler."""
    optimizer, model = make(rule, topology)
    other, its = make(rule, topology)
    scaler = scaler_of(shardopt.GradScaler)
    scales: list[float] = []
    skipped: list[str] = []
    for step in range(3):
        scaled(model, step)
        for param in model.parameters():
            param.grad.mul_(scaler.get_scale() / SCALE)
        if step == 1:
            overflow(model, what, bad)
            before = snapshot(optimizer, model)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 1:
            skipped = [line for line in before.diff(snapshot(optimizer, model)) if "grad" not in line]
        else:
            set_gradients(its, step)
            other.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    same = state(optimizer, model) == state(other, its)
    params = [local_tensor(param) for param in model.parameters()]
    same &= all(map(torch.equal, params, map(local_tensor, its.parameters())))
    return {"scales": scales, "skipped": skipped, "same": same, "ranks": int(total)}


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("what", ["sharded", "plain"])
def test_an_overflow_anywhere_is_skipped_everywhere_D1_D2_D3_T9(
    what: str, rule: str, unscale: bool, ranks: RankPool
) -> None:
    for found in ranks.run(2, train, rule, what, 1, unscale, "fsdp"):
        # Powers of two throughout, so that scaled gradients come back bit for bit.
        assert found == {"scales": [1024.0, 512.0, 512.0], "skipped": [], "same": True, "ranks": 2}


@pytest.mark.parametrize("topology", ["hsdp", "fsdp_tp"])
def test_an_overflow_is_agreed_on_over_all_meshes(topology: str, ranks: RankPool) -> None:
    for found in ranks.run(4, train, "unfused", "sharded", 3, False, topology):
        assert found == {"scales": [1024.0, 512.0, 512.0], "skipped": [], "same": True, "ranks": 4}


def without_gradients(rule: str) -> tuple[float, list[str]]:
    """One rank has no gradient at all; then the other overflows."""
    optimizer, model = make(rule)
    scaler = scaler_of(shardopt.GradScaler)
    scaled(model, 0)
    if dist.get_rank() == 0:
        for param in model.parameters():
            param.grad = None
    scaler.step(optimizer)
    scaler.update()
    scaled(model, 1)
    if dist.get_rank() == 0:
        for param in model.parameters():
            param.grad = None
    overflow(model, "plain", 1)
    before = snapshot(optimizer, model)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), [line for line in before.diff(snapshot(optimizer, model)) if "grad" not in line]


@pytest.mark.parametrize("rule", ["unfused", "fused"])
def test_a_rank_without_gradients_takes_part_D9_D10_E1(rule: str, ranks: RankPool) -> None:
    assert ranks.run(2, without_gradients, rule, deadline_s=30.0) == [(512.0, []), (512.0, [])]


def plain_gradients_only(rule: str) -> tuple[str, list[str], str]:
    """torch's own scaler; what is sharded has no gradient, so that no collective of torch's makes the verdict one."""
    optimizer, model = make(rule)
    scaler = scaler_of(torch.amp.GradScaler)
    scaled(model, 0)
    for param in model.parameters():
        if isinstance(param, DTensor):
            param.grad = None
    overflow(model, "plain", 1)
    before = snapshot(optimizer, model)
    with pytest.raises(RankFailureError) as refused:
        scaler.step(optimizer)
    changes = before.diff(snapshot(optimizer, model))
    set_gradients(model, 1)
    optimizer.step()
    return str(refused.value), changes, str(vars(optimizer).keys() & {"grad_scale", "found_inf"})


@pytest.mark.parametrize("rule", ["unfused", "fused"])
def test_torchs_scaler_whose_ranks_disagree_is_refused_D1(rule: str, ranks: RankPool) -> None:
    for text, changes, left in ranks.run(2, plain_gradients_only, rule, deadline_s=30.0):
        assert "overflowed on some ranks and not on others" in text
        assert "Use shardopt.GradScaler" in text
        assert (changes, left) == ([], "set()")


def half_on_one_rank() -> str:
    optimizer, model = make("unfused")
    scaler = scaler_of(shardopt.GradScaler)
    scaled(model, 0)
    if dist.get_rank() == 1:
        model.scale = nn.Parameter(model.scale.detach())  # not the optimizer's any more
    with pytest.raises(RankFailureError) as refused:
        scaler.step(optimizer)
    return f"{refused.value.failures} {type(refused.value.__cause__).__name__}"


def test_a_failure_in_a_scaled_step_is_everybodys(ranks: RankPool) -> None:
    first, second = ranks.run(2, half_on_one_rank, deadline_s=30.0)
    assert "scale: the model has another parameter" in first
    assert first.endswith("NoneType")
    assert second.endswith("PresentationError")
