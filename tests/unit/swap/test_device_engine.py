"""SwapAdamW whose parameters are on a simulated device: the bits of the host's, whatever the device does when."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import ShardedStateOptimizer, ShardoptError, SwapAdamW
from shardopt.swap.simulator import SimBackend
from tests.unit.swap.device_cases import (
    BF16,
    KINDS,
    everything,
    give_gradients,
    groups,
    on_device,
    pair,
    parameters,
    step_both,
)
from tests.unit.swap.swap_cases import same_bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget_bytes", [0, 40_000, 1 << 30])
def test_the_bits_are_those_of_the_host(kind: str, budget_bytes: int) -> None:
    options = dict(KINDS[kind])
    dtype = options.pop("dtype", torch.float32)
    for seed in range(4):
        params, twins = parameters(dtype=dtype), parameters(dtype=dtype)
        backend = SimBackend(seed)
        optimizer = on_device(groups(params), backend, lr=0.05, device_budget_bytes=budget_bytes, **options)
        other = SwapAdamW(groups(twins), lr=0.05, **options)
        for step in range(5):
            for some in (params, twins):
                give_gradients(some, step, without=(1, 3) if step % 2 else ())
            optimizer.step()
            other.step()
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []
        assert backend.counts.launches > 5


@pytest.mark.parametrize("budget_bytes", [0, 40_000])
@pytest.mark.parametrize("kind", ["plain", "fp32 masters", "remainders"])
def test_a_save_while_copies_are_in_flight_has_all_of_the_step_F6(kind: str, budget_bytes: int) -> None:
    for seed in range(6):
        params, optimizer, twins, other, backend = pair(seed, kind, device_budget_bytes=budget_bytes)
        for number in range(3):
            step_both(params, optimizer, twins, other, number)
            saved, wanted = optimizer.state_dict()["state"], other.state_dict()["state"]
            for place, entries in wanted.items():
                assert same_bits([saved[place][name] for name in entries], list(entries.values()))
        assert backend.races == []


@pytest.mark.parametrize("budget_bytes", [0, 40_000, 1 << 30])
@pytest.mark.parametrize("kind", ["plain", "fp32 masters", "remainders"])
def test_a_load_while_copies_are_in_flight_replaces_all_of_the_state(kind: str, budget_bytes: int) -> None:
    for seed in range(6):
        params, optimizer, twins, other, backend = pair(seed, kind, device_budget_bytes=budget_bytes)
        step_both(params, optimizer, twins, other, 0)
        saved = copy.deepcopy(other.state_dict())
        for number in range(1, 6):
            step_both(params, optimizer, twins, other, number)
            if number % 2:
                optimizer.load_state_dict(copy.deepcopy(saved))
                other.load_state_dict(copy.deepcopy(saved))
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []


@pytest.mark.parametrize("budget_bytes", [0, 40_000])
def test_a_group_that_is_added_while_copies_are_in_flight_changes_nothing_of_the_others(budget_bytes: int) -> None:
    for seed in range(6):
        params, optimizer, twins, other, backend = pair(seed, device_budget_bytes=budget_bytes)
        for number in range(4):
            step_both(params, optimizer, twins, other, number)
            more, same = parameters([(9, 300), (4,)]), parameters([(9, 300), (4,)])
            optimizer.add_param_group({"params": more, "lr": 0.3})
            other.add_param_group({"params": same, "lr": 0.3})
            params, twins = [*params, *more], [*twins, *same]
        step_both(params, optimizer, twins, other, 4)
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []


def test_state_that_is_read_printed_or_written_by_hand_waits_for_the_device() -> None:
    for seed in range(6):
        params, optimizer, twins, other, backend = pair(seed)
        for number in range(4):
            step_both(params, optimizer, twins, other, number)
            assert repr(optimizer.state) == repr(other.state)
            for some, one in ((params, optimizer), (twins, other)):
                one.state[some[1]]["exp_avg"].mul_(0.5)
                one.state[some[2]]["exp_avg_sq"] = torch.ones(5000)
                one.state.pop(some[5])
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []


def test_state_written_in_place_reaches_chunks_that_stay_on_the_device() -> None:
    params, optimizer, twins, other, _ = pair(0, device_budget_bytes=1 << 30)
    for number in range(4):
        step_both(params, optimizer, twins, other, number)
        for some, one in ((params, optimizer), (twins, other)):
            one.state[some[1]]["exp_avg"].mul_(0.5)
    assert same_bits(everything(params, optimizer), everything(twins, other))


@pytest.mark.parametrize("skips", [(), (1,), (0, 1, 3)])
def test_a_scalers_scale_and_verdict_stay_on_the_device(skips: tuple[int, ...]) -> None:
    for seed in range(4):
        params, optimizer, twins, other, backend = pair(seed)
        for number in range(5):
            for one in (optimizer, other):
                one.grad_scale, one.found_inf = torch.tensor(512.0), torch.tensor(float(number in skips))
            step_both(params, optimizer, twins, other, number)
            # The verdict is of the parameters in the order that they had.
            for one in (optimizer, other):
                one.param_groups.reverse()
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []


def test_a_steady_step_allocates_nothing_and_lets_the_host_wait_for_nothing() -> None:
    for budget_bytes in (0, 40_000, 1 << 30):
        params, backend = parameters(), SimBackend(eagerness=1.0)
        optimizer = on_device(groups(params), backend, lr=0.05, device_budget_bytes=budget_bytes)
        wrapped = ShardedStateOptimizer(optimizer, nn.ParameterList(params))
        for number in range(12):
            give_gradients(params, number)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
            (wrapped if number % 2 else optimizer).step()
            if number == 10:
                counts = copy.copy(backend.counts)
        assert backend.counts.launches > counts.launches
        if budget_bytes == 1 << 30:
            # The tables, and a scaler's verdict: what stays on the device is not copied.
            assert backend.counts.copies == counts.copies + 2
        assert backend.counts.allocations == counts.allocations
        assert backend.counts.host_allocations == counts.host_allocations
        assert backend.counts.synchronizations == counts.synchronizations == 0


def test_gradients_of_two_dtypes_and_maxima_of_some_groups_are_launches_of_their_own() -> None:
    for seed in range(4):
        params, twins = parameters(dtype=BF16), parameters(dtype=BF16)
        backend = SimBackend(seed)
        options: dict[str, Any] = {"lr": 0.05, "amsgrad": True, "master": "fp32"}
        optimizer, other = on_device(groups(params), backend, **options), SwapAdamW(groups(twins), **options)
        for number in range(4):
            for some, one in ((params, optimizer), (twins, other)):
                give_gradients(some, number)
                one.param_groups[1]["amsgrad"] = number % 2 == 0
                for param in some[::3]:
                    grad = param.grad.float()
                    param.grad = None
                    param.grad_dtype = None
                    param.grad = grad
                one.step()
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []


def test_the_first_step_after_a_clip_has_its_factor() -> None:
    for seed in range(3):
        params, optimizer, twins, other, backend = pair(seed)
        for number in range(3):
            for some, one in ((params, optimizer), (twins, other)):
                give_gradients(some, number)
                one.clip_grad_norm_(0.5)
                one.step()
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []


@pytest.mark.parametrize("kind", ["fp32 masters", "remainders"])
def test_weights_that_are_written_between_steps_have_their_masters_follow_F12(kind: str) -> None:
    for seed in range(4):
        params, optimizer, twins, other, backend = pair(seed, kind, device_budget_bytes=(seed % 2) * 40_000)
        for number in range(4):
            step_both(params, optimizer, twins, other, number)
            # The device's writes to the weights come first, as on one stream.
            assert optimizer.state
            for some in (params, twins):
                with torch.no_grad():
                    some[1].fill_(0.25)
        assert same_bits(everything(params, optimizer), everything(twins, other))
        assert backend.races == []


def test_what_is_in_no_group_any_more_is_not_stepped() -> None:
    params, optimizer, twins, other, backend = pair(1)
    for number in range(4):
        step_both(params, optimizer, twins, other, number)
        for one in (optimizer, other):
            if number == 1:
                del one.param_groups[0]["params"][1]
            if number == 2:
                one.param_groups.reverse()
    state = [tensor for _, tensor in sorted(optimizer.state[params[1]].items())]
    assert same_bits(
        [*state, params[2].detach()], [*(t for _, t in sorted(other.state[twins[1]].items())), twins[2].detach()]
    )
    assert same_bits([param.detach() for param in params], [twin.detach() for twin in twins])
    assert backend.races == []


def test_a_launch_that_fails_poisons_until_a_good_load(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer, twins, other, _ = pair(0)
    step_both(params, optimizer, twins, other, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [param.detach().clone() for param in params]
    with monkeypatch.context() as patch:
        patch.setattr(
            optimizer._engine._ring, "step", lambda *args: (_ for _ in ()).throw(OSError("the device is gone"))
        )
        give_gradients(params, 1)
        with pytest.raises(OSError, match="the device is gone"):
            optimizer.step()
    with pytest.raises(ShardoptError, match="the device is gone"):
        optimizer.step()
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    step_both(params, optimizer, twins, other, 1)
    assert same_bits(everything(params, optimizer), everything(twins, other))


@pytest.mark.parametrize("kind", ["plain", "fp32 masters", "remainders"])
def test_the_device_holds_the_ring_alone_however_large_the_state_is_F11(kind: str) -> None:
    held: list[int] = []
    of_state: list[int] = []
    for rows in (100, 400):
        options = dict(KINDS[kind])
        params = parameters([(rows, 1024), (rows, 1024)], dtype=options.pop("dtype", torch.float32))
        backend = SimBackend(eagerness=1.0)
        optimizer = on_device(params, backend, device_budget_bytes=0, **options)
        for number in range(4):
            give_gradients(params, number)
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        of_state.append(sum(one.nbytes for entries in optimizer.state.values() for one in entries.values()))
        held.append(backend.counts.allocated_bytes)
        assert backend.races == []
    # Tables of rows grow, of less than 512 bytes for each 8,192 of moments.
    assert 16 * (held[1] - held[0]) < of_state[1] - of_state[0]
