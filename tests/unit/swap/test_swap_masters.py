"""Masters of bf16 parameters: exact, and never in the way of weights that somebody else has written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import SwapAdamW
from tests.unit.swap.swap_cases import same_bits, state_of

BF16 = torch.bfloat16
KINDS = ("fp32", "remainder16")


def parameter(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16))


def trained(param: nn.Parameter, master: str, steps: int = 3) -> SwapAdamW:
    optimizer = SwapAdamW([param], lr=0.01, master=master)
    for step in range(steps):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(BF16)
        optimizer.step()
    return optimizer


def zero_step(optimizer: SwapAdamW) -> None:
    """A step that changes nothing by itself."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][name].zero_()
    optimizer.step()


@pytest.mark.parametrize("master", KINDS)
@pytest.mark.parametrize("how", ["copy_", "load_state_dict", "data"])
def test_weights_that_are_loaded_alone_stay_as_loaded_F12(master: str, how: str) -> None:
    model = nn.Module()
    model.weight = parameter(40, 3)
    optimizer = trained(model.weight, master)
    loaded = parameter(40, 3, seed=9).detach()
    if how == "copy_":
        with torch.no_grad():
            model.weight.copy_(loaded)
    elif how == "load_state_dict":
        model.load_state_dict({"weight": loaded})
    else:
        model.weight.data = loaded.clone()
    zero_step(optimizer)
    assert same_bits([model.weight.detach()], [loaded])


@pytest.mark.parametrize("master", KINDS)
def test_weights_in_a_dtensor_are_seen_to_be_written_F12(master: str, mesh: DeviceMesh) -> None:
    for write in ("wrapper", "local"):
        param = nn.Parameter(distribute_tensor(parameter(6, 3).detach(), mesh, [Shard(0)]))
        optimizer = SwapAdamW([param], master=master)
        loaded = parameter(6, 3, seed=9).detach()
        with torch.no_grad():
            if write == "wrapper":
                param.copy_(distribute_tensor(loaded, mesh, [Shard(0)]))
            else:
                param.to_local().copy_(loaded)
        zero_step(optimizer)
        assert same_bits([param.detach().to_local()], [loaded])


def test_an_fp32_master_stays_where_weights_come_back_as_they_were() -> None:
    # As when averaged weights are swapped in for an evaluation, and the own ones back.
    param, twin = parameter(50), parameter(50)
    optimizer, other = trained(param, "fp32"), trained(twin, "fp32")
    kept = param.detach().clone()
    with torch.no_grad():
        param.fill_(3.0)
        param.copy_(kept)
        param[:10] += 1
    zero_step(optimizer)
    zero_step(other)
    assert torch.equal(optimizer.state[param]["master"][10:], other.state[twin]["master"][10:])
    assert torch.equal(optimizer.state[param]["master"][:10], (kept[:10] + 1).float())


def test_writes_through_data_need_a_word() -> None:
    for master in KINDS:
        param = parameter(20)
        optimizer = trained(param, master)
        param.data.fill_(1.0)
        optimizer.refresh_masters()
        zero_step(optimizer)
        assert (param == 1).all()


@pytest.mark.parametrize("master", KINDS)
@pytest.mark.parametrize("model_first", [True, False])
def test_masters_and_weights_of_one_checkpoint_belong_together_in_either_order(master: str, model_first: bool) -> None:
    param = parameter(300)
    optimizer = trained(param, master)
    saved, weights = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
    entry = {"fp32": "master", "remainder16": "master_lo"}[master]
    held = optimizer.state[param][entry].clone()
    other = parameter(300, seed=5)
    resumed = trained(other, master, steps=1)

    def load_weights() -> None:
        with torch.no_grad():
            other.copy_(weights)

    if model_first:
        load_weights()
    resumed.load_state_dict(saved)
    if not model_first:
        resumed.state_dict()  # a save in between must not take the old weights for the new ones
        load_weights()
    zero_step(resumed)
    assert torch.equal(resumed.state[other][entry], held)
    assert same_bits([other.detach()], [weights])


@pytest.mark.parametrize("master", KINDS)
@pytest.mark.parametrize("moved", ["shared", "replaced", "group added", "group edited"])
def test_memory_that_moves_between_loaded_state_and_loaded_weights_lets_masters_wait(master: str, moved: str) -> None:
    param = parameter(300)
    optimizer = trained(param, master)
    saved, weights = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
    entry = {"fp32": "master", "remainder16": "master_lo"}[master]
    held = optimizer.state[param][entry].clone()
    other, more = parameter(300, seed=5), parameter(4)
    resumed = trained(other, master, steps=1)
    resumed.load_state_dict(saved)
    if moved == "shared":
        other.share_memory_()
    elif moved == "replaced":
        other.data = other.data.clone()
    elif moved == "group added":
        resumed.add_param_group({"params": [more]})
    else:
        resumed.param_groups[0]["params"] = [other]
    resumed.state_dict()
    with torch.no_grad():
        other.copy_(weights)
    zero_step(resumed)
    assert torch.equal(resumed.state[other][entry], held)
    assert same_bits([other.detach()], [weights])


def test_a_group_added_after_a_load_lets_no_master_overwrite_the_weights_that_are_there() -> None:
    optimizer = trained(parameter(300), "fp32")
    other, weights = parameter(300, seed=5), parameter(300, seed=5).detach()
    resumed = SwapAdamW([other], master="fp32")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.add_param_group({"params": [parameter(4)]})
    zero_step(resumed)
    assert same_bits([other.detach()], [weights])


@pytest.mark.parametrize("master", KINDS)
def test_a_checkpoint_of_torch_without_masters_gives_the_weights_own_values(master: str) -> None:
    param = parameter(30)
    optimizer = trained(param, master)
    source = SwapAdamW([parameter(30)])
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    entry = optimizer.state[param]["master" if master == "fp32" else "master_lo"]
    assert torch.equal(entry, param.detach().float() if master == "fp32" else torch.zeros(30, dtype=torch.int16))


def test_a_save_after_weights_were_loaded_alone_has_no_masters_of_the_old_ones() -> None:
    for master, entry in zip(KINDS, ("master", "master_lo"), strict=True):
        param = parameter(30)
        optimizer = trained(param, master)
        with torch.no_grad():
            param.fill_(0.0)
        saved = optimizer.state_dict()["state"][0][entry]
        assert not saved.any()


def test_a_remainder_of_other_weights_makes_no_nan_of_a_zero() -> None:
    param = nn.Parameter(torch.tensor([0.0, -0.0, 1.0, torch.nan], dtype=BF16))
    optimizer = SwapAdamW([param], master="remainder16", weight_decay=0.0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master_lo"].fill_(-5)
    optimizer.load_state_dict(saved)
    zero_step(optimizer)
    assert optimizer.state[param]["master_lo"].tolist()[:3] == [0, 0, -5]
    assert param.isnan().tolist() == [False, False, False, True]


def test_a_remainder_restores_every_value_exactly_ties_too() -> None:
    # Values of every kind: halves between two bf16 numbers, both signs, the smallest and the largest.
    value = torch.tensor([0x3F808000, 0x3F818000, 0xBF808000, 0x00008000, 0x7F7F7FFF, 0x3F80FFFF, 0x80000001])
    wanted = value.to(torch.int64).to(torch.int32).view(torch.float32)
    param = nn.Parameter(torch.zeros(7, dtype=BF16))
    optimizer = SwapAdamW([param], master="remainder16", weight_decay=0.0)
    high = ((value + 0x8000) >> 16).to(torch.int32).to(torch.int16)
    with torch.no_grad():
        param.view(torch.int16).copy_(high)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master_lo"] = (value - (high.long() << 16)).to(torch.int32).to(torch.int16)
    optimizer.load_state_dict(saved)
    zero_step(optimizer)
    restored = (param.detach().view(torch.int16).int() << 16) + optimizer.state[param]["master_lo"].int()
    assert torch.equal(restored.view(torch.float32).view(torch.int32), wanted.view(torch.int32))


def test_fp32_parameters_beside_bf16_ones_have_no_masters() -> None:
    narrow, wide = parameter(5), nn.Parameter(torch.ones(5))
    optimizer = SwapAdamW([narrow, wide], master="fp32")
    assert sorted(optimizer.state[narrow]) == ["exp_avg", "exp_avg_sq", "master", "step"]
    assert sorted(optimizer.state[wide]) == ["exp_avg", "exp_avg_sq", "step"]
    assert optimizer.state[narrow]["master"].dtype == torch.float32


def test_without_a_master_a_bf16_parameter_is_rounded_to_nearest() -> None:
    param = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = SwapAdamW([param], lr=1e-4, weight_decay=0.0)
    param.grad = torch.ones(64, dtype=BF16)
    for _ in range(20):
        optimizer.step()
    # Each step is less than half a unit in the last place: a limit that the documentation names.
    assert (param == 1).all()
    held: list[Tensor] = state_of(optimizer)
    assert all(tensor.any() for tensor in held)
