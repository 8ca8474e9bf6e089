"""The AdamW step on host memory: bf16 moments by chance, bf16 parameters with and without masters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shardopt.swap.host_kernel import adamw_rows, available_isas
from tests.support import host_reference
from tests.support.host_rows import Buffers, Format, hypers_of, made, rows_of, split_remainder

# Both moments become functions of the gradient alone, with nothing rounded before they are stored: exp_avg is it,
# exp_avg_sq its square.
MEMORYLESS = {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0}
# Between two neighbours in bf16, so is its square, and that is exact in float32.
UNEVEN = 1.0 + 3 / 1024


def drawn(
    numel: int,
    *,
    seed: int = 3,
    step: int = 7,
    stream: int = 11,
    index: tuple[int, int, int] | None = None,
    isa: str = "",
) -> Buffers:
    """Moments after a step from nothing with gradients of ``UNEVEN``; ``index`` is start, run and stride."""
    got = Buffers(
        param=torch.zeros(numel),
        grad=torch.full((numel,), UNEVEN),
        exp_avg=torch.zeros(numel, dtype=torch.bfloat16),
        exp_avg_sq=torch.zeros(numel, dtype=torch.bfloat16),
    )
    rows = rows_of([got], stream=[stream])
    if index is not None:
        rows["index_start"], rows["index_run"], rows["index_stride"] = index
    adamw_rows(rows, hypers_of({**MEMORYLESS, "step": step}), seed=seed, isa=isa or None)
    return got


def ups(moment: Tensor) -> Tensor:
    """Which of the draws went up."""
    assert moment.unique().numel() == 2
    return moment == moment.max()


def words(global_index: Tensor, *, seed: int = 3, step: int = 7, stream: int = 11) -> np.ndarray:
    return host_reference.random_words(seed, step, stream, global_index.numpy())


def test_philox_gives_the_published_words() -> None:
    # kat_vectors of Random123 1.14, philox4x32 10; the kernel's bits are compared with this function's.
    known = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in known:
        got = host_reference.philox([np.array(v, np.uint64) for v in counter], [np.array(v, np.uint64) for v in key])
        assert [int(word) for word in got] == expected


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(
    "index",
    [
        (0, 4099, 0),
        (61, 4099, 0),  # begins inside of a group of 64
        (1000, 7, 100),  # columns of a matrix: short runs, several to a group, others across two
        (5, 1, 3),
        (2**33 + 17, 64, 2**34),  # G16: beyond 32 bits
        (2**62, 4099, 0),
    ],
)
def test_draws_depend_on_the_global_index_alone_G16(isa: str, index: tuple[int, int, int]) -> None:
    start, run, stride = index
    got = drawn(4099, index=index, isa=isa)
    i = torch.arange(4099)
    expected = words(start + i // run * stride + i % run)
    up = host_reference.stochastic(np.full(4099, UNEVEN, np.float32), expected & np.uint32(0xFFFF))
    square = host_reference.stochastic(np.full(4099, UNEVEN**2, np.float32), expected >> np.uint32(16))
    assert got.exp_avg.view(torch.int16).numpy().view(np.uint16).tolist() == up.tolist()
    assert got.exp_avg_sq.view(torch.int16).numpy().view(np.uint16).tolist() == square.tolist()


def test_seeds_steps_streams_and_moments_draw_differently() -> None:
    numel = 1 << 16
    draws = [
        ups(moment)
        for changed in ({}, {"seed": 4}, {"seed": 3 + 2**32}, {"step": 8}, {"stream": 12}, {"stream": 11 + 2**32})
        for got in [drawn(numel, **changed)]
        for moment in (got.exp_avg, got.exp_avg_sq)
    ]
    # Independent draws that go up with odds p and q agree in pq of places, give or take five standard deviations.
    for one, first in enumerate(draws):
        for second in draws[one + 1 :]:
            p, q = first.float().mean().item(), second.float().mean().item()
            both = (first & second).float().mean().item()
            assert abs(both - p * q) < 5 * math.sqrt(p * q * (1 - p * q) / numel)
    assert torch.equal(ups(drawn(numel).exp_avg), draws[0])


def test_stochastic_rounding_keeps_the_mean() -> None:
    numel = 1 << 20
    got = drawn(numel)
    for moment, exact in ((got.exp_avg, UNEVEN), (got.exp_avg_sq, UNEVEN**2)):
        low, high = moment.unique().tolist()
        assert low < exact < high
        assert high - low == 2**-7  # neighbours
        odds = (exact - low) / (high - low)
        assert abs(ups(moment).double().mean().item() - odds) < 5 * math.sqrt(odds * (1 - odds) / numel)


def test_what_bf16_holds_is_stored_as_it_is() -> None:
    values = made(4099, Format(param="fp32", moments=torch.bfloat16)).exp_avg.float()
    got = Buffers(
        param=torch.zeros(4099),
        grad=values.clone(),
        exp_avg=torch.zeros(4099, dtype=torch.bfloat16),
        exp_avg_sq=torch.zeros(4099, dtype=torch.bfloat16),
    )
    adamw_rows(rows_of([got]), hypers_of(MEMORYLESS), seed=3)
    assert torch.equal(got.exp_avg.float(), values)


@pytest.mark.parametrize("isa", available_isas())
def test_1000_zero_gradients_let_the_second_moment_decay(isa: str) -> None:
    numel = 4096
    got = Buffers(
        param=torch.zeros(numel),
        grad=torch.zeros(numel, dtype=torch.bfloat16),
        exp_avg=torch.ones(numel, dtype=torch.bfloat16),
        exp_avg_sq=torch.ones(numel, dtype=torch.bfloat16),
    )
    nearest = torch.ones(1, dtype=torch.bfloat16)
    for step in range(1, 1001):
        adamw_rows(rows_of([got]), hypers_of({"step": step}), seed=3, num_threads=1, isa=isa)
        nearest.mul_(0.999)
    exact = 0.999**1000
    assert abs(got.exp_avg_sq.double().mean().item() / exact - 1) < 0.01
    assert nearest.item() == 1.0  # what rounding to nearest makes of it


@pytest.mark.parametrize("isa", available_isas())
def test_a_remainder_restores_every_value_exactly_ties_too(isa: str) -> None:
    """lr = 0: a step leaves every value as it is, in both its halves."""
    # Every lower half, 0x8000, the tie, among them, under upper halves even and odd, of either sign, subnormal, and
    # the largest: its ties round to infinity.
    low = torch.arange(2**16, dtype=torch.int32)
    for high in (0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0000, 0x8000, 0x7F7E, 0x7F7F, 0xFF7F):
        bits = torch.tensor((high << 16) - (2**32 if high >= 0x8000 else 0)).int() + low
        value = bits.view(torch.float32)
        param, master = split_remainder(value)
        zeros = torch.zeros(2**16)
        got = Buffers(
            param=param.clone(), grad=zeros, exp_avg=zeros.clone(), exp_avg_sq=zeros.clone(), master=master.clone()
        )
        assert torch.equal(got.value().view(torch.int32), bits)
        adamw_rows(rows_of([got]), hypers_of({"lr": 0.0}), seed=3, isa=isa)
        # Only the sign of zero may change: 0 - 0 is 0.
        assert torch.equal(got.value(), value)
        assert torch.equal(got.param.view(torch.int16)[1:], param.view(torch.int16)[1:])
        assert torch.equal(got.master[1:], master[1:])


@pytest.mark.parametrize("isa", available_isas())
def test_a_remainder_and_an_fp32_master_hold_the_same_values(isa: str) -> None:
    split = made(4099, Format(param="bf16 with a remainder", grad=torch.bfloat16))
    whole = Buffers(**{**split.clone().named(), "param": split.param.clone(), "master": split.value().clone()})
    for step in range(1, 20):
        for one in (split, whole):
            adamw_rows(rows_of([one]), hypers_of({"step": step}), seed=3, isa=isa)
    assert torch.equal(split.value(), whole.value())
    assert torch.equal(whole.param, whole.value().bfloat16())
    # Nearest in both, except that ties go away from zero where there is a remainder.
    assert (split.param.float() - split.value()).abs().le((whole.param.float() - whole.value()).abs()).all()


@pytest.mark.parametrize("isa", available_isas())
def test_values_that_are_not_finite_stay_so_in_bf16(isa: str) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F80FFFF, -1, -0x7FFFFF], dtype=torch.int32)
    odd = torch.cat([payloads.view(torch.float32), torch.tensor([torch.inf, -torch.inf])]).repeat(5)
    for kind in ("fp32 with a copy", "bf16 over fp32", "bf16 with a remainder"):
        base = made(odd.numel(), Format(param=kind, moments=torch.bfloat16))
        # The gradient carries them: into the moments, and from there into the parameter.
        got = Buffers(**{**base.named(), "grad": odd})
        adamw_rows(rows_of([got]), hypers_of(), seed=3, isa=isa)
        shown = got.param if got.out is None else got.out
        assert shown.isnan().all()
        assert got.value().isnan().all()
        assert torch.equal(got.exp_avg.isnan(), odd.isnan())
        assert torch.equal(got.exp_avg.isinf(), odd.isinf())
        assert got.exp_avg_sq[odd.isinf()].isposinf().all()


@pytest.mark.parametrize("isa", available_isas())
def test_a_copy_is_the_parameter_rounded_to_nearest_even(isa: str) -> None:
    got = made(4099, Format(param="fp32 with a copy"))
    # A tie above an even and an odd neighbour, too.
    got.param[:2] = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    adamw_rows(rows_of([got]), hypers_of({"lr": 0.0}), seed=3, isa=isa)
    assert torch.equal(got.out, got.param.bfloat16())


def test_the_largest_second_moment_does_not_drift_in_bf16() -> None:
    """Rounded by chance, the largest of a hundred draws would be above the value that all of them stand for."""
    numel = 1024
    got = Buffers(
        param=torch.zeros(numel),
        grad=torch.full((numel,), UNEVEN),
        exp_avg=torch.zeros(numel, dtype=torch.bfloat16),
        exp_avg_sq=torch.zeros(numel, dtype=torch.bfloat16),
        max_exp_avg_sq=torch.zeros(numel, dtype=torch.bfloat16),
    )
    for step in range(1, 101):
        adamw_rows(rows_of([got]), hypers_of({**MEMORYLESS, "step": step}), seed=3)
    assert (got.max_exp_avg_sq == torch.tensor(UNEVEN**2).bfloat16()).all()
