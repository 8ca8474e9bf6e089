"""Everything a save, a load or a look must leave as it was, on one rank: byte for byte, object for object."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.raw_values import Fact, fact_differences, facts, raw_bytes

__all__ = ["Snapshot", "snapshot"]


class OptimizerLike(Protocol):
    """A torch optimizer, or what has its two attributes."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Mapping[Any, Any]: ...


@dataclass(frozen=True)
class Snapshot:
    """Facts by path: ``parameter.F``, ``gradient.F``, ``buffer.F``, ``state.F['entry']``, ``group[i]['key']``,
    ``attribute.A``, ``hooks...``, ``rng...``, where F is a parameter's name.

    A snapshot holds the objects it has seen, so their ids are not used again. Sent to another process it forgets them.
    """

    facts: Mapping[str, Fact]
    has_identities: bool = True

    def diff(self, other: Snapshot, *, identities: bool = True, ignore: Sequence[str] = ()) -> list[str]:
        """One sentence per difference; empty if the two are the same.

        Args:
            other: the later snapshot.
            identities: compare objects and addresses too, not only types, structure and bytes.
            ignore: patterns of paths, as of ``fnmatch``, that may differ.
        """
        if identities and not (self.has_identities and other.has_identities):
            raise ValueError("a snapshot that came from another process has no identities; pass identities=False")
        sides = [_without(side.facts, ignore) for side in (self, other)]
        return fact_differences(*sides, identities=identities)

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, ({path: fact.without_identity() for path, fact in self.facts.items()}, False)


def _without(seen: Mapping[str, Fact], ignore: Sequence[str]) -> dict[str, Fact]:
    # In a pattern "[" is literal: paths are full of brackets, and sets of characters are of no use here.
    patterns = [pattern.replace("[", "[[]") for pattern in ignore]
    return {p: fact for p, fact in seen.items() if not any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)}


def snapshot(optimizer: OptimizerLike, model: nn.Module | Sequence[nn.Module]) -> Snapshot:
    """Looks at an optimizer, its model or models, and the random number generators; changes nothing.

    Not collective: it sees this rank's tensors only.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    names = _names(optimizer, models)
    seen: dict[str, Fact] = {}
    for part in (_model_facts(models), _group_facts(optimizer, names), _state_facts(optimizer, names)):
        seen.update(part)
    seen.update(_attribute_facts(optimizer))
    seen.update(_hook_facts(optimizer, models))
    seen.update(_rng_facts())
    return Snapshot(seen)


def _names(optimizer: OptimizerLike, models: Sequence[nn.Module]) -> dict[int, str]:
    """Name of every parameter, by id: from the model, else from its place in the groups."""
    names: dict[int, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            names[id(param)] = f"<group {index}, param {place}>"
    for prefix, model in _prefixed(models):
        for name, param in model.named_parameters():
            names[id(param)] = prefix + name
    return names


def _prefixed(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for index, model in enumerate(models):
        yield (f"{index}:" if len(models) > 1 else ""), model


def _model_facts(models: Sequence[nn.Module]) -> Iterator[tuple[str, Fact]]:
    for prefix, model in _prefixed(models):
        # Tied weights appear under each of their names: untying them is a difference.
        for name, param in model.named_parameters(remove_duplicate=False):
            yield from facts(f"parameter.{prefix}{name}", param)
            yield from facts(f"gradient.{prefix}{name}", param.grad)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            yield from facts(f"buffer.{prefix}{name}", buffer)
        yield f"training.{prefix}", Fact("modes", {name: part.training for name, part in model.named_modules()})


def _group_facts(optimizer: OptimizerLike, names: Mapping[int, str]) -> Iterator[tuple[str, Fact]]:
    groups = optimizer.param_groups
    yield "group", Fact(type(groups).__name__, {"length": len(groups)}, owner=groups)
    for index, group in enumerate(groups):
        path = f"group[{index}]"
        yield path, Fact(type(group).__name__, {"keys": frozenset(("str", repr(key)) for key in group)}, owner=group)
        members = tuple(names[id(param)] for param in group["params"])
        yield f"{path}['params']", Fact(type(group["params"]).__name__, {"params": members}, owner=group["params"])
        for place, param in enumerate(group["params"]):
            yield f"{path}['params'][{place}]", Fact("Parameter", owner=param)
        for key, value in group.items():
            if key != "params":
                yield from facts(f"{path}[{key!r}]", value)


def _state_facts(optimizer: OptimizerLike, names: Mapping[int, str]) -> Iterator[tuple[str, Fact]]:
    state = optimizer.state
    # By items, never by key: the state of a torch optimizer makes an entry for whatever key it is asked for.
    spelled = {_state_name(key, names): value for key, value in state.items()}
    details = {"keys": frozenset(("parameter", name) for name in spelled)}
    yield "state", Fact(type(state).__name__, details, owner=state)
    for name, entries in spelled.items():
        yield from facts(f"state.{name}", entries)


def _state_name(key: Any, names: Mapping[int, str]) -> str:
    if isinstance(key, Tensor):
        return names.get(id(key), "<a tensor that is no parameter>")
    return repr(key)


def _attribute_facts(optimizer: OptimizerLike) -> Iterator[tuple[str, Fact]]:
    """Counters and switches that optimizers keep on themselves, and their defaults."""
    for prefix, part in _with_inner(optimizer):
        for name, value in vars(part).items():
            if name == "defaults" or isinstance(value, bool | int | float | str):
                yield from facts(f"attribute.{prefix}{name}", value)


def _with_inner(optimizer: OptimizerLike) -> Iterator[tuple[str, object]]:
    """The optimizer, and those inside of it if it wraps some."""
    yield "", optimizer
    for index, inner in enumerate(getattr(optimizer, "optimizers", ())):
        yield f"optimizers[{index}].", inner


def _hook_facts(optimizer: OptimizerLike, models: Sequence[nn.Module]) -> Iterator[tuple[str, Fact]]:
    for inner, part in _with_inner(optimizer):
        yield from _hooks_of(f"hooks.optimizer.{inner}", part)
    for prefix, model in _prefixed(models):
        for name, module in model.named_modules():
            yield from _hooks_of(f"hooks.module.{prefix}{name}", module)
        for name, param in model.named_parameters():
            yield from _hooks_of(f"hooks.parameter.{prefix}{name}", param)


def _hooks_of(path: str, owner: object) -> Iterator[tuple[str, Fact]]:
    attributes = {*vars(owner), "_backward_hooks", "_post_accumulate_grad_hooks"}
    for attribute in sorted(name for name in attributes if "_hooks" in name):
        hooks = getattr(owner, attribute, None)
        if not isinstance(hooks, Mapping):
            continue
        for place, hook in enumerate(hooks.values()):
            yield f"{path}:{attribute}[{place}]", Fact(type(hook).__qualname__, owner=hook)


def _rng_facts() -> Iterator[tuple[str, Fact]]:
    yield "rng.torch", Fact("state", content=raw_bytes(torch.get_rng_state()))
    yield "rng.python", Fact("state", content=repr(random.getstate()).encode())
    # numpy hands out a new array each time, so only the values count.
    yield from ((path, fact.without_identity()) for path, fact in facts("rng.numpy", np.random.get_state()))
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            yield f"rng.cuda[{index}]", Fact("state", content=raw_bytes(state))
