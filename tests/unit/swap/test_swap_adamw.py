"""SwapAdamW's numbers: as near to exact arithmetic as torch's, for parameters of every kind, the same bits each way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardopt import SwapAdamW
from shardopt.swap import host_engine
from shardopt.swap.host_kernel import available_isas
from tests.support.live_tensors import live_memory
from tests.unit.swap.swap_cases import DoubleAdamW, gradient, odd_parameters, same_bits, state_of

BF16 = torch.bfloat16


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for index, param in enumerate(params):
            param.grad = gradient(param, step, index)
        optimizer.step()


def errors(params: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """The largest error, and the mean of all elements'."""
    off = torch.cat([(param.double() - one).abs().reshape(-1) for param, one in zip(params, exact, strict=True)])
    return off.max().item(), off.mean().item()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}], ids=str)
def test_500_steps_are_as_near_to_float64_as_torch_G1_G4_G5_G17(options: dict[str, Any]) -> None:
    # No size of zero dims for the loop in float64 to trip on; G21 has those.
    mine, theirs = odd_parameters(sizes=(*range(1, 68, 3), 4099)), odd_parameters(sizes=(*range(1, 68, 3), 4099))
    exact = DoubleAdamW(list(mine), lr=0.01, **options)
    ours = SwapAdamW(mine, lr=0.01, **options)
    torchs = torch.optim.AdamW(theirs, lr=0.01, foreach=False, **options)
    for step in range(500):
        gradients = [gradient(param, step, index) for index, param in enumerate(mine)]
        for one, other, grad in zip(mine, theirs, gradients, strict=True):
            one.grad, other.grad = grad, None if grad is None else grad.clone()
        ours.step()
        torchs.step()
        exact.step(gradients)
    found, allowed = errors(list(mine), exact.params), errors(list(theirs), exact.params)
    assert found[0] <= allowed[0]
    assert found[1] <= allowed[1]
    # Of missing gradients neither counter nor parameter has moved.
    assert [int(ours.state[param]["step"]) for param in mine] == exact.steps
    assert len(set(exact.steps)) == 2
    for entries, (_, square, _) in zip((ours.state[param] for param in mine), exact.moments, strict=True):
        assert torch.allclose(entries["exp_avg_sq"].double(), square, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("master", ["fp32", "remainder16"])
def test_500_steps_of_bf16_parameters_with_masters_are_as_near_as_fp32_ones_G6(master: str) -> None:
    narrow = odd_parameters(BF16, sizes=(*range(1, 68, 7), 4099))
    wide = [nn.Parameter(param.detach().float()) for param in narrow]
    exact = DoubleAdamW(list(narrow), lr=0.01)
    ours, torchs = SwapAdamW(narrow, lr=0.01, master=master), torch.optim.AdamW(wide, lr=0.01, foreach=False)
    for step in range(500):
        gradients = [gradient(param, step, index) for index, param in enumerate(narrow)]
        for one, other, grad in zip(narrow, wide, gradients, strict=True):
            one.grad, other.grad = grad, None if grad is None else grad.float()
        ours.step()
        torchs.step()
        exact.step(gradients)
    values = [master_of(ours, param) for param in narrow]
    found, allowed = errors(values, exact.params), errors(list(wide), exact.params)
    assert found[0] <= allowed[0]
    assert found[1] <= allowed[1]
    for param, value in zip(narrow, values, strict=True):
        # The parameter is its master's rounding: of the two nearest, one.
        assert ((param.detach().float() - value).abs() <= value.abs() * 2**-8).all()


def master_of(optimizer: SwapAdamW, param: Tensor) -> Tensor:
    entries = optimizer.state[param]
    if "master" in entries:
        return entries["master"]
    return ((param.detach().view(torch.int16).int() << 16) + entries["master_lo"].int()).view(torch.float32)


@pytest.mark.parametrize(
    "options",
    [{}, {"moment_dtype": BF16, "amsgrad": True}, {"dtype": BF16, "master": "remainder16", "moment_dtype": BF16}],
    ids=str,
)
def test_the_same_bits_with_any_threads_and_at_every_isa_level_G2(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = options.pop("dtype", torch.float32)
    found: list[list[Tensor]] = []
    levels = [level for level in ("scalar", "avx2", "avx512", "lanes16") if level in available_isas()]
    assert {"scalar", "lanes16"} < {*levels} or len(levels) == 2
    for level in levels:
        monkeypatch.setenv("SHARDOPT_CPU_ISA", level)
        for threads in (1, 2, 3):
            params = odd_parameters(dtype, sizes=(1, 15, 16, 17, 67, 200_003))
            optimizer = SwapAdamW(params, lr=0.01, num_threads=threads, **options)
            run(optimizer, params, 4)
            found.append([*params, *state_of(optimizer)])
    assert all(same_bits(found[0], other) for other in found[1:])


def test_identical_parameters_get_identical_results_in_one_call_and_apart_G1() -> None:
    params = [nn.Parameter(torch.linspace(-1, 1, 37)) for _ in range(5)]
    alone = nn.Parameter(torch.linspace(-1, 1, 37))
    together, single = SwapAdamW(params, lr=0.1), SwapAdamW([alone], lr=0.1)
    for step in range(6):
        for param in (*params, alone):
            param.grad = torch.linspace(1, 2, 37) * (step + 1)
        together.step()
        single.step()
    assert all(torch.equal(param, alone) for param in params)


def test_a_thousand_zero_gradients_let_a_bf16_second_moment_decay() -> None:
    param = nn.Parameter(torch.zeros(4096))
    optimizer = SwapAdamW([param], moment_dtype=BF16)
    optimizer.state[param]["exp_avg_sq"].fill_(1.0)
    param.grad = torch.zeros(4096)
    for _ in range(1000):
        optimizer.step()
    mean = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    assert abs(mean / 0.999**1000 - 1) < 0.01
    # Rounded to nearest it would stay where it is.
    assert (torch.ones((), dtype=BF16) * 0.999).item() == 1.0


def test_random_bits_depend_on_seed_parameter_and_step_and_on_nothing_else() -> None:
    def moments(seed: int, *, beside: int) -> list[Tensor]:
        params = [nn.Parameter(torch.zeros(999)) for _ in range(2)]
        more = [nn.Parameter(torch.zeros(7)) for _ in range(beside)]
        optimizer = SwapAdamW([*params, *more], moment_dtype=BF16, seed=seed)
        for param in (*params, *more):
            param.grad = torch.full_like(param, 1 / 3)
        optimizer.step()
        first = [optimizer.state[param]["exp_avg"].clone() for param in params]
        optimizer.step()
        return [*first, *(optimizer.state[param]["exp_avg"].clone() for param in params)]

    base = moments(1, beside=0)
    assert same_bits(base, moments(1, beside=3))
    assert not same_bits(base, moments(2, beside=0))
    # Equal values in two parameters round apart, and half of them up.
    assert not torch.equal(base[0], base[1])
    assert len(base[0].unique()) == 2


def test_counters_count_whatever_the_default_dtype_is_G9() -> None:
    torch.set_default_dtype(BF16)
    try:
        param = nn.Parameter(torch.zeros(3, dtype=torch.float32))
        optimizer = SwapAdamW([param])
        param.grad = torch.ones(3, dtype=torch.float32)
        for _ in range(300):
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    step = optimizer.state[param]["step"]
    assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 300)


def test_decoupled_decay_is_each_optimizers_own_G7() -> None:
    mine, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    ours, adam = SwapAdamW([mine], lr=0.1, weight_decay=0.5), torch.optim.Adam([theirs], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        mine.grad, theirs.grad = torch.zeros(5), torch.zeros(5)
        ours.step()
        adam.step()
    assert torch.allclose(mine, torch.full((5,), (1 - 0.1 * 0.5) ** 3))
    assert not torch.allclose(theirs, mine)


@pytest.mark.parametrize("place", ["first", "middle", "last", "all"])
def test_parameters_without_elements_change_nothing_for_others_G21(place: str) -> None:
    full = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))]
    empty = nn.Parameter(torch.ones(0, 4))
    listed = {"first": [empty, *full], "middle": [full[0], empty, full[1]], "last": [*full, empty], "all": [empty]}[
        place
    ]
    optimizer = SwapAdamW(listed, lr=0.1)
    for param in listed:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param != 1).all() for param in listed)
    assert optimizer.state[empty]["exp_avg"].shape == (0, 4)
    assert optimizer.state[empty]["step"] == 1


def test_without_gradients_nothing_happens() -> None:
    params = odd_parameters(sizes=(3,))
    before = [param.detach().clone() for param in params]
    optimizer = SwapAdamW(params, lr=1.0)
    optimizer.step()
    assert same_bits([param.detach() for param in params], before)
    assert all(entries["step"] == 0 for entries in optimizer.state.values())


@pytest.mark.parametrize("narrow", [False, True])
def test_gradients_in_another_order_of_memory_or_dtype_are_read_right_G5(narrow: bool) -> None:
    param, twin = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6, 4))
    values = torch.arange(24.0).reshape(6, 4)
    optimizer, other = SwapAdamW([param], lr=0.1), SwapAdamW([twin], lr=0.1)
    param.grad = values.t().contiguous().t()
    assert not param.grad.is_contiguous()
    if narrow:
        if not hasattr(torch.Tensor, "grad_dtype"):
            pytest.skip("this torch has no gradients of another dtype than their parameter's")
        param.grad = None
        param.grad_dtype = BF16
        param.grad = values.to(BF16)
    twin.grad = values.clone()
    optimizer.step()
    other.step()
    assert torch.equal(param, twin)
    assert param.grad is not None
    assert torch.equal(param.grad.float(), values)


def test_a_gradient_is_never_written_not_even_scaled() -> None:
    param = nn.Parameter(torch.ones(100))
    optimizer = SwapAdamW([param], maximize=True)
    param.grad = torch.linspace(-1, 1, 100)
    before, version = param.grad.clone(), param.grad._version
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(param.grad, before)
    assert param.grad._version == version


def test_a_step_moves_the_versions_of_parameters() -> None:
    # Or autograd would not notice that a tensor it has saved for backward was changed.
    param = nn.Parameter(torch.ones(3))
    optimizer = SwapAdamW([param])
    param.grad = torch.ones(3)
    loss = (param * param).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_steps_allocate_nothing_that_stays_and_keep_their_memory_F14() -> None:
    params = [nn.Parameter(torch.zeros(500)) for _ in range(20)]
    optimizer = SwapAdamW(params)
    for param in params:
        param.grad = torch.ones(500)
    before = [tensor.data_ptr() for tensor in state_of(optimizer)]
    size = optimizer.slab_bytes
    optimizer.step()
    alive = live_memory()
    for _ in range(50):
        optimizer.step()
    assert live_memory() == alive
    assert [tensor.data_ptr() for tensor in state_of(optimizer)] == before
    assert optimizer.slab_bytes == size == 20 * 500 * 8


def test_one_call_of_the_kernel_steps_all_parameters_F10(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    kernel = host_engine.adamw_rows

    def counted(rows: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(len(rows))
        kernel(rows, *args, **kwargs)

    monkeypatch.setattr(host_engine, "adamw_rows", counted)
    params = [nn.Parameter(torch.zeros(4)) for _ in range(30)]
    groups = [{"params": params[:10], "lr": 0.1}, {"params": params[10:], "betas": (0.5, 0.9)}]
    optimizer = SwapAdamW(groups)
    for param in params:
        param.grad = torch.ones(4)
    optimizer.step()
    assert calls == [30]


def test_moments_of_fp32_parameters_equal_torchs_bit_for_bit_on_vector_cpus() -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch's own loops contract multiply-adds on CPUs with AVX2 or AVX-512 only")
    mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 640)) for _ in range(2))
    ours, torchs = SwapAdamW([mine]), torch.optim.AdamW([theirs], foreach=False)
    for step in range(10):
        mine.grad = torch.linspace(-3, 1, 640) * math.cos(step)
        theirs.grad = mine.grad.clone()
        ours.step()
        torchs.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[mine][name], torchs.state[theirs][name])
