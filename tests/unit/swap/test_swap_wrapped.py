"""SwapAdamW inside ShardedStateOptimizer: known by name, shown its parameters, its memory kept by every load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardopt import GradScaler, LoadError, PresentationError, ShardedStateOptimizer, ShardoptError, SwapAdamW
from shardopt.swap import host_engine
from tests.support.live_tensors import live_memory
from tests.unit.swap.swap_cases import same_bits, state_of

# DCP says so without a process group; it is what most of these tests want.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BF16 = torch.bfloat16


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(dtype)


def wrapped(
    dtype: torch.dtype = torch.float32, steps: int = 0, **options: Any
) -> tuple[ShardedStateOptimizer, nn.Module]:
    net = model(dtype)
    return train(ShardedStateOptimizer(SwapAdamW(net.parameters(), lr=0.1, **options), net), net, steps), net


def train(optimizer: ShardedStateOptimizer, net: nn.Module, steps: int) -> ShardedStateOptimizer:
    for step in range(steps):
        for param in net.parameters():
            param.grad = torch.full_like(param, 0.5 + step)
        optimizer.step()
    return optimizer


def memory(optimizer: ShardedStateOptimizer) -> list[int]:
    return [tensor.data_ptr() for tensor in state_of(optimizer)]


def saved(tmp_path: Path, *args: Any, **options: Any) -> tuple[ShardedStateOptimizer, str]:
    optimizer, _ = wrapped(*args, **options)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    return optimizer, str(tmp_path)


def test_it_is_known_without_a_probe_and_shown_its_parameters_themselves() -> None:
    optimizer, _ = wrapped()
    assert "SwapAdamW: compute='shards' because" in optimizer.explain()
    assert "checkpoint: resumes on any number of ranks\n" in optimizer.explain() + "\n"
    assert optimizer.state is optimizer.optimizers[0].state
    keys = optimizer.state_dict().keys()
    assert {"state.0.weight.exp_avg", "state.1.bias.exp_avg_sq"} <= keys
    assert len(keys) == 2 * 4 + 1


@pytest.mark.parametrize("compute", ["local", "owner", "replicated"])
def test_it_is_shown_nothing_else(compute: str) -> None:
    net = model()
    with pytest.raises(PresentationError, match=f"takes the shards of DTensors by itself.*compute='{compute}' out"):
        ShardedStateOptimizer(SwapAdamW(net.parameters()), net, compute=compute)


def test_errors_name_parameters_as_the_model_does() -> None:
    optimizer, net = wrapped()
    train(optimizer, net, 1)
    optimizer.state[net.get_parameter("1.bias")]["exp_avg"] = torch.zeros(9)
    with pytest.raises(ShardoptError, match=r"1\.bias: state 'exp_avg' has shape \(9,\)"):
        optimizer.step()


def test_parameters_that_start_anew_do_so_in_their_memory(tmp_path: Path) -> None:
    _, path = saved(tmp_path, steps=2)
    optimizer, net = wrapped(steps=3)
    places = memory(optimizer)
    optimizer.prepare_load(path, fresh=["0.*"]).commit()
    assert memory(optimizer) == places
    state = {name: optimizer.state[param] for name, param in net.named_parameters()}
    assert not any(tensor.any() for name in ("0.weight", "0.bias") for tensor in state[name].values())
    assert [int(state[name]["step"]) for name in ("1.weight", "1.bias")] == [2, 2]


def test_a_checkpoint_of_before_the_first_step_of_torchs_adamw_empties_the_memory(tmp_path: Path) -> None:
    net = model()
    dcp.save(
        {"optim": ShardedStateOptimizer(torch.optim.AdamW(net.parameters()), net)}, checkpoint_id=tmp_path, no_dist=True
    )
    optimizer, _ = wrapped(steps=3)
    places = memory(optimizer)
    dcp.load({"optim": optimizer}, checkpoint_id=tmp_path)
    assert memory(optimizer) == places
    assert not any(tensor.any() for tensor in state_of(optimizer))


def test_state_of_another_dtype_is_refused_or_converted_when_told_so_G10_G11_G12(tmp_path: Path) -> None:
    source, path = saved(tmp_path, steps=2)
    optimizer, _ = wrapped(moment_dtype=BF16)
    places, held = memory(optimizer), [tensor.clone() for tensor in state_of(optimizer)]
    for load in (
        lambda: dcp.load({"optim": optimizer}, checkpoint_id=path),
        lambda: optimizer.prepare_load(path),
    ):
        with pytest.raises(Exception, match=r"saved as float32, this optimizer keeps bfloat16; dtype='live'"):
            load()
    assert same_bits(state_of(optimizer), held)
    optimizer.prepare_load(path, dtype="live").commit()
    assert memory(optimizer) == places
    (entries, *_), (wide, *_) = optimizer.state.values(), source.state.values()
    assert torch.equal(entries["exp_avg"], wide["exp_avg"].to(BF16))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"amsgrad": True}, {}),
        ({}, {"amsgrad": True}),
        ({"dtype": BF16, "master": "fp32"}, {"dtype": BF16}),
        ({"dtype": BF16, "master": "fp32"}, {"dtype": BF16, "master": "remainder16"}),
    ],
    ids=str,
)
def test_entries_without_memory_or_without_values_are_refused(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any]
) -> None:
    _, path = saved(tmp_path, steps=2, **there)
    optimizer, _ = wrapped(steps=1, **here)
    held = [tensor.clone() for tensor in state_of(optimizer)]
    with pytest.raises(LoadError, match="and this optimizer was made with memory for .*build it with the options"):
        optimizer.prepare_load(path)
    assert same_bits(state_of(optimizer), held)


def test_masters_that_were_not_saved_are_the_weights_own_values(tmp_path: Path) -> None:
    _, path = saved(tmp_path, BF16, steps=2)
    optimizer, net = wrapped(BF16, steps=1, master="fp32")
    places = memory(optimizer)
    # Stock DCP looks for every key that this optimizer offers; reading the manifest first needs none.
    optimizer.prepare_load(path).commit()
    assert memory(optimizer) == places
    for param in net.parameters():
        assert torch.equal(optimizer.state[param]["master"], param.float())
        assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize(("master", "entry"), [("fp32", "master"), ("remainder16", "master_lo")])
def test_a_save_after_weights_were_loaded_alone_has_no_masters_of_the_old_ones_F12(
    tmp_path: Path, master: str, entry: str
) -> None:
    optimizer, net = wrapped(BF16, steps=2, master=master)
    net.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()})
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    fresh, _ = wrapped(BF16, master=master)
    dcp.load({"optim": fresh}, checkpoint_id=tmp_path)
    assert not any(entries[entry].any() for entries in fresh.state.values())


def test_torchs_own_format_is_read_into_the_memory(tmp_path: Path) -> None:
    net = model()
    torchs = torch.optim.AdamW(net.parameters(), lr=0.2)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    torchs.step()
    dcp.save({"optim": get_optimizer_state_dict(net, torchs)}, checkpoint_id=tmp_path)
    optimizer, _ = wrapped()
    places = memory(optimizer)
    optimizer.prepare_load(tmp_path).commit()
    assert memory(optimizer) == places
    assert same_bits(state_of(optimizer), state_of(torchs))
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_state_of_adam_is_refused(tmp_path: Path) -> None:
    net = model()
    adam = torch.optim.Adam(net.parameters())
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    adam.step()
    dcp.save({"optim": get_optimizer_state_dict(net, adam)}, checkpoint_id=tmp_path / "torch")
    dcp.save({"optim": ShardedStateOptimizer(adam, net)}, checkpoint_id=tmp_path / "own")
    optimizer, _ = wrapped()
    for path in ("torch", "own"):
        with pytest.raises(LoadError, match=r"were saved by torch\.optim\.adam\.Adam; this optimizer is .*SwapAdamW"):
            optimizer.prepare_load(tmp_path / path)


def test_torchs_own_functions_move_its_state_when_it_is_not_wrapped(mesh: DeviceMesh, tmp_path: Path) -> None:
    def bare(steps: int) -> tuple[nn.Module, SwapAdamW]:
        net: Any = model()
        fully_shard(net, mesh=mesh)
        optimizer = SwapAdamW(net.parameters(), lr=0.1)
        for _ in range(steps):
            for param in net.parameters():
                param.grad = torch.ones_like(param, requires_grad=False)
            optimizer.step()
        return net, optimizer

    net, optimizer = bare(2)
    dcp.save({"optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path)
    other, fresh = bare(0)
    places = [tensor.data_ptr() for tensor in map(_local, state_of(fresh))]
    template = get_optimizer_state_dict(other, fresh)
    dcp.load({"optim": template}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, fresh, template)
    assert [tensor.data_ptr() for tensor in map(_local, state_of(fresh))] == places
    assert same_bits(list(map(_local, state_of(fresh))), list(map(_local, state_of(optimizer))))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_a_group_is_added_through_the_wrapper() -> None:
    net = model()
    inner = SwapAdamW(net[0].parameters(), lr=0.1)
    optimizer = ShardedStateOptimizer(inner, net)
    train_these = list(net.parameters())
    optimizer.add_param_group({"params": list(net[1].parameters()), "lr": 0.5})
    train(optimizer, net, 1)
    assert [int(optimizer.state[param]["step"]) for param in train_these] == [1] * 4
    assert "state.1.bias.exp_avg" in optimizer.state_dict()
    stranger = nn.Parameter(torch.ones(3))
    with pytest.raises(ShardoptError):
        optimizer.add_param_group({"params": [stranger]})
    assert len(optimizer.param_groups) == 2
    train(optimizer, net, 1)


def test_a_closure_gives_the_gradients_that_are_looked_at_before_the_vote() -> None:
    optimizer, net = wrapped()
    inputs = torch.ones(2, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(inputs).square().sum()
        loss.backward()
        return loss

    optimizer.param_groups[0]["lr"] = 0.01
    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scalers_scale_is_folded_in(overflow: bool) -> None:
    optimizer, net = wrapped(steps=0)
    twin, other = wrapped(steps=0)
    scaler: Any = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        one.grad, two.grad = torch.full_like(one, 4.0), torch.full_like(two, 0.5)
    if overflow:
        next(net.parameters()).grad.fill_(torch.inf)  # pyrefly: ignore[missing-attribute]
    scaler.step(optimizer)
    twin.step()
    steps = [int(entries["step"]) for entries in optimizer.state.values()]
    assert steps == ([0] * 4 if overflow else [1] * 4)
    assert same_bits(list(net.parameters()), list(other.parameters())) is not overflow


def test_a_clip_of_the_wrapped_optimizer_is_for_the_wrappers_step() -> None:
    optimizer, net = wrapped()
    inner: Any = optimizer.optimizers[0]
    for param in net.parameters():
        param.grad = torch.full_like(param, 3.0)
    norm = inner.clip_grad_norm_(1.0)
    optimizer.step()
    for param in net.parameters():
        assert torch.allclose(optimizer.state[param]["exp_avg"], torch.full_like(param, 0.1 * 3.0 / norm.item()))
    inner.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    train(optimizer, net, 1)


def test_what_fails_before_the_first_write_leaves_the_wrapper_good(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, net = wrapped(steps=1)
    held = [tensor.clone() for tensor in state_of(optimizer)]

    def refuse(*args: object, **options: object) -> None:
        raise ValueError("row 0 is wrong")

    with monkeypatch.context() as patch:
        patch.setattr(host_engine, "adamw_rows", refuse)
        with pytest.raises(ValueError, match="row 0 is wrong"):
            optimizer.step()
    assert same_bits(state_of(optimizer), held)
    train(optimizer, net, 1)


def test_a_failure_in_the_kernel_poisons_the_wrapper_until_a_good_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    optimizer, net = wrapped(steps=1)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)

    def fail(*args: object, **options: object) -> None:
        raise OSError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(host_engine, "adamw_rows", fail)
        with pytest.raises(OSError, match="half way"):
            optimizer.step()
    with pytest.raises(ShardoptError, match="an earlier step failed .*half way"):
        optimizer.step()
    dcp.load({"optim": optimizer}, checkpoint_id=tmp_path)
    train(optimizer, net, 1)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_ten_saves_leave_memory_as_it_was_F14(tmp_path: Path) -> None:
    net = nn.Linear(2048, 2048, bias=False)
    inner = SwapAdamW(net.parameters())
    optimizer = ShardedStateOptimizer(inner, net)
    sizes: list[int] = []
    memory: list[dict[int, int]] = []
    for number in range(10):
        dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / str(number))
        shutil.rmtree(tmp_path / str(number))
        sizes.append(resident_bytes())
        memory.append(live_memory())
    # The first one may make what is made once.
    assert memory[1:] == [memory[0]] * 9
    # What no tensor of Python's holds: a save that kept its copy would leave one for each of 8 saves.
    assert sizes[-1] - sizes[1] < inner.slab_bytes
    assert inner.slab_bytes == 2 * 2048 * 2048 * 4


def test_a_sharded_state_shows_the_slabs(mesh: DeviceMesh) -> None:
    net = nn.Module()
    net.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    inner = SwapAdamW(net.parameters())
    optimizer = ShardedStateOptimizer(inner, net)
    shown = optimizer.sharded_state()
    assert {key: value.to_local().data_ptr() for key, value in shown.items()} == {
        f"state.weight.{name}": inner.state[net.weight][name].to_local().data_ptr()
        for name in ("exp_avg", "exp_avg_sq")
    }


def test_its_tensors_are_in_no_attribute_that_a_checkpoint_would_miss() -> None:
    # The wrapper looks for tensors beside state and groups, and would refuse to save.
    optimizer, _ = wrapped(steps=1)
    optimizer.state_dict()
    assert not any(
        isinstance(value, (torch.Tensor, list, dict)) and value
        for name, value in vars(optimizer.optimizers[0]).items()
        if name not in ("param_groups", "_state", "defaults", "told") and "hooks" not in name
    )
