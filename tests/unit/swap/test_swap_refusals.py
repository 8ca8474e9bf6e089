"""What SwapAdamW refuses: by name, all of it at once, before anything changes."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardopt import PlacementError, PresentationError, ShardoptError, SwapAdamW
from shardopt.errors import LoadError
from shardopt.swap import host_engine
from shardopt.torch_compat import spec_token
from tests.unit.swap.swap_cases import state_of

BF16 = torch.bfloat16


def ones(*shape: int) -> nn.Parameter:
    param = nn.Parameter(torch.ones(shape))
    param.grad = torch.ones(shape)
    return param


def moved(param: Tensor) -> bool:
    return bool((param != 1).all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.ones(3, dtype=torch.float16),
            "dtype is torch.float16; expected torch.float32 or torch.bfloat16",
        ),
        (lambda: torch.ones(3, dtype=torch.float64), "dtype is torch.float64"),
        (lambda: torch.ones(3, device="meta"), r"on the meta device; materialise it \(to_empty\)"),
        (lambda: torch.ones(1).expand(3), "elements of it share memory"),
        (lambda: torch.ones(6)[::2], "no two elements of it are neighbours in memory; make it contiguous"),
        (lambda: torch.ones(3).to_sparse(), "layout torch.sparse_coo"),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused_by_name(make: Any, message: str) -> None:
    good = ones(3)
    with pytest.raises(PlacementError, match=r"^SwapAdamW cannot update parameters:\nbad: .*" + message):
        SwapAdamW([("good", good), ("bad", nn.Parameter(make()))])


def test_parameters_in_each_others_memory_are_refused_when_they_are_given() -> None:
    memory = torch.ones(4, 6)
    whole, row = nn.Parameter(memory), nn.Parameter(memory[1])
    for pairs in ([("whole", whole), ("row", row)], [("whole", row), ("row", whole)]):
        with pytest.raises(PlacementError, match=r"\n(whole and row|row and whole) share memory, which two"):
            SwapAdamW(pairs)
    first = ones(3)
    optimizer = SwapAdamW([("row", row), ("first", first)])
    with pytest.raises(PlacementError, match=r"row and whole share memory"):
        optimizer.add_param_group({"params": [("whole", whole)]})
    assert len(optimizer.param_groups) == 1
    # Columns of one matrix, by turns in memory, share none.
    halves = [nn.Parameter(half) for half in torch.ones(4, 6).split(3, dim=1)]
    optimizer.add_param_group({"params": list(zip(("left", "right"), halves, strict=True))})
    for half in halves:
        half.grad = torch.ones(4, 3)
    optimizer.step()
    assert moved(torch.cat([half.detach() for half in halves]))


def elsewhere(kind: str) -> Tensor:
    """A parameter that says it is on a device."""

    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device(kind, 0)

    return torch.ones(3).as_subclass(Elsewhere).requires_grad_()


def test_parameters_on_different_devices_are_refused_with_the_way_out_F10_F13() -> None:
    with pytest.raises(PlacementError, match=r"it is on cuda:0, and this optimizer's parameters are on cpu; make one"):
        SwapAdamW([ones(3), elsewhere("cuda")])


def test_a_device_that_is_not_known_is_refused_with_the_way_out_F13() -> None:
    with pytest.raises(PlacementError, match=r"cannot update parameters on xpu:0: .*CPUOffloadPolicy"):
        SwapAdamW([elsewhere("xpu")])


def test_a_gpu_without_triton_is_refused_when_the_optimizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "shardopt.swap.triton_body", raising=False)
    with pytest.raises(ImportError, match=r"triton cannot be imported .*pip install 'shardopt\[triton\]'"):
        SwapAdamW([elsewhere("cuda")])


def test_all_parameters_that_cannot_be_updated_are_in_one_error(mesh: DeviceMesh) -> None:
    partial = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))
    by_hand = nn.Parameter(
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([3]), stride=(1,))
    )
    half = nn.Parameter(torch.ones(3, dtype=torch.float16))
    with pytest.raises(PlacementError) as caught:
        SwapAdamW([("a", partial), ("b", by_hand), ("c", half)])
    _, first, second, third = str(caught.value).splitlines()
    assert first.startswith("a: it is placed (Partial(sum),), which is not one tensor")
    assert second.startswith("b: this rank's shard has shape (2,), but (Shard(dim=0),) of (3,) gives it (3,)")
    assert third.startswith("c: its dtype is torch.float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moment_dtype": torch.float16}, "moment_dtype is torch.float16"),
        ({"master": "bf16"}, "master is 'bf16'; expected None, 'fp32' or 'remainder16'"),
        ({"pin_memory": "yes"}, "pin_memory is 'yes'"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"device_budget_bytes": -1}, "device_budget_bytes is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"lr": -1.0}, r"group 0: lr is -1\.0"),
        ({"betas": (0.9, 1.0)}, r"group 0: beta2 is 1\.0"),
        ({"eps": -1e-8}, "group 0: eps is -1e-08"),
        ({"weight_decay": float("nan")}, "group 0: weight_decay is nan"),
    ],
)
def test_options_out_of_range_are_refused_when_the_optimizer_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwapAdamW([ones(3)], **options)


def test_numbers_that_became_wrong_are_refused_before_anything_is_written() -> None:
    param = ones(3)
    optimizer = SwapAdamW([param])
    optimizer.param_groups[0]["lr"] = float("inf")
    with pytest.raises(ValueError, match="group 0: lr is inf"):
        optimizer.step()
    optimizer.param_groups[0].update(lr=0.1, decoupled_weight_decay=False)
    with pytest.raises(ValueError, match="which is Adam; this is AdamW"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))
    optimizer.param_groups[0]["decoupled_weight_decay"] = True
    optimizer.step()
    assert moved(param)


def test_maxima_cannot_be_turned_on_without_memory_for_them() -> None:
    optimizer = SwapAdamW([("w", ones(3))])
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(PresentationError, match=r"without memory for maxima of w; make it with amsgrad=True"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda mesh: torch.ones(4), r"w: it is a DTensor, its gradient a plain tensor of shape \(4,\)"),
        (lambda mesh: distribute_tensor(torch.ones(4).double(), mesh, [Shard(0)]), r"w: its gradient is torch.float64"),
        (
            lambda mesh: DTensor.from_local(
                torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
            ),
            r"w: this rank's part of its gradient has shape \(3,\), not \(4,\)",
        ),
    ],
    ids=["plain", "double", "short"],
)
@pytest.mark.parametrize("beside", [True, False], ids=["beside a plain one", "alone"])
def test_gradients_that_cannot_be_used_are_refused_by_name(
    mesh: DeviceMesh, make: Any, message: str, beside: bool
) -> None:
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    other = ones(3)
    if hasattr(param, "grad_dtype"):
        param.grad_dtype = None
    optimizer = SwapAdamW([("w", param), *[("v", other)] * beside])
    try:
        param.grad = make(mesh)
    except (RuntimeError, TypeError):
        pytest.skip("this torch lets no such gradient be assigned")
    with pytest.raises(PresentationError, match=message):
        optimizer.step()
    assert torch.equal(other, torch.ones(3))
    assert not any(tensor.any() for entries in optimizer.state.values() for tensor in entries.values())


def test_a_sparse_gradient_is_refused_by_name() -> None:
    param = ones(3)
    optimizer = SwapAdamW([("w", param)])
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(PresentationError, match=r"w: its gradient is sparse .*make it dense"):
        optimizer.step()


def test_a_gradient_placed_otherwise_is_brought_to_its_parameters_place(mesh: DeviceMesh) -> None:
    param, twin = (nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()])) for _ in range(2))
    ours, torchs = SwapAdamW([param]), torch.optim.AdamW([twin])
    for one in (param, twin):
        one.grad = DTensor.from_local(torch.arange(4.0), mesh, [Partial()])
    ours.step()
    torchs.step()
    assert torch.allclose(param.to_local(), twin.to_local())


def test_gradients_of_dtensors_in_another_order_of_memory_are_read_right(mesh: DeviceMesh) -> None:
    values = torch.arange(24.0).reshape(6, 4)
    param, twin = (nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])) for _ in range(2))
    ours, other = SwapAdamW([param]), SwapAdamW([twin])
    # The same global tensor, in a shard that lies otherwise.
    param.grad = DTensor.from_local(
        values.t().contiguous().t(), mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride()
    )
    assert spec_token(param.grad) == spec_token(param)
    twin.grad = distribute_tensor(values, mesh, [Shard(0)])
    ours.step()
    other.step()
    assert torch.equal(param.to_local(), twin.to_local())


def test_a_failure_in_the_kernel_lets_nobody_step_or_save_until_a_good_load(monkeypatch: pytest.MonkeyPatch) -> None:
    param = ones(3)
    optimizer = SwapAdamW([param])
    saved = copy.deepcopy(optimizer.state_dict())

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(host_engine, "adamw_rows", fail)
        with pytest.raises(OSError, match="half way"):
            optimizer.step()
    assert optimizer.has_written
    for forbidden in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ShardoptError, match=r"an earlier step failed .*\(OSError: half way\)"):
            forbidden()
    with pytest.raises(LoadError):
        optimizer.load_state_dict({})
    with pytest.raises(ShardoptError, match="half way"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_what_the_kernel_refuses_has_written_nothing_and_leaves_the_optimizer_good() -> None:
    # Two parameters that come to be over one memory: only the kernel sees that.
    memory = torch.ones(6)
    first, second = ones(4), ones(4)
    optimizer = SwapAdamW([("first", first), ("second", second)])
    first.data, second.data = memory[:4], memory[2:]
    with pytest.raises(ValueError, match="first"):
        optimizer.step()
    assert not optimizer.has_written
    assert torch.equal(memory, torch.ones(6))
    assert not any(tensor.any() for tensor in state_of(optimizer))
    second.grad = None
    optimizer.step()
    assert moved(first)


def test_names_of_parameters_are_in_errors_of_the_kernel() -> None:
    memory = torch.ones(4)
    first, second = ones(2), ones(3)
    optimizer = SwapAdamW([("encoder.weight", first), ("decoder.weight", second)])
    first.data, second.data = memory[:2], memory[1:]
    with pytest.raises(ValueError, match=r"(?s)encoder\.weight.*decoder\.weight|decoder\.weight.*encoder\.weight"):
        optimizer.step()


def test_a_parameter_that_is_moved_into_a_new_group_would_lose_its_moments() -> None:
    params = [ones(3), ones(4)]
    optimizer = SwapAdamW([("one", params[0]), ("two", params[1])])
    optimizer.step()
    optimizer.param_groups[0]["params"] = [params[0]]
    with pytest.raises(PresentationError, match="has state here already, which a new group would start anew"):
        optimizer.add_param_group({"params": [("two", params[1])]})
    assert len(optimizer.param_groups) == 1
    assert optimizer.state[params[1]]["step"].item() == 1


def test_a_group_that_is_added_while_another_holds_a_stranger_leaves_nothing() -> None:
    known, stranger, new = ones(3), ones(4), ones(5)
    optimizer = SwapAdamW([known])
    optimizer.param_groups[0]["params"].append(stranger)
    with pytest.raises(PresentationError, match="group 0, parameter 1 of shape"):
        optimizer.add_param_group({"params": [new]})
    assert len(optimizer.param_groups) == 1
    assert new not in optimizer.state
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    assert list(optimizer.state) == [known]
