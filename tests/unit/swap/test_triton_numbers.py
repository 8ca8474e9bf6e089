"""The Triton kernel in triton's interpreter, on numbers that rounding, infinities and NaNs make difficult."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardopt.swap.device_rows import Kind
from tests.support.device_chunks import Chunk, assert_same_chunk, chunk_of, stepped_on_host
from tests.support.host_rows import (
    DTYPES,
    PARAM_KINDS,
    SETTINGS,
    Buffers,
    Format,
    ParamKind,
    hypers_of,
    made,
    signed,
    split_remainder,
)
from tests.support.triton_worker import Step

Interpret: TypeAlias = Callable[[Step], tuple[Chunk, Kind]]

# Upper and lower halves of float32: both zeros, subnormals, the smallest and the largest normals, one, infinity, NaNs
# of which one is NaN in the lower half alone; and lower halves at, beside and far from the middle of two bf16.
UPPERS = (0x0000, 0x0001, 0x007F, 0x0080, 0x2F80, 0x3F7F, 0x3F80, 0x3F81, 0x5F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF)
LOWERS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
SPECIAL = torch.tensor([(upper << 16) | lower for upper in UPPERS for lower in LOWERS], dtype=torch.int64)
SPECIAL = torch.cat([SPECIAL, SPECIAL - 2**31]).to(torch.int32).view(torch.float32)


def special(numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return SPECIAL[torch.randint(len(SPECIAL), (numel,), generator=generator)]


def of_values(kind: Format, values: list[Tensor]) -> Buffers:
    """Buffers of a parameter, a gradient, two moments and a maximum that have these values, as far as dtypes allow."""
    param, grad, first, second, largest = values
    like = made(len(param), kind)
    # Of a remainder any bits will do, but a finite value's come from its rounding.
    halves = split_remainder(param) if kind.param == "bf16 with a remainder" else (param, param)
    master = None
    if like.master is not None:
        master = halves[1] if like.master.dtype == torch.int16 else param.clone()
    return replace(
        like,
        param=halves[0].to(like.param.dtype).clone(),
        grad=grad.to(kind.grad),
        exp_avg=first.to(kind.moments),
        exp_avg_sq=second.to(kind.moments),
        max_exp_avg_sq=largest.to(kind.moments) if kind.amsgrad else None,
        master=master,
    )


@pytest.mark.parametrize("moments", DTYPES, ids=["fp32 moments", "bf16 moments"])
@pytest.mark.parametrize("param", PARAM_KINDS)
def test_special_values_give_the_bits_of_the_host_kernel(
    param: ParamKind, moments: torch.dtype, interpret: Interpret
) -> None:
    kind = Format(param=param, moments=moments, amsgrad=True)
    # Plain steps, steps that leave most values alone so that stores are seen by themselves, and steps without sense.
    changes = [{}, {"lr": 0.0, "beta1": 0.0, "beta2": 0.0}, {"lr": 0.0, "weight_decay": 0.0}, {"eps": 0.0, "lr": 1e38}]
    rows = [of_values(kind, [special(1000, 5 * row + stream) for stream in range(5)]) for row in range(4)]
    chunk = chunk_of(rows, hyper=range(4))
    hypers = hypers_of(*changes)
    got, _ = interpret(Step(chunk=chunk, hypers=hypers))
    assert_same_chunk(got, stepped_on_host(chunk, hypers))


@pytest.mark.parametrize("param", PARAM_KINDS)
def test_a_scale_without_sense_gives_the_bits_of_the_host_kernel(param: ParamKind, interpret: Interpret) -> None:
    chunk = chunk_of([made(40, Format(param=param, grad=torch.bfloat16))])
    for scale in (0.0, 1e-46, 1e300, float("inf"), float("nan")):
        got, _ = interpret(Step(chunk=chunk, hypers=hypers_of(), grad_scale=scale))
        assert_same_chunk(got, stepped_on_host(chunk, hypers_of(), grad_scale=scale))


def test_copies_are_rounded_to_nearest_even_in_every_binade(interpret: Interpret) -> None:
    # A step of size zero leaves the parameter, and its copy is the rounding alone.
    upper = torch.arange(0, 2**16, 37, dtype=torch.int64)
    bits = torch.stack([(upper << 16) | lower for lower in (0x7FFF, 0x8000, 0x8001)]).flatten()
    value = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    one = replace(made(len(value), Format(param="fp32 with a copy")), param=value)
    got, _ = interpret(Step(chunk=chunk_of([one]), hypers=hypers_of({"lr": 0.0})))
    out = got.read()[0].out
    assert out is not None
    # Torch's own rounding of finite numbers; of infinities and NaNs it is enough that they stay what they are.
    assert torch.equal(out.float().nan_to_num(), value.bfloat16().float().nan_to_num())
    assert torch.equal(out.isnan(), value.isnan())


def test_a_parameter_and_its_remainder_are_the_value_F12(interpret: Interpret) -> None:
    wide = made(1500, Format(param="fp32"))
    # Ties of the upper half, which rounding to even would not restore.
    wide = replace(wide, param=(wide.param.view(torch.int32) & -65536 | 0x8000).view(torch.float32))
    upper, lower = split_remainder(wide.param)
    narrow = replace(wide, param=upper, master=lower)
    for change in ({"lr": 0.0}, {"lr": 0.1}):
        (expected,), (got,) = (
            interpret(Step(chunk=chunk_of([one]), hypers=hypers_of(change)))[0].read() for one in (wide, narrow)
        )
        assert torch.equal(got.value(), expected.param)


def test_zero_gradients_of_zero_weights_stay_finite_G17(interpret: Interpret) -> None:
    zeros = made(20, Format(param="fp32", amsgrad=True))
    for tensor in zeros.named().values():
        tensor.zero_()
    got, _ = interpret(Step(chunk=chunk_of([zeros]), hypers=hypers_of({"step": 1})))
    for tensor in got.read()[0].named().values():
        assert torch.equal(tensor, torch.zeros(20))


FLOATS = st.floats(width=32, allow_subnormal=True)
RATES = st.floats(0.0, 1.0, exclude_max=True)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=9),
    change=st.fixed_dictionaries(
        {
            "lr": st.floats(0.0, 10.0),
            "beta1": RATES,
            "beta2": RATES,
            "eps": st.floats(0.0, 1.0),
            "weight_decay": st.floats(0.0, 1.0),
            "step": st.integers(1, 10**7),
            "maximize": st.booleans(),
        }
    ),
    grad_scale=st.floats(-4.0, 4.0),
)
@pytest.mark.parametrize("moments", DTYPES, ids=["fp32 moments", "bf16 moments"])
def test_any_numbers_give_the_bits_of_the_host_kernel(
    moments: torch.dtype,
    values: list[list[float]],
    change: dict[str, float],
    grad_scale: float,
    interpret: Interpret,
) -> None:
    kind = Format(param="fp32 with a copy", moments=moments, amsgrad=True)
    streams = [torch.tensor(stream, dtype=torch.float32) for stream in zip(*values, strict=True)]
    chunk, hypers = chunk_of([of_values(kind, streams)]), hypers_of(change)
    with np.errstate(all="ignore"):
        expected = stepped_on_host(chunk, hypers, grad_scale=grad_scale)
    got, _ = interpret(Step(chunk=chunk, hypers=hypers, grad_scale=grad_scale))
    assert_same_chunk(got, expected)


@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
def test_150_steps_are_as_close_to_float64_as_torch_G6(amsgrad: bool, interpret: Interpret) -> None:
    generator = torch.Generator().manual_seed(5)
    numel, steps = 600, 150
    start = torch.randn(numel, generator=generator)
    chosen = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": amsgrad}
    leaves = [start.to(dtype).clone().requires_grad_() for dtype in (torch.float64, torch.float32)]
    optimizers = [torch.optim.AdamW([leaf], foreach=False, **chosen) for leaf in leaves]
    one = Buffers(
        param=start.clone(),
        grad=torch.zeros(numel),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        max_exp_avg_sq=torch.zeros(numel) if amsgrad else None,
    )
    for step in range(1, steps + 1):
        grad = signed(numel, generator, low=-3, high=1)
        for leaf, optimizer in zip(leaves, optimizers, strict=True):
            leaf.grad = grad.to(leaf.dtype)
            optimizer.step()
        hypers = hypers_of({**SETTINGS, "lr": 1e-2, "beta2": 0.99, "step": step})
        (one,) = interpret(Step(chunk=chunk_of([replace(one, grad=grad)]), hypers=hypers))[0].read()
    exact = leaves[0].detach()
    assert (exact - start).abs().median() > 0.1
    ours, torchs = ((value.double() - exact).abs() for value in (one.param, leaves[1].detach()))
    assert ours.max() <= torchs.max()
    assert ours.mean() <= torchs.mean()
    assert ours.max() < 1e-5
