"""SwapAdamW on a simulated device where things go wrong, or where there is next to nothing to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import ShardoptError, SwapAdamW
from shardopt.swap import device_engine, engine
from shardopt.swap.ring import Ring
from shardopt.swap.simulator import SimBackend
from tests.unit.swap.device_cases import BF16, everything, give_gradients, on_device, pair, parameters, step_both
from tests.unit.swap.swap_cases import same_bits


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


@pytest.mark.parametrize("where", [(engine, "copy_all"), (engine.Engine, "index")], ids=["filling", "indexing"])
@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_group_whose_state_cannot_be_made_is_not_there_afterwards(
    is_on_device: bool, where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"lr": 0.05, "master": "fp32"}
    params, more = parameters(dtype=BF16), parameters([(9, 300)], dtype=BF16)
    optimizer = on_device(params, SimBackend(), **options) if is_on_device else SwapAdamW(params, **options)
    twins = parameters(dtype=BF16)
    other, nbytes = SwapAdamW(twins, **options), optimizer.slab_bytes
    device_bytes = optimizer._engine.device_bytes if is_on_device else 0

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.add_param_group({"params": more})
    assert (len(optimizer.param_groups), optimizer.slab_bytes) == (1, nbytes)
    assert more[0] not in optimizer.state
    assert not is_on_device or optimizer._engine.device_bytes == device_bytes
    step_both(params, optimizer, twins, other, 9)
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
