"""A model of an episode on one layout, or unsharded: its parameters, its data, and what a rank holds of the run."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks.soaking.episode import Cell, Episode
from benchmarks.soaking.rules import RULES
from tests.support.models import local_tensor
from tests.support.raw_values import facts

__all__ = ["Held", "Part", "Training", "build"]

_EVERY = 3  # a late parameter has no gradient in every third step
_PULL = 0.25  # a power of two: to multiply by it rounds nothing


class Holder(nn.Module):
    """One parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def drawn(key: str, shape: Iterable[int]) -> Tensor:
    """Normal numbers, fp32, of a key and a shape alone."""
    source = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(tuple(shape), generator=source)


def build(episode: Episode, layout: str | None, fill: str) -> nn.Module:
    """The model on this job's ranks. Collective, unless there is no layout.

    Args:
        episode: whose model.
        layout: key of ``LAYOUTS``, or None.
        fill: key of the initial values; ``"index"`` fills parameters with the numbers of their own elements, in fp64.
    """
    model = nn.Module()
    for cell in episode.cells:
        if fill == "index":
            value = torch.arange(torch.Size(cell.shape).numel(), dtype=torch.float64).reshape(cell.shape)
        else:
            value = drawn(f"{fill}/{cell.name}", cell.shape).to(episode.dtype)
        holder = Holder(nn.Parameter(value, requires_grad=cell.kind != "frozen"))
        setattr(model, cell.name, holder)
        if cell.tied:
            setattr(model, f"{cell.name}_again", Holder(holder.weight))
    if layout is not None:
        _lay_out(model, episode.cells, layout)
    return model


def _lay_out(model: nn.Module, cells: tuple[Cell, ...], layout: str) -> None:
    data: DeviceMesh | None = None
    if layout == "tp2":
        _cut(model, cells, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    elif layout == "fsdp2xtp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        _cut(model, cells, mesh["tensor"])
        data = mesh["data"]
    elif layout == "hsdp2x2":
        data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        data = init_device_mesh("cpu", (int(layout.removeprefix("fsdp")),))
    if data is not None:
        plain = {model.get_parameter(f"{cell.name}.weight") for cell in cells if cell.kind == "plain"}
        fully_shard(model, mesh=data, ignored_params=plain)


def _cut(model: nn.Module, cells: tuple[Cell, ...], mesh: DeviceMesh) -> None:
    for cell in cells:
        if cell.tensor_dim is not None:
            holder = model.get_submodule(cell.name)
            whole = holder.weight.detach()  # type: ignore[operator]
            holder.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(cell.tensor_dim)]))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements of one tensor that a rank holds.

    Attributes:
        shape: of the whole.
        index: which elements, in row-major numbering; int64, 1-D.
        values: what they are, 1-D.
    """

    shape: tuple[int, ...]
    index: Tensor
    values: Tensor


@dataclass
class Held:
    """What one rank holds of a run.

    Attributes:
        step: how many steps there have been.
        parts: weights by name, and state of their shape by ``name/entry``.
        values: everything else, spelled to the bit: other state by ``name/entry``, group values by ``name[key]``.
        counts: elements of each parameter on this rank.
        hidden: of rules that hide it, the state of this rank alone, spelled, by ``name/entry``.
        owned: parameters whose state one rank keeps for all.
    """

    step: int
    parts: dict[str, Part] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)


class Training:
    """A model with its data: each step's gradients, of elements of the present weights and of the step alone."""

    def __init__(self, episode: Episode, layout: str | None, fill: str) -> None:
        self.episode = episode
        self.model = build(episode, layout, fill)
        twin = build(episode, layout, "index")
        self.index = {name: local_tensor(param).long() for name, param in twin.named_parameters()}
        self.params = dict(self.model.named_parameters())
        # Of a rule for whole parameters a factor of one row may by accident look like this rank's shard.
        self._by_shard = "local" in RULES[episode.rule].computes
        self._kinds = {f"{cell.name}.weight": cell.kind for cell in episode.cells}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """New ones."""
        torch.manual_seed(0)
        return RULES[self.episode.rule].make(list(self.params.values()))

    def give_gradients(self, step: int) -> None:
        """Sets each gradient, or None. No communication: an element's gradient is noise and a pull to zero."""
        for name, param in self.params.items():
            kind = self._kinds[name]
            if kind in ("frozen", "idle") or (kind == "late" and step % _EVERY == 0):
                param.grad = None
                continue
            noise = drawn(f"{self.episode.seed}/{self.episode.number}/{step}/{name}", param.shape)
            local = local_tensor(param)
            value = noise.reshape(-1)[self.index[name]] + local.float() * _PULL
            param.grad = self._like(param, value.to(param.dtype))

    def _like(self, param: Tensor, local: Tensor) -> Tensor:
        if not isinstance(param, DTensor):
            return local
        mesh, placements = param.device_mesh, param.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())

    def held(self, step: int, optimizers: Iterable[torch.optim.Optimizer], *, state: bool) -> Held:
        """What this rank holds, copied; read from the inner optimizers' own objects."""
        held = Held(step)
        names = {param: name for name, param in self.params.items()}
        for name, param in self.params.items():
            held.parts[name] = self._part(name, local_tensor(param), whole=False)
            held.counts[name] = local_tensor(param).numel()
        for optimizer in optimizers:
            for param, entries in optimizer.state.items():
                for entry, value in entries.items():
                    if state:
                        self._hold(held, names[param], entry, value)
                    else:
                        key = f"{names[param]}/{entry}"
                        held.hidden[key] = _spelled(key, value)
            for group in optimizer.param_groups:
                shared = {key: _spelled(key, value) for key, value in group.items() if key != "params"}
                for param in group["params"]:
                    held.values.update({f"{names[param]}[{key}]": value for key, value in shared.items()})
        return held

    def _hold(self, held: Held, name: str, entry: str, value: Any) -> None:
        key, param = f"{name}/{entry}", self.params[name]
        if isinstance(value, DTensor):
            held.parts[key] = self._part(name, local_tensor(value), whole=False)
        elif isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value) and value.dim():
            if value.shape == param.shape:
                held.parts[key] = self._part(name, value, whole=True)
            elif self._by_shard and value.shape == local_tensor(param).shape:
                held.parts[key] = self._part(name, value, whole=False)
            else:
                held.values[key] = _spelled(key, value)
        else:
            held.values[key] = _spelled(key, value)

    def _part(self, name: str, value: Tensor, *, whole: bool) -> Part:
        shape = tuple(self.params[name].shape)
        index = torch.arange(torch.Size(shape).numel()) if whole else self.index[name].reshape(-1)
        return Part(shape=shape, index=index, values=value.detach().reshape(-1).clone())


def _spelled(key: str, value: Any) -> str:
    """Type, structure and bytes."""
    seen = [
        (path, fact.type_name, sorted(map(repr, fact.details.items())), fact.content)
        for path, fact in facts(key, value)
    ]
    return repr(seen)
