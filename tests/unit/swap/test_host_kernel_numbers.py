"""The AdamW step on host memory: the right numbers, measured with float64 and with torch's own AdamW."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from shardopt.swap.host_kernel import adamw_rows, available_isas
from tests.support.host_rows import (
    SETTINGS,
    Buffers,
    Format,
    ParamKind,
    hypers_of,
    made,
    rows_of,
    split_remainder,
)

# Half a unit in the last place of float32: one correct rounding's largest relative error.
U = 2.0**-24
# One of each length up to two batches of the widest level, side by side, so that they begin at every offset.
LENGTHS = tuple(range(68))
# More than one block.
LARGE = 33_003
STEPS = 500
RUN = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def float64_step(
    value: Tensor, moments: list[Tensor], grad: Tensor, step: int, *, amsgrad: bool, maximize: bool
) -> None:
    """AdamW's formula in double, in place: exp_avg, exp_avg_sq and, for amsgrad, the largest of the latter."""
    grad = -grad.double() if maximize else grad.double()
    exp_avg, exp_avg_sq, largest = moments
    exp_avg.mul_(RUN["beta1"]).add_(grad * (1 - RUN["beta1"]))
    exp_avg_sq.mul_(RUN["beta2"]).add_(grad.square() * (1 - RUN["beta2"]))
    torch.maximum(largest, exp_avg_sq, out=largest)
    root = (largest if amsgrad else exp_avg_sq).sqrt() / math.sqrt(1 - RUN["beta2"] ** step)
    value.mul_(1 - RUN["lr"] * RUN["weight_decay"])
    value.sub_(RUN["lr"] / (1 - RUN["beta1"] ** step) * exp_avg / (root + RUN["eps"]))


@dataclass
class Run:
    """A parameter in float64, in torch's float32 AdamW and, cut into spans, in the kernel."""

    lengths: tuple[int, ...]  # of the spans
    has_grad: Callable[[int], bool]  # of a step
    exact: Tensor
    moments: list[Tensor]
    torch: torch.nn.Parameter
    mine: Buffers
    steps: int = 0

    def spans(self) -> list[Buffers]:
        starts = [0, *itertools.accumulate(self.lengths)][:-1]
        return [self.mine.part(start, numel) for start, numel in zip(starts, self.lengths, strict=True)]


def run_of(
    param: ParamKind, grad: torch.dtype, *, amsgrad: bool, lengths: tuple[int, ...], has_grad: Callable[[int], bool]
) -> Run:
    numel = sum(lengths)
    value = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    live, master = value.clone(), None
    if param == "bf16 over fp32":
        live, master = value.bfloat16(), value.clone()
    elif param == "bf16 with a remainder":
        live, master = split_remainder(value)
    return Run(
        lengths=lengths,
        has_grad=has_grad,
        exact=value.double(),
        moments=[torch.zeros(numel, dtype=torch.float64) for _ in range(3)],
        torch=torch.nn.Parameter(value.clone()),
        mine=Buffers(
            param=live,
            grad=torch.zeros(numel, dtype=grad),
            exp_avg=torch.zeros(numel),
            exp_avg_sq=torch.zeros(numel),
            max_exp_avg_sq=torch.zeros(numel) if amsgrad else None,
            master=master,
        ),
    )


# Gradients that are always there, are missing now and then, come late, never come: so counts of steps differ.
SCHEDULES: list[tuple[tuple[int, ...], Callable[[int], bool]]] = [
    ((*LENGTHS, LARGE), lambda _: True),
    (LENGTHS, lambda step: step % 3 != 0),
    (LENGTHS, lambda step: step > 100),
    (LENGTHS, lambda _: False),
]


def errors(got: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """Root mean square, and largest."""
    difference = torch.cat([one.double() - other for one, other in zip(got, exact, strict=True)])
    return float(difference.square().mean().sqrt()), float(difference.abs().max())


@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@pytest.mark.parametrize(
    ("param", "grad", "maximize"),
    [
        ("fp32", torch.float32, False),
        ("fp32", torch.float32, True),
        ("fp32", torch.bfloat16, False),
        ("bf16 over fp32", torch.bfloat16, False),
        ("bf16 with a remainder", torch.bfloat16, True),
    ],
)
def test_500_steps_err_no_more_than_torch_in_float32_G1_G4_G8(
    param: ParamKind, grad: torch.dtype, maximize: bool, amsgrad: bool
) -> None:
    all_runs = [
        run_of(param, grad, amsgrad=amsgrad, lengths=lengths, has_grad=has_grad) for lengths, has_grad in SCHEDULES
    ]
    optimizer = torch.optim.AdamW(
        [run.torch for run in all_runs],
        lr=RUN["lr"],
        betas=(RUN["beta1"], RUN["beta2"]),
        eps=RUN["eps"],
        weight_decay=RUN["weight_decay"],
        amsgrad=amsgrad,
        maximize=maximize,
        foreach=False,
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        stepped = [run for run in all_runs if run.has_grad(step)]
        # Magnitudes that differ from step to step and now and then are zero.
        size = 0.0 if step % 50 == 0 else 10.0 ** ((step % 7) - 3)
        for run in all_runs:
            run.torch.grad = None
        for run in stepped:
            run.mine.grad.copy_(torch.randn(run.exact.numel(), generator=generator) * size)
            run.torch.grad = run.mine.grad.float()
            run.steps += 1
            float64_step(run.exact, run.moments, run.torch.grad, run.steps, amsgrad=amsgrad, maximize=maximize)
        optimizer.step()
        hypers = hypers_of(*({**RUN, "step": run.steps, "maximize": maximize} for run in stepped))
        spans = [(place, span) for place, run in enumerate(stepped) for span in run.spans()]
        rows = rows_of([span for _, span in spans], hyper=[place for place, _ in spans])
        adamw_rows(rows, hypers, seed=0, num_threads=2)

    exact = [run.exact for run in all_runs]
    mine = errors([run.mine.value() for run in all_runs], exact)
    theirs = errors([run.torch.detach() for run in all_runs], exact)
    assert 0 < mine[0] <= theirs[0]
    assert mine[1] <= theirs[1]
    for run in all_runs:
        # As close as torch's, because the same.
        for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
            if run.steps:
                moment = optimizer.state[run.torch][name]
                torch.testing.assert_close(run.mine.named()[name], moment, rtol=moment_tolerance(), atol=0)


def moment_tolerance() -> float:
    """None, where torch's kernels fuse multiplications with additions as the kernel does."""
    return 0.0 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else 4e-6


def bounds(inputs: Buffers, beta1: float, step: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Exact results of one step, and how far rounding may take a float32 one from them."""
    param, grad, exp_avg, exp_avg_sq = (tensor.double() for tensor in inputs.named().values())
    lr, beta2, eps, decay = (float(SETTINGS[name]) for name in ("lr", "beta2", "eps", "weight_decay"))
    walk = (1 - beta1) * (grad - exp_avg)
    new_avg = exp_avg + walk
    new_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    step_size = lr / (1 - beta1**step)
    denominator = new_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + eps
    decayed = lr * decay * param
    new_param = param - decayed - step_size * new_avg / denominator
    # One U for each rounding on the way (a scalar's counts too), on the magnitude it rounds. Walking back from the
    # gradient scales the difference by beta1 instead, hence the larger of the two.
    walk = torch.maximum(walk.abs(), (beta1 * (grad - exp_avg)).abs() if beta1 <= 0.5 else walk.abs())
    avg_bound = 2 * walk + new_avg.abs()
    update = step_size * (9.5 * new_avg.abs() + avg_bound) / denominator
    return {
        "param": (new_param, new_param.abs() + 2 * decayed.abs() + 1.01 * update),
        "exp_avg": (new_avg, 1.01 * avg_bound),
        "exp_avg_sq": (new_avg_sq, 3.01 * new_avg_sq),
    }


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("beta1", "step"), [(0.9, 1), (0.9, 7), (0.3, 2), (0.9, 1_000_000)])
def test_one_step_stays_within_rounding_of_float64_G8(isa: str, beta1: float, step: int) -> None:
    inputs = made(2053, Format(param="fp32"))
    expected = bounds(inputs, beta1, step)
    got = inputs.clone()
    adamw_rows(rows_of([got]), hypers_of({"beta1": beta1, "step": step}), seed=3, isa=isa)
    assert torch.equal(got.grad, inputs.grad)
    for name, (exact, bound) in expected.items():
        excess = (got.named()[name].double() - exact).abs() / (U * bound)
        assert excess.max() <= 1, f"{name}: {float(excess.max())} times its bound"


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_zero_gradients_on_fresh_moments_only_decay_G17(isa: str, moments: torch.dtype) -> None:
    for value in (torch.zeros(67), made(67, Format(param="fp32")).param):
        got = Buffers(
            param=value.clone(),
            grad=torch.zeros(67),
            exp_avg=torch.zeros(67, dtype=moments),
            exp_avg_sq=torch.zeros(67, dtype=moments),
        )
        adamw_rows(rows_of([got]), hypers_of({"step": 1}), seed=3, isa=isa)
        decay = torch.tensor(3e-3 * 0.1)
        # In double the product is exact, so that only the kernel's one rounding is left.
        assert torch.equal(got.param, (value.double() - (decay.double() * value.double()).float().double()).float())
        assert not got.exp_avg.any()
        assert not got.exp_avg_sq.any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_an_infinite_parameter_stays_infinite_as_in_torch(weight_decay: float) -> None:
    value = torch.tensor([torch.inf, -torch.inf, 1.0])
    got = Buffers(param=value.clone(), grad=torch.zeros(3), exp_avg=torch.zeros(3), exp_avg_sq=torch.zeros(3))
    adamw_rows(rows_of([got]), hypers_of({"weight_decay": weight_decay}), seed=3)
    assert got.param.tolist()[:2] == [torch.inf, -torch.inf]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_largest_second_moment_is_nan_as_soon_as_one_is_as_in_torch(isa: str, moments: torch.dtype) -> None:
    one, nan = torch.ones(67), torch.full((67,), torch.nan)
    for grad, largest in ((nan, one), (one, nan)):
        got = Buffers(
            param=one.clone(),
            grad=grad,
            exp_avg=one.to(moments),
            exp_avg_sq=one.to(moments),
            max_exp_avg_sq=largest.to(moments),
        )
        stepped = got.clone()  # of tensors that are one in fp32
        adamw_rows(rows_of([stepped]), hypers_of(), seed=3, isa=isa)
        assert stepped.max_exp_avg_sq is not None
        assert stepped.max_exp_avg_sq.isnan().all()
        assert stepped.param.isnan().all()


@pytest.mark.parametrize("isa", available_isas())
def test_the_scale_of_gradients_is_as_if_they_had_been_multiplied(isa: str) -> None:
    inputs = made(67, Format(param="fp32"))
    for scale in (1.0, 0.37, 1 / 65536):
        got, expected = inputs.clone(), replace(inputs.clone(), grad=inputs.grad * torch.tensor(scale))
        adamw_rows(rows_of([got]), hypers_of(), seed=3, grad_scale=scale, isa=isa)
        adamw_rows(rows_of([expected]), hypers_of(), seed=3, isa=isa)
        assert torch.equal(got.grad, inputs.grad)
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(got.named()[name], expected.named()[name])
    # Up is down against the gradient, and the sign and the scale are one factor.
    got, expected = inputs.clone(), replace(inputs.clone(), grad=inputs.grad * torch.tensor(-0.37))
    adamw_rows(rows_of([got]), hypers_of({"maximize": True}), seed=3, grad_scale=0.37, isa=isa)
    adamw_rows(rows_of([expected]), hypers_of(), seed=3, isa=isa)
    assert torch.equal(got.param, expected.param)


def test_numbers_do_not_depend_on_the_default_dtype_G9() -> None:
    inputs = made(67, Format(param="fp32"))
    got, expected = inputs.clone(), inputs.clone()
    adamw_rows(rows_of([expected]), hypers_of({"step": 300}), seed=3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        adamw_rows(rows_of([got]), hypers_of({"step": 300}), seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.param, expected.param)
