"""A parameter the optimizer updates, with its name and its place in global coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PlacementError
from shardopt.geometry import Box
from shardopt.naming import Name
from shardopt.torch_compat import local_box, local_shard, placed_like

__all__ = ["Keeping", "Kind", "Tracked", "check_device", "track"]


class Keeping(Enum):
    """Where the state of a parameter is between steps."""

    BESIDE_SHARD = "sharded like the parameter"
    HERE = "whole, on this rank alone"
    ELSEWHERE = "whole, on another rank alone"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a tensor must keep being for state that was made beside it to fit."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        """The tensor's kind now."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device)

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape} on {self.device}"


@dataclass(slots=True)
class Tracked:
    """One parameter of one inner optimizer.

    Attributes:
        name: canonical FQN and aliases.
        param: the user's own object, a DTensor or a plain tensor.
        shape: global shape.
        box: the part of it this rank holds; empty along a dim when the shard is empty.
        optimizer: index of the inner optimizer.
        group: index into the wrapper's joined ``param_groups``.
        kind: of this rank's shard when it was tracked.
        keeping: where its state is; its presentation decides.
        state_device: where its optimizer keeps all element-wise state; None is where the parameter is.
    """

    name: Name
    param: Tensor
    shape: tuple[int, ...]
    box: Box
    optimizer: int
    group: int
    kind: Kind = field(init=False)
    keeping: Keeping = Keeping.BESIDE_SHARD
    state_device: torch.device | None = None

    def __post_init__(self) -> None:
        self.kind = Kind.of(self.local)

    @property
    def fqn(self) -> str:
        """Canonical name."""
        return self.name.fqn

    @property
    def local(self) -> Tensor:
        """This rank's shard, or the plain parameter itself; never a copy."""
        return local_shard(self.param) if isinstance(self.param, DTensor) else self.param

    @property
    def has_whole_state(self) -> bool:
        """Whether what a rank holds of the state, if it holds any, is all of it."""
        return self.keeping is not Keeping.BESIDE_SHARD or not isinstance(self.param, DTensor)

    @property
    def is_same_everywhere(self) -> bool:
        """Whether every rank holds all of the state."""
        return self.keeping is Keeping.BESIDE_SHARD and not isinstance(self.param, DTensor)

    @property
    def state_box(self) -> Box | None:
        """The part that this rank holds of an element-wise state entry; None when the state is elsewhere."""
        if self.keeping is Keeping.ELSEWHERE:
            return None
        return Box.whole(self.shape) if self.has_whole_state else self.box

    @property
    def state_like(self) -> Tensor:
        """A tensor with the shape, dtype and device that this rank's part of an element-wise entry has; read only."""
        device = self.state_device or self.local.device
        if self.has_whole_state and isinstance(self.param, DTensor):
            # Of one element's memory: it is asked for its form.
            return torch.empty((), dtype=self.local.dtype, device=device).expand(self.shape)
        if device != self.local.device:
            return torch.empty((), dtype=self.local.dtype, device=device).expand(self.local.shape)
        return self.local

    def as_param(self, local: Tensor) -> Tensor:
        """Part of a state entry, placed like the parameter: a DTensor over it, or itself where it is the whole."""
        if self.has_whole_state or not isinstance(self.param, DTensor):
            return local
        return placed_like(self.param, local)


def track(name: Name, param: Tensor, *, optimizer: int, group: int) -> Tracked:
    """Works out where ``param`` sits.

    Raises:
        PlacementError: it is on the meta device, has ``Partial`` placements, or its shard is not the one
            torch's chunk rule gives this rank.
    """
    shape = tuple(param.shape)
    if param.device == torch.device("meta"):
        raise PlacementError(f"{name.fqn}: the parameter is on the meta device; materialise it (to_empty) first.")
    if not isinstance(param, DTensor):
        return Tracked(name, param, shape, Box.whole(shape), optimizer, group)
    if any(placement.is_partial() for placement in param.placements):
        raise PlacementError(
            f"{name.fqn}: a parameter placed {param.placements} is not one tensor; shard or replicate it."
        )
    box = Box(*local_box(param))
    local = local_shard(param)
    if tuple(local.shape) != box.size:
        raise PlacementError(
            f"{name.fqn}: this rank's shard has shape {tuple(local.shape)}, but {param.placements} of global shape "
            f"{shape} gives it {box.size}. Shards cut by hand have no known place; let distribute_tensor or "
            "fully_shard cut them."
        )
    return Tracked(name, param, shape, box, optimizer, group)


def check_device(tracked: Tracked) -> None:
    """Refuses a shard that is not on its mesh's device; not for parameters that FSDP keeps on the host.

    torch moves such a shard, or a copy of it, to the mesh's device at its own times, so that state would be made on
    one device and wanted on the other. Tried with meshes that have no hardware behind them only.

    Raises:
        PlacementError: they differ.
    """
    param = tracked.param
    if isinstance(param, DTensor) and tracked.local.device.type != param.device_mesh.device_type:
        raise PlacementError(
            f"{tracked.fqn}: this rank's shard is on {tracked.local.device}, its mesh on "
            f"{param.device_mesh.device_type!r}; move the model there before the optimizer is built. A shard may be on "
            "the host if fully_shard was given CPUOffloadPolicy."
        )
