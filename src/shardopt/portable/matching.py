"""Which parameter of a checkpoint is which live parameter: by name, through the other names of tied ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardopt.layouts.tracked import Tracked
from shardopt.portable.manifest import Manifest

__all__ = ["Match", "match_names"]


@dataclass(frozen=True, slots=True)
class Match:
    """How names correspond.

    Attributes:
        saved_as: live FQN -> the FQN under which the checkpoint has the parameter.
        missing: live FQNs the checkpoint does not have.
        unused: FQNs of the checkpoint that no live parameter has.
        merged: FQN of the checkpoint -> live FQN of the tied parameter that takes another one's state.
    """

    saved_as: Mapping[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    merged: Mapping[str, str]


def match_names(tracked: Mapping[str, Tracked], manifest: Manifest) -> Match:
    """Matches live parameters with saved ones.

    A parameter that was tied when it was saved has one state and several names, and goes to every live parameter that
    has one of them. Of several saved parameters that are tied now, the one that has the first of the live names counts,
    as its own name or as another one.

    Args:
        tracked: live parameters by FQN.
        manifest: what was saved.
    """
    canonical_of = {alias: fqn for fqn, record in manifest.parameters.items() for alias in record.aliases}
    saved_as: dict[str, str] = {}
    live_name_of: dict[str, str] = {}
    for fqn, item in tracked.items():
        names = item.name.all
        live_name_of.update(dict.fromkeys(names, fqn))
        found = [name if name in manifest.parameters else canonical_of.get(name) for name in names]
        found = [name for name in found if name is not None]
        if found:
            saved_as[fqn] = found[0]
    used = set(saved_as.values())
    rest = [fqn for fqn in manifest.parameters if fqn not in used]
    names_of = {fqn: (fqn, *manifest.parameters[fqn].aliases) for fqn in rest}
    merged = {fqn: live_name_of[n] for fqn, names in names_of.items() for n in reversed(names) if n in live_name_of}
    return Match(
        saved_as=saved_as,
        missing=tuple(sorted(fqn for fqn in tracked if fqn not in saved_as)),
        unused=tuple(sorted(fqn for fqn in rest if fqn not in merged)),
        merged=merged,
    )
