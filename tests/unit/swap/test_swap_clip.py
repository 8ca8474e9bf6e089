"""Clipping that reads gradients once: what the next step takes are the clipped ones, and only that step's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardopt import PresentationError, SwapAdamW, clip_grad_norm_
from tests.unit.swap.swap_cases import gradient, odd_parameters, same_bits, state_of

SIZES = (0, 1, 5, 67, 300, 100_003)


def with_gradients(dtype: torch.dtype = torch.float32, step: int = 1) -> list[nn.Parameter]:
    params = odd_parameters(dtype, sizes=SIZES)
    for index, param in enumerate(params):
        param.grad = gradient(param, step, index)
    assert any(param.grad is None for param in params)
    return params


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_a_clip_and_a_step_give_what_clipped_gradients_give(order: float, max_norm: float) -> None:
    mine, theirs = with_gradients(), with_gradients()
    ours, twin = SwapAdamW(mine, lr=0.1), SwapAdamW(theirs, lr=0.1)
    before = [param.grad.clone() for param in mine if param.grad is not None]
    norm = ours.clip_grad_norm_(max_norm, order)
    # In place, by torch's own kernels.
    other = clip_grad_norm_(theirs, max_norm, order)
    assert norm.dtype == torch.float32
    assert torch.allclose(norm, other, rtol=1e-6)
    assert same_bits([param.grad for param in mine if param.grad is not None], before)
    ours.step()
    twin.step()
    for one, two in zip(state_of(ours), state_of(twin), strict=True):
        assert torch.allclose(one, two, rtol=2e-5, atol=0)


def test_the_norm_is_exact_to_double_and_the_same_for_any_number_of_threads() -> None:
    exact = math.sqrt(math.fsum(p.grad.double().square().sum().item() for p in with_gradients() if p.grad is not None))
    found = {SwapAdamW(with_gradients(), num_threads=threads).clip_grad_norm_(1.0).item() for threads in (1, 2, 3)}
    assert found == {torch.tensor(exact).float().item()}


def test_bf16_gradients_are_clipped_without_being_rounded_again() -> None:
    params = with_gradients(torch.bfloat16)
    wide = [nn.Parameter(param.detach().float()) for param in params]
    for one, two in zip(wide, params, strict=True):
        one.grad = None if two.grad is None else two.grad.float()
    ours, exact = SwapAdamW(params, master="fp32"), SwapAdamW(wide)
    for optimizer in (ours, exact):
        optimizer.clip_grad_norm_(0.25)
        optimizer.step()
    for one, two in zip(params, wide, strict=True):
        assert torch.equal(ours.state[one]["exp_avg"], exact.state[two]["exp_avg"])


def one_parameter() -> tuple[nn.Parameter, SwapAdamW]:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), 5.0)
    return param, SwapAdamW([param], betas=(0.0, 0.0))


def taken(param: nn.Parameter, optimizer: SwapAdamW) -> float:
    """The gradient that a step has taken, which with these betas is the first moment."""
    optimizer.step()
    return round(optimizer.state[param]["exp_avg"][0].item(), 4)


def test_exactly_one_step_uses_a_clip() -> None:
    param, optimizer = one_parameter()
    assert optimizer.clip_grad_norm_(1.0).item() == 10.0
    assert taken(param, optimizer) == 0.5
    assert taken(param, optimizer) == 5.0


def test_a_second_clip_replaces_the_first() -> None:
    param, optimizer = one_parameter()
    optimizer.clip_grad_norm_(1.0)
    assert optimizer.clip_grad_norm_(2.0).item() == 10.0
    assert taken(param, optimizer) == 1.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_a_clip(set_to_none: bool) -> None:
    param, optimizer = one_parameter()
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad(set_to_none)
    param.grad = torch.full((4,), 3.0)
    assert taken(param, optimizer) == 3.0


@pytest.mark.parametrize("how", ["new", "added", "gone", "in the same place"])
def test_a_step_with_other_gradients_than_those_that_were_clipped_is_refused(how: str) -> None:
    param, optimizer = one_parameter()
    optimizer.clip_grad_norm_(1.0)
    held = param.grad
    if how == "added":
        param.grad.add_(1.0)  # pyrefly: ignore[missing-attribute]
    elif how == "in the same place":
        # As when model.zero_grad() has freed it, and the next backward pass gets its memory.
        param.grad = held.detach()  # pyrefly: ignore[missing-attribute]
    else:
        param.grad = torch.ones(4) if how == "new" else None
    with pytest.raises(PresentationError, match="gradients have changed since clip_grad_norm_"):
        optimizer.step()
    assert not param.any()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def test_a_closure_that_clips_its_own_gradients_steps_with_them() -> None:
    param, optimizer = one_parameter()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * 5).sum()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        return loss

    assert optimizer.step(closure) == 0
    assert round(optimizer.state[param]["exp_avg"][0].item(), 4) == 0.5


def test_norms_that_are_not_finite_are_an_error_if_asked_and_else_as_torchs() -> None:
    param, optimizer = one_parameter()
    param.grad = torch.tensor([torch.inf, 1.0, 1.0, 1.0])
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert optimizer.clip_grad_norm_(1.0).item() == math.inf
    optimizer.step()
    # inf times 0, and all others times 0.
    assert optimizer.state[param]["exp_avg"].isnan().tolist() == [True, False, False, False]


@pytest.mark.parametrize("arguments", [(-1.0,), (1.0, 0.0), (math.nan,)])
def test_numbers_out_of_range_are_refused_and_leave_no_clip(arguments: tuple[float, ...]) -> None:
    param, optimizer = one_parameter()
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="it must"):
        optimizer.clip_grad_norm_(*arguments)
    assert taken(param, optimizer) == 5.0


def test_the_packages_own_clip_scales_gradients_themselves() -> None:
    param, optimizer = one_parameter()
    assert clip_grad_norm_(optimizer, 1.0).item() == 10.0
    assert taken(param, optimizer) == 0.5


def test_a_grad_scalers_scale_and_a_clip_are_folded_into_one_factor() -> None:
    param, optimizer = one_parameter()
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((param * 5).sum())
    param.grad = torch.full((4,), 20.0)
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    assert round(optimizer.state[param]["exp_avg"][0].item(), 4) == 0.5
    # Without unscale_, the kernel divides; gradients stay scaled.
    scaler.update()
    param.grad = torch.full((4,), 20.0)
    scaler.step(optimizer)
    assert optimizer.state[param]["exp_avg"][0].item() == 5.0
    assert param.grad[0].item() == 20.0


def test_an_overflow_skips_the_step_and_uses_the_clip_up() -> None:
    param, optimizer = one_parameter()
    optimizer.clip_grad_norm_(1.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert not param.any()
    assert optimizer.state[param]["step"] == 0
    del optimizer.grad_scale, optimizer.found_inf
    assert taken(param, optimizer) == 5.0


def test_gradients_that_are_unscaled_after_a_clip_are_not_those_it_was_for() -> None:
    params = with_gradients()
    optimizer = SwapAdamW(params)
    optimizer.clip_grad_norm_(0.5)
    grads = [param.grad for param in params if param.grad is not None]
    # As GradScaler.unscale_ does, which moves no version counter.
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor([0.5]))
    with pytest.raises(PresentationError, match="gradients have changed since clip_grad_norm_"):
        optimizer.step()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
