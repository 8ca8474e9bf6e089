"""Canonical parameter names: one FQN for a parameter, whatever wraps its module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardopt.errors import NamingError
from shardopt.torch_compat import fsdp_stand_ins

__all__ = ["Name", "canonical", "members_of", "name_parameters", "names_of"]

# Components that torch's own wrappers put into a name: torch.compile, activation checkpointing, FSDP1.
_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

# These call what they wrap "module". People do too, so only the class tells.
_DATA_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass(frozen=True, slots=True)
class Name:
    """What a parameter is called.

    Attributes:
        fqn: the first name it has in the models, wrapper components stripped; outside of them, the optimizer's.
        aliases: its other names when it is tied, in order.
        in_model: False when the name is the optimizer's, from its ``param_names``.
    """

    fqn: str
    aliases: tuple[str, ...] = ()
    in_model: bool = True

    @property
    def all(self) -> tuple[str, ...]:
        """Every name, the first one first."""
        return (self.fqn, *self.aliases)


def canonical(fqn: str) -> str:
    """``fqn`` without the components that wrappers add and nobody else uses.

    ``module`` of data parallelism stays: in a name alone, nothing tells it from a user's submodule of that name.
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_COMPONENTS)


def members_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical name and parameter, for every parameter of the models; tied ones under each of their names.

    A parameter that FSDP manages is FSDP's sharded one, whatever its module shows at the moment.
    """
    stand_ins = fsdp_stand_ins()
    for model in models:
        for prefix, module in _prefixed(model):
            # The base class's: wrappers override it to clean names in their own way.
            for name, parameter in nn.Module.named_parameters(module, recurse=False, remove_duplicate=False):
                yield prefix + name, stand_ins.get(id(parameter), parameter)


def _prefixed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What comes before the names of each module's parameters, and the module; a shared one at each of its places."""
    at: dict[str, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = ""
        if path:
            parent_path, _, component = path.rpartition(".")
            prefix, parent = at[parent_path]
            transparent = component in _WRAPPER_COMPONENTS or (
                component == "module" and isinstance(parent, _DATA_PARALLEL)
            )
            if not transparent:
                prefix += component + "."
        at[path] = prefix, module
        yield at[path]


def names_of(models: Sequence[nn.Module]) -> dict[int, Name]:
    """``id(parameter)`` -> its name, for every parameter of the models.

    Raises:
        NamingError: two different parameters have one canonical name; all of them are listed.
    """
    found: dict[int, list[str]] = {}
    owner: dict[str, int] = {}
    collisions: list[str] = []
    for fqn, parameter in members_of(models):
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
    groups: Iterable[Mapping[str, Any]], models: Sequence[nn.Module], *, first_group: int = 0
) -> list[tuple[int, Tensor, Name]]:
    """``(group index, parameter, name)`` for every parameter of an optimizer's groups, in their order.

    A parameter in none of the models has the name that ``param_names`` of its group gives it.

    Raises:
        NamingError: a parameter is in no model and has no name, or has one that stands for another parameter;
            every one is listed.
    """
    names = names_of(models)
    taken = {alias: key for key, name in names.items() for alias in (name.fqn, *name.aliases)}
    named: list[tuple[int, Tensor, Name]] = []
    unnamed: list[str] = []
    collisions: list[str] = []
    for index, group in enumerate(groups, first_group):
        own = _own_names(index, group)
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None and own is None:
                unnamed.append(f"group {index} position {position} of shape {tuple(parameter.shape)}")
                continue
            if name is None and own is not None:
                name = Name(canonical(own[position]), in_model=False)
                if taken.setdefault(name.fqn, id(parameter)) != id(parameter) or not name.fqn:
                    collisions.append(f"{own[position]!r} of shape {tuple(parameter.shape)}")
            if name is not None:
                named.append((index, parameter, name))
    _refuse(unnamed, collisions)
    return named


def _own_names(index: int, group: Mapping[str, Any]) -> Sequence[str] | None:
    """The names an optimizer was built with, one for each parameter of the group; None when it has none."""
    own = group.get("param_names")
    if own is None:
        return None
    if len(own) != len(group["params"]) or not all(isinstance(name, str) for name in own):
        raise NamingError(
            f"group {index}: 'param_names' is {_some(list(map(repr, own)))}, but the group has {len(group['params'])} "
            "parameters; it needs one string for each of them, in their order."
        )
    return own


def _refuse(unnamed: Sequence[str], collisions: Sequence[str]) -> None:
    problems: list[str] = []
    if unnamed:
        problems.append(
            f"{len(unnamed)} optimizer parameters are in none of the models and have no name: {_some(unnamed)}. "
            "Pass every module that holds them (model=[model, head]), or build the optimizer from named parameters "
            "(AdamW([*model.named_parameters(), ('temperature', temperature)])), whose names are then used. If the "
            "models should hold them, something has replaced them since the optimizer was built: build it after "
            "fully_shard and after load_state_dict(assign=True)."
        )
    if collisions:
        problems.append(
            f"{len(collisions)} optimizer parameters are in none of the models, and the names the optimizer was built "
            f"with stand for other parameters: {_some(collisions)}. Give each a name of its own. If the models should "
            "hold them, something has replaced them since the optimizer was built: build it after fully_shard and "
            "after load_state_dict(assign=True)."
        )
    if problems:
        raise NamingError("\n".join(problems))


def _some(items: Sequence[str], most: int = 20) -> str:
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
