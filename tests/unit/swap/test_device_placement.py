"""No load brings state to the parameters' device: parameters that say they are on a GPU, and a spy on what gets there.

The parameters' shards are tensors of the host that say "cuda:0", on a mesh of CUDA devices. What is made from such a
shard alone, or is copied into one, counts as having reached the device. What is asked to be made on "cuda" by name is
an error of torch's where there is none, and fails the test by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401, makes the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardopt
from shardopt import ShardedStateOptimizer, SwapAdamW
from shardopt.swap import held
from shardopt.swap.simulator import SimBackend
from shardopt.torch_compat import local_shard, placed_like
from tests.unit.swap.device_cases import on_device
from tests.unit.swap.swap_cases import same_bits

SHAPES = {"weight": (40, 30), "bias": (7,), "narrow": (64, 33)}
CUDA = torch.device("cuda", 0)
KINDS: dict[str, dict[str, Any]] = {
    "fp32 masters": {"master": "fp32", "amsgrad": True},
    "remainders": {"master": "remainder16", "moment_dtype": torch.bfloat16},
}


class OnDevice(Tensor):
    """Memory of the host that says it is the device's."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if args and isinstance(args[0], torch.device) and args[0].type == "cpu":
            return self.as_subclass(Tensor).clone()
        return super().to(*args, **kwargs)


class Spy(TorchDispatchMode):
    """Notes the elements of what reaches the device.

    Attributes:
        reached: operation and elements, of each.
        mixed: operations on tensors of both, which a device refuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[tuple[str, int]] = []
        self.mixed: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        sources = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        kinds = {isinstance(one, OnDevice) for one in sources if one.dim()}
        if len(kinds) == 2 and "copy_" not in str(func):
            self.mixed.append(str(func))
        theirs = {leaf.untyped_storage().data_ptr() for leaf in sources}
        for made in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            is_new = made.untyped_storage().data_ptr() not in theirs
            # Without a device of its own, what is made lies where it is made from.
            asked = given.get("device")
            if is_new and asked is None and sources and all(isinstance(one, OnDevice) for one in sources):
                self.reached.append((str(func), made.numel()))
        if "copy_" in str(func) and isinstance(args[0], OnDevice) and not isinstance(args[1], OnDevice):
            self.reached.append((str(func), args[0].numel()))
        return result

    def largest(self) -> int:
        return max((numel for _, numel in self.reached), default=0)


@pytest.fixture
def meshes() -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    """Of this process's host, and of a CUDA device that it has not."""
    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0]), DeviceMesh("cuda", [0])
    finally:
        dist.destroy_process_group()


def values(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    dtype = torch.bfloat16 if name == "narrow" else torch.float32
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def module_of(make: Callable[[str], Tensor]) -> nn.Module:
    net = nn.Module()
    for name in SHAPES:
        net.register_parameter(name, nn.Parameter(make(name)))
    return net


def on_host(mesh: DeviceMesh) -> nn.Module:
    return module_of(lambda name: distribute_tensor(values(name), mesh, [Shard(0)]))


def there(mesh: DeviceMesh) -> nn.Module:
    def make(name: str) -> Tensor:
        like = DTensor.from_local(torch.empty(SHAPES[name], device="meta"), mesh, [Shard(0)], run_check=False)
        return placed_like(like, values(name))

    net = module_of(make)
    for param in net.parameters():
        # Parameters are made of an alias, which is a plain tensor again.
        param._local_tensor = local_shard(param).as_subclass(OnDevice)
    return net


def train(net: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        for param in net.parameters():
            grad = torch.full_like(local_shard(param), step + 0.5)
            assert grad.device == local_shard(param).device
            param.grad = placed_like(param, grad)
        optimizer.step()


def state_of(net: nn.Module, inner: SwapAdamW) -> dict[str, Tensor]:
    return {
        f"{name}.{entry}": local_shard(value) if isinstance(value, DTensor) else value
        for name, param in net.named_parameters()
        for entry, value in inner.state[param].items()
    }


def stock(optimizer: ShardedStateOptimizer, path: Path) -> None:
    dcp.load({"optim": optimizer}, checkpoint_id=path)


def own(optimizer: ShardedStateOptimizer, path: Path) -> None:
    shardopt.load({"optim": optimizer}, path)


def prepared(optimizer: ShardedStateOptimizer, path: Path) -> None:
    state_dict = optimizer.state_dict()
    dcp.load({"optim": state_dict}, checkpoint_id=path)
    optimizer.prepare_load(state_dict).commit()


def from_path(optimizer: ShardedStateOptimizer, path: Path) -> None:
    optimizer.prepare_load(path).commit()


def from_dict(optimizer: ShardedStateOptimizer, path: Path) -> None:
    state_dict = optimizer.state_dict()
    dcp.load({"optim": state_dict}, checkpoint_id=path)
    optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [stock, own, prepared, from_path, from_dict], ids=lambda load: load.__name__)
def test_a_load_brings_no_tensor_to_the_device_F2(
    kind: str,
    load: Callable[..., None],
    meshes: tuple[DeviceMesh, DeviceMesh],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, device = meshes
    source = on_host(host)
    saved = SwapAdamW(source.parameters(), **KINDS[kind])
    wrapped = ShardedStateOptimizer(saved, source)
    train(source, wrapped, 2)
    dcp.save({"optim": wrapped}, checkpoint_id=tmp_path)
    net, backend = there(device), SimBackend()
    with monkeypatch.context() as patch:
        # Their memory is a plain tensor's, whatever they say.
        patch.setattr(held, "Tensor", OnDevice)
        inner = on_device(net.parameters(), backend, **KINDS[kind])
    assert inner._engine.device == CUDA
    optimizer = ShardedStateOptimizer(inner, net)
    train(net, optimizer, 1)
    with Spy() as spy:
        load(optimizer, tmp_path)
    assert spy.largest() <= 1, spy.reached
    found, wanted = state_of(net, inner), state_of(source, saved)
    assert same_bits(list(found.values()), [wanted[name] for name in found])
    assert all(type(one) is Tensor and one.device.type == "cpu" for one in found.values())
    train(net, optimizer, 1)
    assert inner.state
    assert backend.races == []


def test_what_reaches_the_device_is_seen() -> None:
    param = torch.ones(5).as_subclass(OnDevice)
    for reach in (
        lambda: torch.zeros_like(param),
        lambda: param.clone(),
        lambda: param.copy_(torch.zeros(5)),
    ):
        with Spy() as spy:
            reach()
        assert spy.largest() == 5, reach
    if not torch.cuda.is_available():
        for reach in (lambda: torch.ones(5).to(param.device), lambda: torch.empty(5, device="cuda")):
            with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
                reach()
    with Spy() as spy:
        param.eq(torch.ones(5))
    assert spy.mixed == ["aten.eq.Tensor"]
    with Spy() as spy:
        torch.ones(5).copy_(param)
        torch.zeros_like(param, device="cpu")
        param.detach().view(-1)
        param.to(torch.device("cpu")).eq(torch.ones(5))
    assert spy.reached == spy.mixed == []


@pytest.mark.parametrize("kind", KINDS)
def test_masters_follow_weights_on_the_device_without_comparing_across_devices_F12(
    kind: str, meshes: tuple[DeviceMesh, DeviceMesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = meshes
    net, twin = there(device), on_host(host)
    with monkeypatch.context() as patch:
        patch.setattr(held, "Tensor", OnDevice)
        inner = on_device(net.parameters(), SimBackend(), **KINDS[kind])
    other = SwapAdamW(twin.parameters(), **KINDS[kind])
    train(net, inner, 2)
    train(twin, other, 2)
    # As a load between steps does; the device's own writes come first.
    assert inner.state
    with torch.no_grad():
        for one in (net, twin):
            local_shard(one.narrow).fill_(0.25)
    with Spy() as spy:
        inner.settle()
    assert spy.mixed == []
    other.settle()
    train(net, inner, 1)
    train(twin, other, 1)
    found, wanted = state_of(net, inner), state_of(twin, other)
    assert same_bits(list(found.values()), [wanted[name] for name in found])
