"""Groups and meshes whose device is not where shards are: errors at once, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401, makes the backend "fake"

from shardopt import PlacementError, ShardedStateOptimizer, SwapAdamW, clip_grad_norm_
from shardopt.torch_compat import local_shard, placed_like

SHAPE = (4, 3)


@pytest.fixture
def group() -> Iterator[Callable[[str, int], None]]:
    """Makes a process group with this backend over so many ranks, of which this process is the first and only one."""
    yield lambda backend, size: dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=size)
    dist.destroy_process_group()


def on_the_host(device: str) -> nn.Module:
    """A parameter on a mesh of the device whose shard is on the host, as under CPU offload, with a gradient."""
    mesh = DeviceMesh(device, list(range(dist.get_world_size())))
    like = DTensor.from_local(torch.empty(SHAPE, device="meta"), mesh, [Shard(0)], run_check=False)
    net = nn.Module()
    net.weight = nn.Parameter(placed_like(like, torch.ones(SHAPE)))
    net.weight.grad = placed_like(like, torch.full(SHAPE, 2.0))
    assert net.weight.device.type == "cpu"
    return net


def test_a_clip_in_a_group_without_the_meshs_device_fails_at_once_and_changes_nothing_D7(
    group: Callable[[str, int], None],
) -> None:
    group("cuda:fake", 2)
    net = on_the_host("cpu")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        clip_grad_norm_(net.parameters(), 1.0)
    assert (local_shard(net.weight.grad) == 2.0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is that of a machine without the device")
def test_a_clip_of_host_gradients_asks_for_the_meshs_device_and_for_no_other_D7(
    group: Callable[[str, int], None],
) -> None:
    group("cuda:fake", 2)
    net = on_the_host("cuda")
    # Were it exchanged where gradients are, the group would have no backend for it.
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        clip_grad_norm_(net.parameters(), 1.0)
    assert (local_shard(net.weight.grad) == 2.0).all()


@pytest.mark.parametrize(
    ("rule", "compute"),
    [(torch.optim.AdamW, "auto"), (torch.optim.AdamW, "owner"), (torch.optim.SGD, "auto"), (SwapAdamW, "auto")],
)
def test_host_shards_on_a_mesh_of_devices_are_refused_when_the_wrapper_is_made_F13(
    rule: Any, compute: str, group: Callable[[str, int], None]
) -> None:
    group("cpu:gloo,cuda:fake", 1)
    net = on_the_host("cuda")
    before = local_shard(net.weight).clone()
    with pytest.raises(PlacementError, match=r"this rank's shard is on cpu, its mesh on 'cuda'; move the model there"):
        ShardedStateOptimizer(rule(net.parameters(), lr=0.1), net, compute=compute)
    assert torch.equal(local_shard(net.weight), before)
