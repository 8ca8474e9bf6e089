"""SwapAdamW whose parameters are on a simulated device: the bits of the host's, whatever the device does when."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import ShardedStateOptimizer, ShardoptError, SwapAdamW
from shardopt.swap import device_engine, engine
from shardopt.swap.ring import Ring
from shardopt.swap.simulator import SimBackend
from tests.unit.swap.device_cases import BF16, everything, give_gradients, on_device, parameters
from tests.unit.swap.swap_cases import same_bits

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "bf16 moments": {"moment_dtype": BF16, "amsgrad": True, "seed": 7},
    "bf16": {"dtype": BF16},
    "fp32 masters": {"dtype": BF16, "master": "fp32", "moment_dtype": BF16},
    "remainders": {"dtype": BF16, "master": "remainder16"},
}


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.0}]


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


def pair(
    seed: int, kind: str = "plain", **options: Any
) -> tuple[list[Any], SwapAdamW, list[Any], SwapAdamW, SimBackend]:
    """An optimizer on a device, and its twin on the host."""
    given = {**KINDS[kind], **options}
    dtype = given.pop("dtype", torch.float32)
    params, twins = parameters(dtype=dtype), parameters(dtype=dtype)
    backend = SimBackend(seed)
    host = {key: value for key, value in given.items() if key != "device_budget_bytes"}
    return (
        params,
        on_device(groups(params), backend, lr=0.05, **given),
        twins,
        SwapAdamW(groups(twins), lr=0.05, **host),
        backend,
    )


def step_both(params: list[Any], optimizer: SwapAdamW, twins: list[Any], other: SwapAdamW, number: int) -> None:
    for some in (params, twins):
        give_gradients(some, number, without=(number % len(some),))
    optimizer.step()
    other.step()


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


def test_a_group_for_which_there_is_no_room_leaves_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer, twins, other, backend = pair(0, device_budget_bytes=40_000)
    step_both(params, optimizer, twins, other, 0)
    own, found = optimizer._engine, []

    def full(*args: Any, **options: Any) -> Any:
        # The old one has given its memory back by now.
        found.append(own._ring)
        monkeypatch.setattr(device_engine, "Ring", Ring)
        raise MemoryError("the device is full")

    monkeypatch.setattr(device_engine, "Ring", full)
    with pytest.raises(MemoryError, match="the device is full"):
        optimizer.add_param_group({"params": parameters([(9, 300)])})
    assert found == [None]
    assert len(optimizer.param_groups) == 2
    step_both(params, optimizer, twins, other, 1)
    assert same_bits(everything(params, optimizer), everything(twins, other))
    assert backend.races == []


def test_parameters_that_begin_anywhere_in_memory_are_stepped_without_wide_accesses() -> None:
    backend = SimBackend()
    params = [nn.Parameter(torch.ones(3001)[1:]), nn.Parameter(torch.ones(65, 65)[:, 1:])]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer, other = on_device(params, backend, lr=0.05), SwapAdamW(twins, lr=0.05)
    for number in range(3):
        step_both(params, optimizer, twins, other, number)
    assert same_bits(everything(params, optimizer), everything(twins, other))
    assert backend.races == []


def test_a_rank_that_owns_nothing_of_what_is_stepped_steps_all_the_same() -> None:
    # As where a small head is trained on many ranks: most have no element of it.
    for shapes, without in (([(0, 4)], ()), ([(5,), (0, 4)], (0,))):
        for verdict in (None, 0.0, 1.0):
            params, twins = parameters(shapes), parameters(shapes)
            backend = SimBackend()
            optimizer, other = on_device(params, backend, lr=0.05), SwapAdamW(twins, lr=0.05)
            for number in range(3):
                for some, one in ((params, optimizer), (twins, other)):
                    give_gradients(some, number, without=without)
                    if verdict is not None:
                        one.grad_scale, one.found_inf = torch.tensor(2.0), torch.tensor(verdict)
                    one.step()
            assert same_bits(everything(params, optimizer), everything(twins, other))
            assert backend.races == []


@pytest.mark.parametrize("is_on_device", [True, False])
def test_parameters_that_are_withdrawn_leave_the_next_ones_the_random_bits_that_they_had(is_on_device: bool) -> None:
    options: dict[str, Any] = {"lr": 0.05, "moment_dtype": BF16}
    found = []
    for withdraws in (False, True):
        params, more, last = parameters([(9, 300)]), parameters([(40,)]), parameters([(2000,)])
        optimizer = on_device(params, SimBackend(), **options) if is_on_device else SwapAdamW(params, **options)
        if withdraws:
            give_gradients(params, 7)
            optimizer.step()
            optimizer.add_param_group({"params": more})
            del optimizer.param_groups[-1]
            optimizer.state.pop(more[0])
            optimizer.withdraw(more)
            optimizer.load_state_dict(SwapAdamW(parameters([(9, 300)]), **options).state_dict())
            with torch.no_grad():
                params[0].copy_(parameters([(9, 300)])[0])
        optimizer.add_param_group({"params": last})
        for number in range(3):
            give_gradients([*params, *last], number)
            optimizer.step()
        found.append(everything([*params, *last], optimizer))
    assert same_bits(*found)


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_group_whose_state_cannot_be_filled_is_not_there_afterwards(
    is_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"lr": 0.05, "master": "fp32"}
    params, more = parameters(dtype=BF16), parameters([(9, 300)], dtype=BF16)
    optimizer = on_device(params, SimBackend(), **options) if is_on_device else SwapAdamW(params, **options)
    twins = parameters(dtype=BF16)
    other, nbytes = SwapAdamW(twins, **options), optimizer.slab_bytes

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "copy_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.add_param_group({"params": more})
    assert (len(optimizer.param_groups), optimizer.slab_bytes) == (1, nbytes)
    assert more[0] not in optimizer.state
    optimizer.add_param_group({"params": more})
    for number in range(3):
        step_both(params, optimizer, twins, other, number)
    assert same_bits(everything(params, optimizer), everything(twins, other))


def test_an_optimizer_that_is_made_in_inference_mode_steps_with_a_scaler() -> None:
    params = parameters()
    with torch.inference_mode():
        optimizer = on_device(params, SimBackend(), lr=0.05)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    give_gradients(params, 0)
    optimizer.step()
    assert all(optimizer.state[param]["step"] == 0 for param in params)


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_step_that_is_refused_leaves_no_scale_for_the_next_one(is_on_device: bool) -> None:
    params = parameters([(5,)])
    optimizer = on_device(params, SimBackend(), lr=0.05) if is_on_device else SwapAdamW(params, lr=0.05)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    params[0].grad = torch.ones(5).to_sparse()
    with pytest.raises(ShardoptError, match="sparse"):
        optimizer.step()
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_a_step_that_a_scaler_skips_is_none_between_masters_and_their_weights() -> None:
    params, optimizer, twins, other, _ = pair(0, "remainders")
    for number in range(2):
        step_both(params, optimizer, twins, other, number)
    saved, weights = copy.deepcopy(other.state_dict()), [param.detach().clone() for param in twins]
    step_both(params, optimizer, twins, other, 2)
    for some, one in ((params, optimizer), (twins, other)):
        one.load_state_dict(copy.deepcopy(saved))
        one.grad_scale, one.found_inf = torch.tensor(1.0), torch.tensor(1.0)
        give_gradients(some, 3)
        one.step()
        del one.grad_scale, one.found_inf
        assert one.state
        with torch.no_grad():
            for param, weight in zip(some, weights, strict=True):
                param.copy_(weight)
    step_both(params, optimizer, twins, other, 4)
    assert same_bits(everything(params, optimizer), everything(twins, other))


def test_live_state_that_is_loaded_is_what_the_device_has_made_of_it() -> None:
    params, optimizer, twins, other, backend = pair(0)
    live = [one.state_dict() for one in (optimizer, other)]
    for one in (optimizer, other):
        one.grad_scale, one.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    step_both(params, optimizer, twins, other, 0)
    for one, state in zip((optimizer, other), live, strict=True):
        one.load_state_dict(state)
    assert same_bits(everything(params, optimizer), everything(twins, other))
    assert backend.races == []


@pytest.mark.parametrize("is_on_device", [True, False])
def test_state_that_starts_anew_is_in_no_graph(is_on_device: bool) -> None:
    params = parameters([(5,), (6,)], dtype=BF16)
    options: dict[str, Any] = {"master": "fp32"}
    optimizer = on_device(params, SimBackend(), **options) if is_on_device else SwapAdamW(params, **options)
    saved = optimizer.state_dict()
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    assert not any(tensor.requires_grad for param in params for tensor in optimizer.state[param].values())
    copy.deepcopy(optimizer.state_dict())


def test_options_that_a_device_cannot_keep_are_refused_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match=r"chunk_bytes is 100; .*the least there can be in a chunk"):
        on_device(parameters(), SimBackend(), chunk_bytes=100)
