"""The test models: the same whole values on every topology, the odd shards they are there for, gathered exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.gather import gathered, gathered_gradients, gathered_parameters, whole
from tests.support.models import Shape, Topology, backward, build, local_part, local_tensor, set_gradients
from tests.support.ranks import RankError, RankPool
from tests.support.raw_values import raw_bytes, value_differences

PLACES: list[tuple[int, Topology]] = [
    (1, "fsdp"),
    (2, "fsdp"),
    (3, "fsdp"),
    (4, "fsdp"),
    (4, "hsdp"),
    (2, "fsdp_tp"),
    (4, "fsdp_tp"),
]
# 5 hidden features split 3 + 2 by tensor parallelism, then unevenly again by FSDP.
ODD = Shape(hidden=5)
MIXED = Shape(dtype=torch.bfloat16, ignored=("gain", "heads.1.bias"), gain=True)


def values_of(topology: Topology, shape: Shape) -> dict[str, Any]:
    model = build(topology, shape)
    set_gradients(model, 1, without=("scale",))
    return {"parameters": gathered_parameters(model), "gradients": gathered_gradients(model)}


def shards_of(topology: Topology) -> dict[str, tuple[str, torch.Size]]:
    model = build(topology)
    return {name: (str(p.placements), local_tensor(p).shape) for name, p in model.named_parameters()}


def kinds_of(topology: Topology, shape: Shape) -> dict[str, type]:
    return {name: type(param.data) for name, param in build(topology, shape).named_parameters()}


def gradients_of_a_batch(topology: Topology) -> dict[str, Any]:
    model = build(topology)
    loss = backward(model, 1)
    return {"loss": loss.full_tensor() if isinstance(loss, DTensor) else loss, **gathered_gradients(model)}


def states_of(topology: Topology, steps: int) -> dict[str, Any]:
    model = build(topology)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        set_gradients(model, step, without=("scale",))
        optimizer.step()
    return gathered(optimizer, model)


def parts_are_those_of_the_whole(topology: Topology) -> bool:
    model = build(topology, ODD)
    everything = gathered_parameters(model)
    return all(
        raw_bytes(local_tensor(param)) == raw_bytes(local_part(model, name, everything[name]))
        for name, param in model.named_parameters()
    )


def gather_different_values() -> None:
    whole({"same": 1, "step": dist.get_rank()})


def gather_different_keys() -> None:
    whole({"a": 1} if dist.get_rank() else {"a": 1, "b": 2})


def gather_eighths() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    codes = torch.arange(10, dtype=torch.uint8).view(torch.float8_e4m3fn)
    local = codes.tensor_split(2)[dist.get_rank()]
    return whole({"codes": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)})["codes"]


def sum_through_a_new_mesh(extra_groups: int) -> list[float]:
    for _ in range(extra_groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    value = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    return (value + value).full_tensor().tolist()


@pytest.mark.parametrize(("world_size", "topology"), PLACES)
@pytest.mark.parametrize("shape", [Shape(), ODD, MIXED], ids=["default", "odd", "mixed"])
def test_whole_values_do_not_depend_on_the_topology(
    ranks: RankPool, world_size: int, topology: Topology, shape: Shape
) -> None:
    expected = values_of("plain", shape)
    for got in ranks.run(world_size, values_of, topology, shape):
        assert value_differences(expected, got) == []


def test_gradients_depend_on_the_step_and_hold_a_negative_zero() -> None:
    model = build("plain")
    set_gradients(model, 1)
    first = gathered_gradients(model)
    set_gradients(model, 2)
    assert len(value_differences(first, gathered_gradients(model))) == len(first)
    zeros = first["kernel"] == 0
    assert zeros.sum() == 1
    assert first["kernel"][zeros].signbit().all()


def test_a_seed_makes_other_values() -> None:
    parameters = [gathered_parameters(build("plain", seed=seed)) for seed in (0, 0, 1)]
    assert value_differences(parameters[0], parameters[1]) == []
    assert len(value_differences(parameters[0], parameters[2])) == len(parameters[0])


def test_four_ranks_hold_the_odd_shards_they_are_meant_to(ranks: RankPool) -> None:
    shards = ranks.run(4, shards_of, "fsdp")
    held = [[rank[f"heads.{head}.weight"][1][0] for rank in shards] for head in range(5)]
    assert held == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [2, 2, 2, 1]]


def test_tensor_parallelism_makes_strided_shards(ranks: RankPool) -> None:
    (first, *_) = ranks.run(4, shards_of, "fsdp_tp")
    assert "_StridedShard" in first["up.weight"][0]
    assert first["down.weight"][0] == "(Shard(dim=0), Shard(dim=1))"
    assert first["scale"][0] == "(Shard(dim=0),)"


def test_replicas_hold_the_same(ranks: RankPool) -> None:
    shards = ranks.run(4, shards_of, "hsdp")
    assert shards[:2] == shards[2:]
    assert shards[0]["scale"][0] == "(Replicate(), Shard(dim=0))"


def test_ignored_parameters_stay_plain(ranks: RankPool) -> None:
    for kinds in ranks.run(2, kinds_of, "fsdp", MIXED):
        plain = {name for name, kind in kinds.items() if kind is torch.Tensor}
        assert plain == {"gain", "heads.1.bias"}


@pytest.mark.parametrize(("world_size", "topology"), PLACES)
def test_parts_are_those_of_the_whole(ranks: RankPool, world_size: int, topology: Topology) -> None:
    assert ranks.run(world_size, parts_are_those_of_the_whole, topology) == [True] * world_size


@pytest.mark.parametrize(("world_size", "topology"), [(1, "fsdp"), (2, "fsdp"), (4, "fsdp"), (4, "hsdp")])
def test_a_real_backward_has_the_gradients_of_one_process(ranks: RankPool, world_size: int, topology: Topology) -> None:
    (expected,) = ranks.run(1, gradients_of_a_batch, "plain", process_group=False)
    for got in ranks.run(world_size, gradients_of_a_batch, topology):
        assert value_differences(expected, got) == []


def test_gathered_state_of_dtensors_is_that_of_one_process(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, states_of, "plain", 2, process_group=False)
    assert "state.kernel.exp_avg" in expected
    assert "group.scale.lr" in expected
    assert "state.scale.exp_avg" not in expected
    for got in ranks.run(4, states_of, "fsdp_tp", 2):
        assert value_differences(expected, got) == []


def test_ranks_that_differ_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"ranks 0 and 1 differ in \['step'\]"):
        ranks.run(2, gather_different_values)
    with pytest.raises(RankError, match=r"ranks 0 and 1 differ in \['b'\]"):
        ranks.run(2, gather_different_keys)


def test_8_bit_floats_are_gathered_by_their_bytes(ranks: RankPool) -> None:
    for codes in ranks.run(2, gather_eighths):
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.view(torch.uint8).tolist() == list(range(10))


def test_a_topology_that_does_not_fit_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="hsdp needs a multiple of 2 ranks, not 3"):
        ranks.run(3, values_of, "hsdp", Shape())


def test_meshes_of_earlier_jobs_are_not_used_again(ranks: RankPool) -> None:
    """Torch caches the results of sharding propagation by mesh, and names groups by counting them."""
    for extra_groups in (2, 0, 1):
        assert ranks.run(2, sum_through_a_new_mesh, extra_groups) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2
