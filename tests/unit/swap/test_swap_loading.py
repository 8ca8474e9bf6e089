"""State moves between SwapAdamW and torch's AdamW bit for bit, into the memory that is there; or nothing moves."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardopt import LoadError, ShardoptError, SwapAdamW
from shardopt.swap import loading
from shardopt.swap.fitting import copy_all, staged
from tests.unit.swap.swap_cases import bits, gradient, odd_parameters, same_bits, state_of

BF16 = torch.bfloat16


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return odd_parameters(dtype, sizes=(1, 5, 67, 300))


def step(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in range(first, first + steps):
        for index, param in enumerate(params):
            param.grad = gradient(param, number, index)
        optimizer.step()


def copy_params(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for old, new in zip(source.param_groups, target.param_groups, strict=True):
            for one, other in zip(old["params"], new["params"], strict=True):
                other.copy_(one)


def memory(optimizer: torch.optim.Optimizer) -> list[int]:
    return [tensor.data_ptr() for tensor in state_of(optimizer)]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=str)
@pytest.mark.parametrize("kernel", [{"foreach": False}, {"fused": True}], ids=str)
def test_torchs_state_comes_in_and_goes_out_bit_for_bit_G20(options: dict[str, Any], kernel: dict[str, Any]) -> None:
    torchs = torch.optim.AdamW(parameters(), lr=0.01, **options, **kernel)
    step(torchs, 4)
    ours = SwapAdamW(parameters(), lr=0.5, **options)
    places = memory(ours)
    ours.load_state_dict(torchs.state_dict())
    assert memory(ours) == places
    assert same_bits(state_of(ours), state_of(torchs))
    assert ours.param_groups[0]["lr"] == 0.01
    back = torch.optim.AdamW(parameters(), **options, **kernel)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert same_bits(state_of(back), state_of(torchs))
    # And torch's own goes on with it, by the kernel it has to be told again: torch takes a group as it was saved.
    back.param_groups[0].update(kernel)
    for optimizer in (torchs, back):
        copy_params(torchs, optimizer)
        step(optimizer, 2, first=4)
    assert same_bits(state_of(back), state_of(torchs))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moment_dtype": BF16, "amsgrad": True},
        {"dtype": BF16},
        {"dtype": BF16, "master": "fp32", "moment_dtype": BF16},
        {"dtype": BF16, "master": "remainder16"},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted_G3_G10_G11(options: dict[str, Any]) -> None:
    dtype = options.pop("dtype", torch.float32)
    whole, first = (SwapAdamW(parameters(dtype), lr=0.01, **options) for _ in range(2))
    step(whole, 6)
    step(first, 3)
    file = io.BytesIO()
    torch.save([first.state_dict(), [param.detach() for param in first.param_groups[0]["params"]]], file)
    file.seek(0)
    saved, weights = torch.load(file, weights_only=True)
    second = SwapAdamW(parameters(dtype), lr=1.0, **options)
    places = memory(second)
    second.load_state_dict(saved)
    # After it, as scripts do it too.
    with torch.no_grad():
        for param, value in zip(second.param_groups[0]["params"], weights, strict=True):
            param.copy_(value)
    assert same_bits(state_of(second), state_of(first))
    step(second, 3, first=3)
    assert same_bits(state_of(second), state_of(whole))
    assert same_bits(second.param_groups[0]["params"], whole.param_groups[0]["params"])
    assert memory(second) == places


def test_saved_dtypes_are_kept_and_never_cast_G10_G11_G12() -> None:
    narrow = SwapAdamW([nn.Parameter(torch.ones(8))], moment_dtype=BF16)
    wide = SwapAdamW([nn.Parameter(torch.ones(8, dtype=BF16))])
    with pytest.raises(LoadError, match=r"exp_avg' is torch\.float32; this optimizer keeps torch\.bfloat16"):
        narrow.load_state_dict(SwapAdamW([nn.Parameter(torch.ones(8))]).state_dict())
    with pytest.raises(LoadError, match=r"exp_avg' is torch\.bfloat16; this optimizer keeps torch\.float32"):
        wide.load_state_dict(narrow.state_dict())
    assert narrow.state_dict()["state"][0]["exp_avg"].dtype == BF16


def test_counters_of_every_form_are_taken_G20() -> None:
    for counter in (7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor(7.0, dtype=torch.float64)):
        optimizer = SwapAdamW([nn.Parameter(torch.ones(3))])
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["step"] = counter
        optimizer.load_state_dict(saved)
        step_tensor = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]
        assert (step_tensor.item(), step_tensor.dtype, step_tensor.shape) == (7, torch.float32, ())


Spoil = Callable[[dict[str, Any]], object]


def spoiled() -> dict[str, tuple[Spoil, str]]:
    """What can be wrong with a state dict, and what is said of it."""

    def put(name: str, value: object) -> Spoil:
        return lambda saved: saved["state"][1].__setitem__(name, value)

    def group(name: str, value: object) -> Spoil:
        return lambda saved: saved["param_groups"][0].__setitem__(name, value)

    return {
        "shape": (put("exp_avg", torch.zeros(4)), r"'exp_avg' has shape \(4,\) on this rank; expected \(5,\)"),
        "dtype": (put("exp_avg", torch.zeros(5, dtype=torch.float64)), r"is torch\.float64; this optimizer keeps"),
        "nan": (put("exp_avg_sq", torch.full((5,), torch.nan)), "holds NaN"),
        "inf": (put("exp_avg_sq", torch.full((5,), torch.inf)), "holds inf"),
        "no tensor": (put("exp_avg", [0.0] * 5), r"'exp_avg' is a list; expected a tensor"),
        "meta": (put("exp_avg", torch.zeros(5, device="meta")), "on meta; it has no values"),
        "unknown entry": (
            put("velocity", torch.zeros(5)),
            r"'velocity' has no memory here, where \['exp_avg', 'exp_avg_sq'",
        ),
        "amsgrad": (put("max_exp_avg_sq", torch.zeros(5)), r"'max_exp_avg_sq' has no memory here"),
        "half a step": (put("step", 1.5), r"'step' is 1\.5; expected a number of steps"),
        "less than none": (put("step", torch.tensor(-1.0)), r"'step' is -1\.0"),
        "no entry": (lambda saved: saved["state"][1].pop("exp_avg"), r"state 'exp_avg' is not there"),
        "stranger": (lambda saved: saved["state"].__setitem__(99, {}), r"has state of \[99\]"),
        "other groups": (
            lambda saved: saved["param_groups"].append(dict(params=[])),
            r"groups of \[10, 0\] parameters",
        ),
        "fewer": (lambda saved: saved["param_groups"][0]["params"].pop(), "matched by position"),
        "beta": (group("betas", (1.0, 0.9)), r"group 0: beta1 is 1\.0; it must be in \[0, 1\)"),
        "rate": (group("lr", -1.0), r"group 0: lr is -1\.0"),
        "adam": (group("decoupled_weight_decay", False), "which is Adam; this is AdamW"),
        "maxima": (group("amsgrad", True), r"made without memory for maxima; make it with amsgrad=True"),
        "another form": (lambda saved: saved.pop("state"), r"no 'param_groups' and 'state' of torch's form"),
    }


@pytest.mark.parametrize("name", spoiled())
def test_what_does_not_fit_is_refused_by_name_and_every_byte_stays(name: str) -> None:
    spoil, message = spoiled()[name]
    optimizer = SwapAdamW([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5)), *odd_parameters(sizes=())])
    step(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    step(optimizer, 1, first=2)
    held = [tensor.clone() for tensor in state_of(optimizer)]
    groups = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    spoil(saved)
    with pytest.raises(LoadError, match=message):
        optimizer.load_state_dict(saved)
    assert same_bits(state_of(optimizer), held)
    assert groups == {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    step(optimizer, 1, first=3)


def test_all_problems_are_in_one_error() -> None:
    optimizer = SwapAdamW([("a", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(5)))])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(4)
    saved["state"][1]["step"] = None
    saved["param_groups"][0]["eps"] = torch.nan
    with pytest.raises(LoadError) as caught:
        optimizer.load_state_dict(saved)
    assert len(caught.value.problems) == 3
    assert caught.value.problems[0].startswith("a: state 'exp_avg'")
    assert caught.value.problems[1].startswith("b: state 'step' is a NoneType")


def test_groups_are_updated_in_place_and_keep_their_tensors() -> None:
    rate = torch.tensor(0.5)
    optimizer = SwapAdamW([nn.Parameter(torch.ones(3))], lr=rate)
    group = optimizer.param_groups[0]
    saved = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.25, betas=(0.8, 0.9)).state_dict()
    saved["param_groups"][0]["initial_lr"] = 1.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is group
    assert group["lr"] is rate
    assert (rate.item(), group["betas"], group["initial_lr"]) == (0.25, (0.8, 0.9), 1.0)
    # Which kernel torch used is no part of it.
    assert "fused" not in group


def test_parameters_without_saved_state_start_anew() -> None:
    torchs = torch.optim.AdamW(parameters())
    ours = SwapAdamW(parameters())
    step(ours, 3)
    ours.load_state_dict(torchs.state_dict())
    assert all(not tensor.any() for tensor in state_of(ours))


def test_a_load_of_the_optimizers_own_state_in_another_order_takes_no_value_twice() -> None:
    optimizer = SwapAdamW([nn.Parameter(torch.ones(4)) for _ in range(3)])
    step(optimizer, 2)
    saved = optimizer.state_dict()
    held = [tensor.clone() for tensor in state_of(optimizer)]
    # Live tensors, each under another parameter.
    saved["state"] = {0: saved["state"][1], 1: saved["state"][2], 2: saved["state"][0]}
    optimizer.load_state_dict(saved)
    assert same_bits(state_of(optimizer), [*held[3:], *held[:3]])


def test_a_load_keeps_nothing_of_what_it_read_F1_F3() -> None:
    optimizer = SwapAdamW([nn.Parameter(torch.ones(1000))])
    saved = copy.deepcopy(optimizer.state_dict())
    watched = [weakref.ref(value) for value in saved["state"][0].values()]
    optimizer.load_state_dict(saved)
    del saved
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_load_needs_no_second_copy_of_host_tensors_F3(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SwapAdamW([nn.Parameter(torch.ones(1000)) for _ in range(4)])
    saved = copy.deepcopy(optimizer.state_dict())
    sources: list[int] = []
    put = loading.copy_all
    monkeypatch.setattr(loading, "copy_all", lambda fills: (sources.extend(s.data_ptr() for _, s in fills), put(fills)))
    optimizer.load_state_dict(saved)
    given = {value.data_ptr() for entries in saved["state"].values() for value in entries.values()}
    assert len(set(sources) & given) == 8  # moments from where they are, counters from numbers


def test_a_load_that_fails_half_way_lets_nobody_step_or_save_until_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SwapAdamW([nn.Parameter(torch.ones(3))])
    saved = copy.deepcopy(optimizer.state_dict())

    def fail(fills: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "copy_all", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            optimizer.load_state_dict(saved)
    for forbidden in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ShardoptError, match=r"an earlier load failed .*the disk is gone"):
            forbidden()
    optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.state_dict()


def test_hooks_of_loads_and_saves_run() -> None:
    optimizer = SwapAdamW([nn.Parameter(torch.ones(3))])
    calls: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: (calls.append("pre"), {**saved, "more": 1})[1])
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, saved: calls.append("saved"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saved", "pre", "post"]


def sharded(mesh: DeviceMesh, placement: Any = None) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [placement or Shard(0)]))


def test_dtensor_state_is_loaded_as_dtensors_placed_like_the_parameter(mesh: DeviceMesh) -> None:
    torchs, ours = torch.optim.AdamW([sharded(mesh)]), SwapAdamW([sharded(mesh)])
    torchs.param_groups[0]["params"][0].grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    torchs.step()
    ours.load_state_dict(torchs.state_dict())
    (entries,) = ours.state.values()
    assert isinstance(entries["exp_avg"], DTensor)
    assert torch.equal(entries["exp_avg"].to_local(), torch.full((4, 3), 0.1))
    back = torch.optim.AdamW([sharded(mesh)])
    back.load_state_dict(ours.state_dict())
    assert isinstance(next(iter(back.state.values()))["exp_avg"], DTensor)
    elsewhere = SwapAdamW([sharded(mesh, Replicate())])
    with pytest.raises(LoadError, match=r"placed \(Shard\(dim=0\),\) .*the parameter placed \(Replicate\(\),\)"):
        elsewhere.load_state_dict(torchs.state_dict())
    plain = SwapAdamW([nn.Parameter(torch.ones(4, 3))])
    with pytest.raises(LoadError, match=r"the parameter a plain tensor; ShardedStateOptimizer moves state"):
        plain.load_state_dict(torchs.state_dict())


def test_loaded_tensors_stay_the_givers_own() -> None:
    torchs = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    step(torchs, 1)
    before = [bits(tensor).clone() for tensor in state_of(torchs)]
    ours = SwapAdamW([nn.Parameter(torch.ones(3))])
    ours.load_state_dict(torchs.state_dict())
    step(ours, 2, first=1)
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(state_of(torchs), before, strict=True))


def test_the_live_memory_wins_over_the_device_of_what_is_loaded_F15() -> None:
    optimizer = SwapAdamW([nn.Parameter(torch.ones(3))])
    places = memory(optimizer)
    moved: list[Tensor] = []

    class Elsewhere(Tensor):
        """A tensor that says it is on a device, and is brought from there."""

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

        def cpu(self) -> Tensor:  # type: ignore[override]
            moved.append(self)
            return torch.full((3,), 2.0)

    # Only what `staged` does with a source of another device can be tried here.
    target = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
    fills = staged([(target, torch.ones(3).as_subclass(Elsewhere))])
    copy_all(fills)
    assert len(moved) == 1
    assert target.tolist() == [2.0] * 3
    assert memory(optimizer) == places
