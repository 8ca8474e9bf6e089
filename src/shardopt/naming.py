"""Canonical parameter names: one FQN for a parameter, whatever wraps its module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shardopt.errors import NamingError

__all__ = ["Name", "canonical", "name_parameters", "names_of"]

# Components that torch's own wrappers put into a name: torch.compile, activation checkpointing, FSDP1.
_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class Name:
    """What a parameter is called.

    Attributes:
        fqn: the first name ``named_parameters`` gives it, wrapper components stripped.
        aliases: its other names when it is tied, in order.
    """

    fqn: str
    aliases: tuple[str, ...] = ()


def canonical(fqn: str) -> str:
    """``fqn`` without the components that wrappers add."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_COMPONENTS)


def _members(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for model in models:
        yield from model.named_parameters(remove_duplicate=False)


def names_of(models: Sequence[nn.Module]) -> dict[int, Name]:
    """``id(parameter)`` -> its name, for every parameter of the models.

    Raises:
        NamingError: two different parameters have one canonical name; all of them are listed.
    """
    found: dict[int, list[str]] = {}
    owner: dict[str, int] = {}
    collisions: list[str] = []
    for raw, parameter in _members(models):
        fqn = canonical(raw)
        first = owner.setdefault(fqn, id(parameter))
        if first != id(parameter):
            collisions.append(fqn)
            continue
        names = found.setdefault(id(parameter), [])
        if fqn not in names:
            names.append(fqn)
    if collisions:
        raise NamingError(
            f"{len(collisions)} names stand for two parameters each once wrapper components are stripped: "
            f"{_some(collisions)}. Rename the modules, or hold the models in one nn.ModuleDict and pass that."
        )
    return {key: Name(names[0], tuple(names[1:])) for key, names in found.items()}


def name_parameters(
    groups: Iterable[dict[str, list[Tensor]]], models: Sequence[nn.Module], *, first_group: int = 0
) -> list[tuple[int, Tensor, Name]]:
    """``(group index, parameter, name)`` for every parameter of an optimizer's groups, in their order.

    Raises:
        NamingError: a parameter is in no model; every such position is listed.
    """
    names = names_of(models)
    named: list[tuple[int, Tensor, Name]] = []
    unnamed: list[str] = []
    for index, group in enumerate(groups, first_group):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                unnamed.append(f"group {index} position {position} of shape {tuple(parameter.shape)}")
            else:
                named.append((index, parameter, name))
    if unnamed:
        raise NamingError(
            f"{len(unnamed)} optimizer parameters are in none of the models: {_some(unnamed)}. "
            "Pass every module that holds them (model=[model, head]); build the optimizer after fully_shard, which "
            "replaces parameters; and wrap before a forward pass or after reshard(), since an unsharded FSDP module "
            "shows other parameter objects."
        )
    return named


def _some(items: Sequence[str], most: int = 20) -> str:
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
