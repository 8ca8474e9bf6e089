"""The fused AdamW step on host memory: the same bits at every ISA level, and the right numbers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from shardopt.swap.host_kernel import adamw_step, available_isas

NAMES = ("param", "grad", "exp_avg", "exp_avg_sq")
SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 7}
# Past four vectors of the widest level, so every tail length follows several whole vectors.
LENGTHS = range(68)
# Half a unit in the last place of float32: one correct rounding's largest relative error.
U = 2.0**-24


def buffers(numel: int, seed: int = 0) -> list[Tensor]:
    """Param, grad, exp_avg, exp_avg_sq over 12 decades, all squares well above float32's smallest normal."""
    generator = torch.Generator().manual_seed(seed)

    def signed() -> Tensor:
        return torch.randn(numel, generator=generator) * 10.0 ** torch.empty(numel).uniform_(-9, 3, generator=generator)

    return [signed(), signed(), signed(), signed().square()]


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.view(torch.int32) for tensor in tensors]


def assert_same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(NAMES, bits(got), bits(expected), strict=True):
        assert torch.equal(one, other), f"{name} differs in {int((one != other).sum())} of {one.numel()} elements"


def stepped(tensors: list[Tensor], isa: str, **changed: float) -> list[Tensor]:
    clones = [tensor.clone() for tensor in tensors]
    adamw_step(*clones, **{**SETTINGS, **changed}, isa=isa)
    return clones


def test_the_portable_levels_are_always_there() -> None:
    assert available_isas()[:2] == ("scalar", "lanes16")


@pytest.mark.parametrize("isa", available_isas())
# beta1 = 0.3 walks the moment back from the gradient, as torch.lerp does for weights of a half and more.
@pytest.mark.parametrize("beta1", [0.9, 0.5, 0.3])
def test_every_length_gives_the_scalar_bits(isa: str, beta1: float) -> None:
    for numel in (*LENGTHS, 4099):
        inputs = buffers(numel, seed=numel)
        assert_same_bits(stepped(inputs, isa, beta1=beta1), stepped(inputs, "scalar", beta1=beta1))


@pytest.mark.parametrize("isa", available_isas())
def test_only_the_view_is_written_at_every_offset(isa: str) -> None:
    inputs = buffers(100)
    for offset in range(18):
        for numel in (0, 1, 16, 33, 80):
            whole = [tensor.clone() for tensor in inputs]
            adamw_step(*(tensor[offset : offset + numel] for tensor in whole), **SETTINGS, isa=isa)
            expected = [tensor.clone() for tensor in inputs]
            for target, part in zip(
                expected, stepped([tensor[offset : offset + numel] for tensor in inputs], "scalar"), strict=True
            ):
                target[offset : offset + numel] = part
            assert_same_bits(whole, expected)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("chunk", [1, 13, 16, 256])
def test_cutting_a_buffer_into_calls_changes_no_bit(isa: str, chunk: int) -> None:
    inputs = buffers(1003)
    cut = [tensor.clone() for tensor in inputs]
    for pieces in zip(*(tensor.split(chunk) for tensor in cut), strict=True):
        adamw_step(*pieces, **SETTINGS, isa=isa)
    assert_same_bits(cut, stepped(inputs, "scalar"))


@pytest.mark.parametrize("isa", available_isas())
def test_extreme_values_agree_with_scalar(isa: str) -> None:
    # Signed zeros, subnormals, values whose square overflows or underflows, infinities and NaN, in every pairing.
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-30, 1.0, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    param, grad, exp_avg = (grid.flatten() for grid in torch.meshgrid(extremes, extremes, extremes, indexing="ij"))
    inputs = [param, grad, exp_avg, exp_avg.abs()]
    got, expected = stepped(inputs, isa), stepped(inputs, "scalar")
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
    assert_same_bits([one.nan_to_num(nan=0.0) for one in got], [other.nan_to_num(nan=0.0) for other in expected])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("beta1", "step"), [(0.9, 1), (0.9, 7), (0.3, 2), (0.9, 1_000_000)])
def test_numbers_stay_within_rounding_of_a_float64_loop(isa: str, beta1: float, step: int) -> None:
    inputs = buffers(2053)
    param, grad, exp_avg, exp_avg_sq = (tensor.double() for tensor in inputs)
    lr, beta2, eps, decay = (float(SETTINGS[name]) for name in ("lr", "beta2", "eps", "weight_decay"))
    walk = (1 - beta1) * (grad - exp_avg)
    new_avg = exp_avg + walk
    new_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    step_size = lr / (1 - beta1**step)
    denominator = new_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + eps
    decayed = (1 - lr * decay) * param
    new_param = decayed - step_size * new_avg / denominator

    # One U for each rounding on the way (a scalar's counts too), on the magnitude it rounds. Walking back from the
    # gradient scales the difference by beta1 instead, hence the larger of the two.
    walk = torch.maximum(walk.abs(), (beta1 * (grad - exp_avg)).abs() if beta1 <= 0.5 else walk.abs())
    avg_bound = 2 * walk + new_avg.abs()
    update = step_size * (8.5 * new_avg.abs() + avg_bound) / denominator
    bounds = (3 * decayed.abs() + 2 * new_param.abs() + 1.01 * update, 1.01 * avg_bound, 3.01 * new_avg_sq)

    got = stepped(inputs, isa, beta1=beta1, step=step)
    assert torch.equal(got[1], inputs[1])
    written = (got[0], got[2], got[3])
    for name, value, exact, bound in zip(
        ("param", "exp_avg", "exp_avg_sq"), written, (new_param, new_avg, new_avg_sq), bounds, strict=True
    ):
        excess = (value.double() - exact).abs() / (U * bound)
        assert excess.max() <= 1, f"{name}: {float(excess.max())} times its bound"


def test_moments_equal_those_of_torch_for_loop_adamw() -> None:
    torch_fuses = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(1003, generator=generator))
    mine = [theirs.detach().clone(), torch.empty(1003), torch.zeros(1003), torch.zeros(1003)]
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, weight_decay=0.1, foreach=False, fused=False)
    for step in range(1, 6):
        theirs.grad = torch.randn(1003, generator=generator)
        mine[1].copy_(theirs.grad)
        optimizer.step()
        adamw_step(*mine, **{**SETTINGS, "step": step})
        for ours, name in ((mine[2], "exp_avg"), (mine[3], "exp_avg_sq")):
            tolerance = 0.0 if torch_fuses else 4e-7
            torch.testing.assert_close(ours, optimizer.state[theirs][name], rtol=tolerance, atol=0)
        torch.testing.assert_close(mine[0], theirs.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("isa", available_isas())
def test_zero_gradients_on_fresh_moments_only_decay(isa: str) -> None:
    param = buffers(67)[0]
    got = stepped([param, *(torch.zeros(67) for _ in range(3))], isa, step=1)
    assert all(tensor.isfinite().all() for tensor in got)
    assert torch.equal(got[0], param * torch.tensor(1 - 3e-3 * 0.1))
    assert not got[2].any()
    assert not got[3].any()


def test_a_leaf_that_requires_grad_is_stepped_and_versions_move() -> None:
    tensors = buffers(20)
    expected = stepped(tensors, "scalar")
    leaf = torch.nn.Parameter(tensors[0])
    before = [tensor._version for tensor in (leaf, *tensors[1:])]
    adamw_step(leaf, *tensors[1:], **SETTINGS)
    assert_same_bits([leaf.detach(), *tensors[1:]], expected)
    moved = [tensor._version - old for tensor, old in zip((leaf, *tensors[1:]), before, strict=True)]
    assert moved == [1, 0, 1, 1]


def test_the_gil_is_free_while_the_kernel_runs() -> None:
    """A half-done step can only be seen by a thread that runs during it."""
    numel = 4_000_000
    saw_half_done = False
    # Tried again because a busy machine may not give this thread a core during one call; a held GIL fails all of them.
    for _ in range(50):
        tensors = [torch.zeros(numel), torch.ones(numel), torch.zeros(numel), torch.zeros(numel)]
        first, last = tensors[2][:1].numpy(), tensors[2][-1:].numpy()
        thread = threading.Thread(target=adamw_step, args=tensors, kwargs={**SETTINGS, "isa": "scalar"})
        thread.start()
        while thread.is_alive() and not saw_half_done:
            saw_half_done = last[0] == 0 and first[0] != 0
        thread.join()
        if saw_half_done:
            break
    assert saw_half_done


def noncontiguous(numel: int) -> Tensor:
    return torch.zeros(2 * numel)[::2]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (torch.zeros(8, dtype=torch.float64), TypeError, "torch.float64"),
        (torch.zeros(8, dtype=torch.bfloat16), TypeError, "torch.bfloat16"),
        (torch.zeros(8).numpy(), TypeError, "ndarray"),
        (torch.zeros(8).to_sparse(), ValueError, "layout torch.sparse_coo"),
        (torch.zeros(8, device="meta"), ValueError, "meta"),
        (noncontiguous(8), ValueError, r"strides \(2,\)"),
        (torch.zeros(2, 4), ValueError, r"shape \(2, 4\)"),
        (torch.zeros(()), ValueError, r"shape \(\)"),
        (torch.zeros(9), ValueError, "9"),
    ],
)
def test_a_wrong_buffer_is_refused_by_name_and_nothing_is_written(
    name: str, bad: Tensor, error: type[Exception], said: str
) -> None:
    tensors = dict(zip(NAMES, buffers(8), strict=True))
    good = {other: tensor for other, tensor in tensors.items() if other != name}
    before = {other: tensor.clone() for other, tensor in good.items()}
    with pytest.raises(error, match=rf"(?s){name} .*{said}"):
        adamw_step(**{**tensors, name: bad}, **SETTINGS)
    for other, tensor in good.items():
        assert torch.equal(tensor, before[other])


def test_overlapping_buffers_are_refused() -> None:
    tensors = buffers(8)
    whole = torch.zeros(12)
    with pytest.raises(ValueError, match="param and exp_avg share memory"):
        adamw_step(whole[:8], tensors[1], whole[4:], tensors[3], **SETTINGS)
    adjacent = torch.zeros(32).split(8)
    adamw_step(*adjacent, **SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("eps", -1e-8),
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta2", float("nan")),
        ("step", 0),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        adamw_step(*buffers(8), **{**SETTINGS, name: value})


def test_a_level_this_build_or_cpu_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {"avx2", "avx512", "no-such-level"} - set(available_isas())
    for isa in lacking:
        with pytest.raises(ValueError, match=f"'{isa}' .*available here: scalar, lanes16"):
            adamw_step(*buffers(8), **SETTINGS, isa=isa)
        monkeypatch.setenv("SHARDOPT_CPU_ISA", isa)
        with pytest.raises(ValueError, match=f"SHARDOPT_CPU_ISA='{isa}'"):
            adamw_step(*buffers(8), **SETTINGS)
        adamw_step(*buffers(8), **SETTINGS, isa="scalar")


@pytest.mark.parametrize("isa", available_isas())
def test_the_environment_can_force_a_level(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDOPT_CPU_ISA", isa)
    inputs = buffers(67)
    tensors = [tensor.clone() for tensor in inputs]
    adamw_step(*tensors, **SETTINGS)
    assert_same_bits(tensors, stepped(inputs, "scalar"))
