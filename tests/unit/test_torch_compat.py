"""What shardopt relies on in torch without a promise of it: each test here fails first when torch changes that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt import ScopeError, torch_compat
from shardopt.portable.handles import BoxHandle
from shardopt.torch_compat import (
    foreach_norms,
    foreach_scale,
    gradients_of,
    local_box,
    local_shard,
    make_wrapper,
    mesh_ranks,
    own_store,
    refuse_dcp_state_dict,
    root_mesh_ranks,
    same_spec,
    set_gradients,
    shard_in_place,
    spec_token,
    storage_token,
    without_dynamo,
)


def test_every_name_has_a_test() -> None:
    # FSDP's are in a file of their own.
    source = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_torch_compat*.py"))
    assert torch_compat.__all__ == sorted(torch_compat.__all__)
    missing = [name for name in torch_compat.__all__ if f"def test_{name}_" not in source]
    assert not missing


def test_foreach_norms_are_in_the_dtype_asked_for() -> None:
    halves = [torch.full((4,), 6e4, dtype=torch.float16), torch.ones(9, dtype=torch.float16)]  # float16 ends at 65504
    norms = foreach_norms(halves, 2.0, dtype=torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(120000.0, torch.float32), (3.0, torch.float32)]
    (largest,) = foreach_norms([torch.tensor([1.0, -3.0])], float("inf"), dtype=None)
    assert largest == 3


def test_foreach_scale_is_in_place() -> None:
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    foreach_scale(tensors, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]


def on_rank(rank: int, ranks: Any, **options: Any) -> DeviceMesh:
    """A mesh as one of its ranks sees it, without the others: enough to ask for places."""
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=rank, **options)


def sharded(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])


def test_local_shard_is_the_very_object(mesh: DeviceMesh) -> None:
    local = torch.ones(3, 2)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    shard = local_shard(tensor)
    assert type(shard) is torch.Tensor
    assert local_shard(tensor) is shard is tensor._local_tensor
    assert shard.data_ptr() == local.data_ptr()
    # to_local() makes another object each time, which is why it is not used.
    assert tensor.to_local() is not tensor.to_local()


def test_local_shard_of_fsdp_is_the_same_over_training_and_another_after_to_empty(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=mesh)
    param = next(model.parameters())
    shard = local_shard(param)
    pointer = shard.data_ptr()
    model(torch.ones(1, 2)).sum().backward()
    assert local_shard(param) is shard
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert next(model.parameters()) is param
    assert local_shard(param) is shard
    assert shard.data_ptr() == pointer
    with torch.no_grad():
        nn.Parameter(shard.detach()).fill_(7.0)
    assert torch.equal(param.full_tensor(), torch.full((3, 2), 7.0))
    model.to_empty(device="cpu")
    assert next(model.parameters()) is param
    assert local_shard(param) is not shard


def test_local_shard_waits_for_a_tensor_on_its_way(mesh: DeviceMesh) -> None:
    on_its_way = all_reduce(torch.ones(3, 2), "sum", mesh)
    assert isinstance(on_its_way, AsyncCollectiveTensor)
    tensor = sharded(mesh)
    tensor._local_tensor = on_its_way
    assert type(shard_in_place(tensor)) is AsyncCollectiveTensor
    assert type(local_shard(tensor)) is torch.Tensor
    assert torch.equal(local_shard(tensor), torch.ones(3, 2))


def test_shard_in_place_is_the_very_object(mesh: DeviceMesh) -> None:
    tensor = sharded(mesh)
    assert shard_in_place(tensor) is tensor._local_tensor


def test_spec_token_and_gradient_of_fsdp_are_shared(mesh: DeviceMesh) -> None:
    model = nn.Linear(2, 3)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        assert spec_token(param.grad) is spec_token(param)


def test_same_spec_is_one_mesh_and_the_same_placements(mesh: DeviceMesh) -> None:
    one, other = sharded(mesh), sharded(mesh)
    assert spec_token(one) is not spec_token(other)
    assert same_spec(one, one)
    assert same_spec(one, other)
    assert not same_spec(one, distribute_tensor(torch.zeros(3, 2), mesh, [Shard(1)]))
    assert not same_spec(one, distribute_tensor(torch.zeros(3, 2), mesh, [Replicate()]))
    assert not same_spec(one, DTensor.from_local(torch.zeros(3, 2), mesh, [Partial()]))
    named = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    assert not same_spec(one, distribute_tensor(torch.zeros(3, 2), named, [Shard(0)]))


def test_gradients_of_are_the_very_gradients(mesh: DeviceMesh) -> None:
    params = [nn.Parameter(sharded(mesh)), nn.Parameter(torch.ones(2)), nn.Parameter(sharded(mesh))]
    params[0].grad, params[1].grad = sharded(mesh), torch.ones(2)
    found = gradients_of(params)
    assert found[0] is params[0].grad
    assert found[1] is params[1].grad
    assert found[2] is None
    assert "grad" not in vars(DTensor)
    assert DTensor.__torch_function__ is torch._C._disabled_torch_function_impl


def test_set_gradients_sets_the_very_gradients(mesh: DeviceMesh) -> None:
    params = [nn.Parameter(sharded(mesh)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    params[2].grad = torch.ones(1)
    gradients = [sharded(mesh), torch.ones(2), None]
    set_gradients(params, gradients)
    assert all(param.grad is gradient for param, gradient in zip(params, gradients, strict=True))
    with pytest.raises(RuntimeError, match="assign a gradient of size"):
        set_gradients(params[1:2], [torch.ones(3)])


@pytest.mark.parametrize("rank", range(4))
def test_local_box_is_torchs_chunk_rule(rank: int) -> None:
    # 7 rows over 4 ranks are 2, 2, 2, 1; 3 rows leave the last rank none.
    one_axis = on_rank(rank, [0, 1, 2, 3])
    for rows, sizes in ((7, (2, 2, 2, 1)), (3, (1, 1, 1, 0))):
        local = torch.zeros(sizes[rank], 3)
        placed = DTensor.from_local(local, one_axis, [Shard(0)], run_check=False, shape=(rows, 3), stride=(3, 1))
        offset, size = local_box(placed)
        assert (offset[1], size) == (0, (sizes[rank], 3))
        assert offset[0] == sum(sizes[:rank]) or not sizes[rank]


@pytest.mark.parametrize(("rank", "offset", "rows"), [(0, 0, 2), (1, 4, 2), (2, 2, 2), (3, 6, 1)])
def test_local_box_knows_fsdp_over_tensor_parallel(rank: int, offset: int, rows: int) -> None:
    # Tensor parallelism cuts 7 rows into 4 and 3, and FSDP each of them again, so a rank's rows lie across FSDP's.
    two_axes = on_rank(rank, [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    placed = DTensor.from_local(
        torch.zeros(rows, 3), two_axes, placements, run_check=False, shape=(7, 3), stride=(3, 1)
    )
    assert local_box(placed) == ((offset, 0), (rows, 3))


def test_make_wrapper_makes_a_tensor_without_memory() -> None:
    made = make_wrapper(BoxHandle, (1000, 10**9), torch.bfloat16, torch.device("cpu"))
    assert type(made) is BoxHandle
    assert isinstance(made, torch.Tensor)
    assert (tuple(made.shape), made.dtype, made.device) == ((1000, 10**9), torch.bfloat16, torch.device("cpu"))
    assert made.requires_grad is False
    # Stagers copy the storage of what has a data pointer.
    assert made.data_ptr() == 0


def test_storage_token_changes_when_data_is_assigned(mesh: DeviceMesh) -> None:
    plain, placed = nn.Parameter(torch.ones(3, 2)), nn.Parameter(sharded(mesh))
    tokens = storage_token(plain), storage_token(placed)
    with torch.no_grad():
        plain.add_(1)
        placed.add_(1)
    plain.grad = torch.ones(3, 2)
    assert tokens == (storage_token(plain), storage_token(placed))
    shard = local_shard(placed)
    keep = plain.data, placed.data  # memory that is still in use is not given out again
    plain.data, placed.data = torch.zeros(3, 2), sharded(mesh)
    assert keep
    assert storage_token(plain) != tokens[0]
    assert storage_token(placed) != tokens[1]
    # Of a DTensor nothing else shows it.
    assert local_shard(placed) is shard
    assert placed.data_ptr() == 0


def test_without_dynamo_calls_the_function_and_keeps_its_signature() -> None:
    def function(first: int, *, second: int = 2) -> int:
        """Adds."""
        return first + second

    wrapped = without_dynamo(function)
    assert wrapped(1, second=4) == 5
    assert wrapped.__doc__ == "Adds."
    assert wrapped.__wrapped__ is function


def test_own_store_is_another_connection_with_a_prefix(mesh: DeviceMesh) -> None:
    store = own_store("mine")
    store.set("key", "value")
    groups = dist.group.WORLD.get_group_store()
    assert store is not groups
    assert dist.PrefixStore("mine", groups).get("key") == b"value"
    assert not groups.check(["key"])


def test_own_store_without_a_process_group_is_refused() -> None:
    with pytest.raises(ScopeError, match=r"no store to agree over; call torch\.distributed\.init_process_group"):
        own_store("mine")


def test_mesh_ranks_are_sorted_and_global() -> None:
    assert mesh_ranks(on_rank(2, [[2, 3], [0, 5]])) == (0, 2, 3, 5)


def test_root_mesh_ranks_are_those_of_the_mesh_it_was_sliced_from(mesh: DeviceMesh) -> None:
    whole = on_rank(3, [[0, 1], [2, 3]])
    part = on_rank(3, [1, 3], _root_mesh=whole)
    assert mesh_ranks(part) == (1, 3)
    assert root_mesh_ranks(part) == root_mesh_ranks(whole) == (0, 1, 2, 3)
    # A slice made by torch knows its root in the same way.
    two_axes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert two_axes["tp"]._get_root_mesh() is two_axes


class Asked(torch.optim.Optimizer):
    """Has a state that asks who reads it, and nothing else that torch could read or call before."""

    def __init__(self) -> None:
        pass

    @property
    def state(self) -> Any:  # type: ignore[override]
        refuse_dcp_state_dict()
        return {}

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch has read {name!r} before 'state'")

    step = zero_grad = state_dict = load_state_dict = None  # type: ignore[assignment]


DCP_CALLS = {
    "get_optimizer_state_dict": lambda model, one: dcp_state_dict.get_optimizer_state_dict(model, one),
    "get_state_dict": lambda model, one: dcp_state_dict.get_state_dict(model, one),
    "set_optimizer_state_dict": lambda model, one: dcp_state_dict.set_optimizer_state_dict(
        model, one, {"state": {}, "param_groups": []}
    ),
    "set_state_dict": lambda model, one: dcp_state_dict.set_state_dict(
        model, one, model_state_dict=model.state_dict(), optim_state_dict={"state": {}, "param_groups": []}
    ),
}


@pytest.mark.parametrize("call", DCP_CALLS)
def test_refuse_dcp_state_dict_is_what_torch_meets_first(call: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = Asked()
    with pytest.raises(TypeError, match=r"^torch\.distributed\.checkpoint\.state_dict .* give the optimizer itself to"):
        DCP_CALLS[call](model, optimizer)
    assert optimizer.state == {}
