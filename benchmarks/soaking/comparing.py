"""What all ranks hold, put together, and where that differs from what it must be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.soaking.training import Held, Part

__all__ = ["Failure", "Whole", "assembled", "differences"]


class Failure(Exception):
    """What was not as it must be in an episode.

    Attributes:
        kind: ``difference``, ``hang``, ``error``, or ``soak``: in the soak's own code.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(kw_only=True)
class Whole:
    """What all ranks hold of a run together.

    Attributes:
        tensors: whole, by key.
        values: spelled, by key.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def assembled(ranks: Sequence[Held]) -> Whole:
    """Puts together what the ranks hold.

    Raises:
        Failure: ranks differ in what all have, one lacks what another has, or nobody has an element.
    """
    whole = Whole()
    seen: dict[str, Tensor] = {}
    for rank, held in enumerate(ranks):
        for key, spelled in held.values.items():
            if whole.values.setdefault(key, spelled) != spelled:
                raise Failure("difference", f"{key}: rank {rank} holds {spelled}, another {whole.values[key]}")
        for key, part in held.parts.items():
            length = torch.Size(part.shape).numel()
            target = whole.tensors.setdefault(key, torch.zeros(length, dtype=part.values.dtype))
            covered = seen.setdefault(key, torch.zeros(length, dtype=torch.bool))
            _put(target, covered, part, f"{key}: rank {rank}")
    for key, covered in seen.items():
        if not covered.all():
            raise Failure("difference", f"{key}: no rank holds element {int((~covered).nonzero()[0])}")
    _check_replicas(ranks, sorted(whole.tensors.keys() | whole.values.keys()))
    return whole


def _put(target: Tensor, covered: Tensor, part: Part, who: str) -> None:
    if target.dtype != part.values.dtype:
        raise Failure("difference", f"{who} holds {part.values.dtype}, another {target.dtype}")
    both = covered[part.index]
    if _bits(target[part.index][both]) != _bits(part.values[both]):
        raise Failure("difference", f"{who} differs from its replica")
    target[part.index], covered[part.index] = part.values, True


def _check_replicas(ranks: Sequence[Held], keys: Sequence[str]) -> None:
    """A rank has what another has, if it has elements of the parameter and no owner keeps the state."""
    owned = set[str]().union(*(held.owned for held in ranks))
    for key in keys:
        name = re.split(r"[/\[]", key, maxsplit=1)[0]
        if name in owned and name != key:
            continue
        for rank, held in enumerate(ranks):
            if held.counts.get(name) and key not in held.parts and key not in held.values:
                raise Failure("difference", f"{key}: missing on rank {rank}, another has it")


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def differences(got: Whole, want: Whole) -> Iterator[str]:
    """Where two runs differ, in as much as one bit."""
    for key in sorted(want.values.keys() | got.values.keys()):
        if want.values.get(key) != got.values.get(key):
            yield f"{key}: {got.values.get(key)}, expected {want.values.get(key)}"
    for key in sorted(want.tensors.keys() ^ got.tensors.keys()):
        yield f"{key}: {'missing' if key in want.tensors else 'must not be there'}"
    for key in sorted(want.tensors.keys() & got.tensors.keys()):
        one, other = got.tensors[key], want.tensors[key]
        if one.dtype != other.dtype:
            yield f"{key}: {one.dtype}, expected {other.dtype}"
        elif _bits(one) != _bits(other):
            changed = (one.view(torch.uint8) != other.view(torch.uint8)).reshape(len(one), -1).any(1)
            most = float((one.double() - other.double()).abs().max())
            yield f"{key}: {int(changed.sum())} of {len(one)} elements differ, by {most:.3g} at most"
