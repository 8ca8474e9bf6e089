"""What users do to an optimizer between steps: groups, state, memory, closures, hooks."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import PlacementError, PresentationError, SwapAdamW
from tests.unit.swap.swap_cases import same_bits, state_of

BF16 = torch.bfloat16


def ones(*shape: int) -> nn.Parameter:
    param = nn.Parameter(torch.ones(shape))
    param.grad = torch.ones(shape)
    return param


def moved(param: Tensor) -> bool:
    return bool((param != 1).all())


def test_everything_in_the_groups_is_read_anew_in_every_step() -> None:
    first, second = ones(4), ones(4)
    optimizer = SwapAdamW([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.1), amsgrad=True)
    twins = [ones(4), ones(4)]
    torchs = torch.optim.AdamW([{"params": [p]} for p in twins], lr=0.1, amsgrad=True, foreach=False)
    changes: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"betas": (0.5, 0.6)},
        {"eps": 1e-2},
        {"weight_decay": 0.5},
        {"maximize": True},
        {"amsgrad": False},
    ]
    for change in changes:
        for one in (optimizer, torchs):
            one.param_groups[1].update(change)
            one.step()
        assert torch.allclose(first, twins[0], rtol=1e-6, atol=1e-7), change
        assert torch.allclose(second, twins[1], rtol=1e-6, atol=1e-7), change
    with torch.no_grad():
        optimizer.param_groups[0]["lr"].zero_()
    held = first.detach().clone()
    optimizer.step()
    assert torch.equal(first, held)


def test_groups_may_keep_maxima_or_not_each() -> None:
    one, two = ones(3), ones(3)
    optimizer = SwapAdamW([{"params": [one], "amsgrad": True}, {"params": [two]}])
    assert "max_exp_avg_sq" in optimizer.state[one]
    assert "max_exp_avg_sq" not in optimizer.state[two]
    optimizer.step()
    assert optimizer.state[one]["max_exp_avg_sq"].all()


def test_a_group_that_is_added_gets_its_memory_then_and_leaves_that_of_others() -> None:
    first, later = ones(5), ones(2, 3)
    optimizer = SwapAdamW([first], lr=0.1)
    optimizer.step()
    held = [tensor.data_ptr() for tensor in state_of(optimizer)]
    optimizer.add_param_group({"params": [later], "lr": 0.5})
    assert optimizer.slab_bytes == (5 + 6) * 8
    optimizer.step()
    assert moved(later)
    assert [int(optimizer.state[param]["step"]) for param in (first, later)] == [2, 1]
    assert [tensor.data_ptr() for tensor in state_of(optimizer)][: len(held)] == held


def test_a_group_that_cannot_be_added_leaves_everything_as_it_was() -> None:
    first = ones(5)
    optimizer = SwapAdamW([first])
    optimizer.step()
    held = [tensor.clone() for tensor in state_of(optimizer)]
    with pytest.raises(PlacementError, match=r"group 1, parameter 0 of shape \(3,\): its dtype is torch\.float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float16))]})
    twice = ones(2)
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(PresentationError, match="twice"):
        optimizer.add_param_group({"params": [twice, twice]})
    assert len(optimizer.param_groups) == len(optimizer.state) == 1
    assert same_bits(state_of(optimizer), held)
    optimizer.step()


def test_a_slab_that_cannot_be_made_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ones(5)
    optimizer = SwapAdamW([first])

    def fail(*args: object) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._engine.slabs, "make", fail)
        with pytest.raises(MemoryError, match="no room"):
            optimizer.add_param_group({"params": [ones(3)]})
    assert len(optimizer.param_groups) == len(optimizer.state) == 1
    optimizer.step()
    assert moved(first)


def test_memory_of_thousands_of_tiny_groups_is_one_slab() -> None:
    params = [ones(64) for _ in range(2000)]
    optimizer = SwapAdamW([{"params": [param]} for param in params])
    assert optimizer.slab_bytes <= 1.01 * 2000 * 64 * 8
    optimizer.step()
    assert all(map(moved, params))


def test_parameters_taken_out_of_a_group_are_stepped_no_more() -> None:
    first, second = ones(3), ones(3)
    optimizer = SwapAdamW([first, second])
    optimizer.step()
    del optimizer.param_groups[0]["params"][0]
    held = first.detach().clone()
    optimizer.step()
    assert torch.equal(first, held)
    assert optimizer.state[second]["step"] == 2


def test_parameters_put_into_a_group_by_hand_are_refused() -> None:
    optimizer = SwapAdamW([ones(3)])
    optimizer.param_groups[0]["params"].append(ones(2))
    with pytest.raises(PresentationError, match=r"group 0, parameter 1 of shape \(2,\).*use add_param_group"):
        optimizer.step()


def test_state_that_is_put_in_by_hand_is_what_the_next_step_uses() -> None:
    # Not a copy on the side: there, what is loaded by hand would be shown and not used.
    param = ones(3)
    optimizer = SwapAdamW([param], betas=(0.5, 0.5), lr=0.1)
    place = optimizer.state[param]["exp_avg"].data_ptr()
    optimizer.state[param]["exp_avg"] = torch.full((3,), 8.0)
    optimizer.state[param]["step"] = torch.tensor(4.0)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].tolist() == [4.5] * 3
    assert optimizer.state[param]["exp_avg"].data_ptr() == place
    assert optimizer.state[param]["step"] == 5
    optimizer.state[param]["exp_avg"].fill_(2.0)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].tolist() == [1.5] * 3


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    param = ones(3)
    optimizer = SwapAdamW([("w", param)])
    held = optimizer.state[param]["exp_avg"]
    optimizer.state[param]["exp_avg"] = torch.ones(4)
    del optimizer.state[param]["exp_avg_sq"]
    with pytest.raises(PlacementError) as caught:
        optimizer.step()
    assert str(caught.value).splitlines()[1:] == [
        "w: state 'exp_avg' has shape (4,) on this rank; expected (3,).",
        "w: state 'exp_avg_sq' was taken out, and the rest of it was not.",
    ]
    assert torch.equal(param, torch.ones(3))
    assert not held.any()


def test_state_that_is_taken_away_starts_anew_in_the_same_memory() -> None:
    param = ones(3)
    optimizer = SwapAdamW([param])
    places = [tensor.data_ptr() for tensor in state_of(optimizer)]
    optimizer.step()
    optimizer.state.clear()
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
    assert [tensor.data_ptr() for tensor in state_of(optimizer)] == places


def test_parameters_with_new_memory_are_stepped_there() -> None:
    param = ones(3)
    optimizer = SwapAdamW([param], lr=0.1)
    optimizer.step()
    old = param.data
    kept = old.clone()
    param.data = torch.ones(3)
    optimizer.step()
    assert moved(param)
    assert torch.equal(old, kept)
    param.data = torch.ones(3, dtype=BF16)
    with pytest.raises(PlacementError, match=r"it was torch.float32\(3,\) on cpu .*is torch.bfloat16\(3,\) on cpu now"):
        optimizer.step()


def test_a_shard_that_is_replaced_is_stepped_where_it_is_now(mesh: DeviceMesh) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = SwapAdamW(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.grad = torch.ones_like(model.weight, requires_grad=False)
    optimizer.step()
    assert moved(model.weight.to_local())


def test_closures_run_once_with_gradients_enabled_and_their_loss_is_returned() -> None:
    param = ones(3)
    optimizer = SwapAdamW([param])
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert calls == [True]
    assert moved(param)


def test_step_hooks_run_around_a_step() -> None:
    param = ones(3)
    optimizer = SwapAdamW([param])
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(moved(param)))
    optimizer.register_step_post_hook(lambda *_: seen.append(moved(param)))
    optimizer.step()
    assert seen == [False, True]


def test_schedulers_drive_the_learning_rate() -> None:
    param = ones(3)
    optimizer = SwapAdamW([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    optimizer.step()
    scheduler.step()
    held = param.detach().clone()
    optimizer.step()
    assert torch.equal(param, held)


def test_copies_and_pickles_are_refused() -> None:
    optimizer = SwapAdamW([ones(3)])
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(optimizer)
    # Its state can.
    assert pickle.loads(pickle.dumps(optimizer.state_dict()))["state"][0]["step"] == 0


def test_the_memory_goes_with_the_optimizer() -> None:
    optimizer = SwapAdamW([ones(1000)])
    optimizer.step()
    watched = [weakref.ref(optimizer), weakref.ref(optimizer._engine)]
    kept = state_of(optimizer)[0]
    # torch's hook tables make no cycle, so counting references is enough.
    del optimizer
    assert [ref() for ref in watched] == [None, None]
    assert kept.isfinite().all()


def test_neither_inference_mode_nor_a_default_device_changes_where_state_is_made() -> None:
    full, empty = ones(3), ones(0)
    with torch.inference_mode(), torch.device("meta"):
        optimizer = SwapAdamW([full, empty])
        saved = optimizer.state_dict()
    with torch.device("meta"):
        optimizer.load_state_dict(saved)
        optimizer.step()
    assert all(tensor.device.type == "cpu" and not tensor.is_inference() for tensor in state_of(optimizer))
    assert moved(full)


def test_a_slab_that_cannot_be_pinned_is_a_warning_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="stays in pageable memory"):
        optimizer = SwapAdamW([ones(3)], pin_memory=True)
    optimizer.step()
    # Of parameters on the host nothing is copied to a device.
    SwapAdamW([ones(3)], pin_memory="auto")
