"""Where a state entry belongs; what cannot be placed is refused with parameter, entry, shape and what to do."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardopt import PlacementError
from shardopt.geometry import Box
from shardopt.layouts.infer import Elementwise, Value, Whole, infer
from shardopt.layouts.tracked import Tracked, track
from shardopt.naming import Name
from shardopt.torch_compat import local_shard

NAME = Name("block.weight")


def plain() -> Tracked:
    return track(NAME, torch.zeros(4, 3), optimizer=0, group=0)


def sharded(mesh: DeviceMesh) -> Tracked:
    """This rank's half of a parameter: the mesh is of one rank, so the other half is only said to exist."""
    param = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    return Tracked(NAME, param, (8, 3), Box((4, 0), (4, 3)), 0, 0)


@pytest.fixture(params=["plain", "sharded"])
def either(request: pytest.FixtureRequest) -> Tracked:
    return plain() if request.param == "plain" else sharded(request.getfixturevalue("mesh"))


def test_a_known_entry_of_the_shards_shape_is_elementwise(either: Tracked) -> None:
    value = torch.ones(4, 3)
    layout = infer(either, "exp_avg", value, elementwise=True)
    assert isinstance(layout, Elementwise)
    assert layout.local is value


@pytest.mark.parametrize("value", [3, 0.5, None, "text", True, (1, [2]), torch.tensor(4.0)], ids=str)
def test_what_holds_no_tensor_of_any_size_is_a_value(either: Tracked, value: Any) -> None:
    layout = infer(either, "step", value, elementwise=False)
    assert isinstance(layout, Value)
    assert layout.value is value


def test_a_known_0_d_entry_of_a_0_d_parameter_is_elementwise() -> None:
    tracked = track(NAME, torch.tensor(1.0), optimizer=0, group=0)
    assert isinstance(infer(tracked, "exp_avg", torch.tensor(2.0), elementwise=True), Elementwise)
    assert isinstance(infer(tracked, "step", torch.tensor(2.0), elementwise=False), Value)


@pytest.mark.parametrize("shape", [(8, 3), (3, 4), (4,), (), (4, 3, 1)])
def test_a_known_entry_of_another_shape_is_refused(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError) as caught:
        infer(sharded(mesh), "exp_avg", torch.zeros(shape), elementwise=True)
    assert str(caught.value) == (
        f"block.weight: state 'exp_avg' has shape {shape}, expected this rank's shard (4, 3) of the global shape "
        "(8, 3). It was made for another sharding; rebuild the optimizer and load its state."
    )


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4, 3),
        [torch.zeros(2)],
        {"a": {"b": (torch.zeros(2),)}},
        deque([torch.tensor(1.0)]),
        {"a": torch.zeros(())},
        (torch.zeros(2), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_tensors_are_whole_beside_a_plain_parameter_and_refused_beside_a_shard(
    value: Any, mesh: DeviceMesh
) -> None:
    layout = infer(plain(), "history", value, elementwise=False)
    assert isinstance(layout, Whole)
    assert layout.value is value
    with pytest.raises(PlacementError, match=r"block\.weight: state 'history' is a .*DTensors? placed like the param"):
        infer(sharded(mesh), "history", value, elementwise=False)


@pytest.mark.parametrize("shape", [(4, 3), (8, 3), (5,)])
def test_an_unknown_tensor_beside_a_shard_is_refused(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError) as caught:
        infer(sharded(mesh), "row", torch.zeros(shape), elementwise=False)
    sentence = str(caught.value)
    assert sentence.startswith(
        f"block.weight: state 'row' is a plain tensor of shape {shape} beside a parameter of global shape (8, 3) "
        "sharded (Shard(dim=0),); nothing says which part of the state it is."
    )
    assert sentence.endswith("Keep it as a DTensor placed like the parameter.")
    # Of the parameter's global shape on every rank: the likely cause is said.
    assert ("it was made on every rank in full" in sentence) == (shape == (8, 3))


def test_a_dtensor_placed_like_the_parameter_is_elementwise(mesh: DeviceMesh) -> None:
    tracked = track(NAME, distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]), optimizer=0, group=0)
    value = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    layout = infer(tracked, "exp_avg", value, elementwise=False)
    assert isinstance(layout, Elementwise)
    assert layout.local is local_shard(value)


@pytest.mark.parametrize(
    ("shape", "placement"),
    [((4, 3), Replicate()), ((4, 3), Shard(1)), ((4,), Shard(0)), ((4, 3, 1), Shard(0))],
    ids=str,
)
def test_another_dtensor_is_refused(mesh: DeviceMesh, shape: tuple[int, ...], placement: Any) -> None:
    tracked = track(NAME, distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]), optimizer=0, group=0)
    value = distribute_tensor(torch.zeros(shape), mesh, [placement])
    with pytest.raises(PlacementError) as caught:
        infer(tracked, "exp_avg", value, elementwise=True)
    assert str(caught.value).startswith(
        f"block.weight: state 'exp_avg' is a DTensor of shape {shape} placed {value.placements}; the parameter has "
        "shape (4, 3) placed (Shard(dim=0),). Only state of the parameter's shape and placement can be resharded"
    )
    assert str(caught.value).endswith("keep scalars as 0-d plain tensors.")


def test_a_dtensor_beside_a_plain_parameter_is_refused(mesh: DeviceMesh) -> None:
    value = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    with pytest.raises(
        PlacementError, match=r"block\.weight: state 'exp_avg' is a DTensor.*has shape \(4, 3\) placed not"
    ):
        infer(plain(), "exp_avg", value, elementwise=True)


def test_a_tracked_parameter_knows_its_place(mesh: DeviceMesh) -> None:
    tensor = torch.zeros(4, 3)
    tracked = track(NAME, tensor, optimizer=1, group=2)
    assert (tracked.fqn, tracked.shape, tracked.box) == ("block.weight", (4, 3), Box.whole((4, 3)))
    assert tracked.local is tracked.param is tensor
    assert tracked.as_param(value := torch.ones(4, 3)) is value
    param = distribute_tensor(torch.zeros(3, 4).t(), mesh, [Shard(0)])
    tracked = track(NAME, param, optimizer=1, group=2)
    assert tracked.local is local_shard(param)
    placed = tracked.as_param(tracked.local)
    assert isinstance(placed, DTensor)
    assert (placed.shape, placed.stride(), placed.placements) == (param.shape, param.stride(), param.placements)
    assert local_shard(placed).data_ptr() == tracked.local.data_ptr()


def test_a_parameter_without_a_place_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(PlacementError, match=r"block\.weight: the parameter is on the meta device; materialise it"):
        track(NAME, torch.zeros(2, device="meta"), optimizer=0, group=0)
    partial = DTensor.from_local(torch.zeros(2), mesh, [torch.distributed.tensor.Partial()], run_check=False)
    with pytest.raises(PlacementError, match=r"block\.weight: a parameter placed \(Partial.* shard or replicate it"):
        track(NAME, partial, optimizer=0, group=0)
    by_hand = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False, shape=torch.Size((3,)), stride=(1,))
    sentence = (
        r"block\.weight: this rank's shard has shape \(2,\).*global shape \(3,\) gives it \(3,\)\. .*distribute_tensor"
    )
    with pytest.raises(PlacementError, match=sentence):
        track(NAME, by_hand, optimizer=0, group=0)
