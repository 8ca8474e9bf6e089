"""Runs episodes in the pool of ranks, and holds what every rank tells against the run without shards and breaks."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.soaking.episode import Episode, Leg
from benchmarks.soaking.leg import Orders, Told, last_words, run_leg, run_oracle
from benchmarks.soaking.rules import RULES
from benchmarks.soaking.training import Held
from tests.support.parcel import unpack
from tests.support.ranks import Outcome, RankPool, Signal

__all__ = ["Failure", "Ran", "run_episode"]

# In units of the dtype's spacing at the largest element of a tensor; steps add up, and each pulls on its last rounding.
_MOST_ROUNDING = 16.0
# For a leg and for what its ranks have to say after one has failed, in seconds, as patience 1 has it.
_DEADLINE_S = 60.0
_GRACE_S = 40.0
_MOST_SHOWN = 8
_BY_SHARD = ("auto", "local", "dtensor")


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
        counts: by parameter, elements on each rank.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Ran:
    """What an episode came to.

    Attributes:
        episodes: how many, in a sum.
        compared: how many tensors and values were compared with the oracle.
        steps: how many steps all legs took.
        legs: how many there were.
        faults: how many errors were injected.
        kills: how many ranks were killed.
        seconds: how long it took.
    """

    episodes: int = 0
    compared: int = 0
    steps: int = 0
    legs: int = 0
    faults: int = 0
    kills: int = 0
    seconds: float = 0.0


def assembled(ranks: Sequence[Held]) -> Whole:
    """Puts together what the ranks hold.

    Raises:
        Failure: ranks differ in what all have, or nobody has an element.
    """
    whole = Whole()
    seen: dict[str, Tensor] = {}
    for rank, held in enumerate(ranks):
        for name, count in held.counts.items():
            whole.counts.setdefault(name, []).append(count)
        for key, spelled in held.values.items():
            if whole.values.setdefault(key, spelled) != spelled:
                raise Failure("difference", f"{key}: rank {rank} holds {spelled}, another {whole.values[key]}")
        for key, part in held.parts.items():
            length = torch.Size(part.shape).numel()
            target = whole.tensors.setdefault(key, torch.zeros(length, dtype=part.values.dtype))
            covered = seen.setdefault(key, torch.zeros(length, dtype=torch.bool))
            if target.dtype != part.values.dtype:
                raise Failure("difference", f"{key}: {part.values.dtype} on rank {rank}, {target.dtype} on another")
            both = covered[part.index]
            if _bits(target[part.index][both]) != _bits(part.values[both]):
                raise Failure("difference", f"{key}: rank {rank} differs from its replica")
            target[part.index], covered[part.index] = part.values, True
    for key, covered in seen.items():
        if not covered.all():
            raise Failure("difference", f"{key}: no rank holds element {int((~covered).nonzero()[0])}")
    return whole


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def differences(got: Whole, want: Whole, rounded: set[str]) -> Iterator[str]:
    """Where two runs differ by more than the equality rule allows; ``rounded`` are parameters that may round."""
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
            off = _roundings(one, other)
            if key.partition("/")[0] not in rounded or not off <= _MOST_ROUNDING:
                changed = int((one.view(torch.uint8) != other.view(torch.uint8)).reshape(len(one), -1).any(1).sum())
                yield f"{key}: {changed} of {len(one)} elements differ, by {off:.3g} roundings of the largest"


def _roundings(got: Tensor, want: Tensor) -> float:
    if not got.is_floating_point():
        return float("inf")
    spacing = torch.finfo(got.dtype).eps * float(want.double().abs().max())
    return float((got.double() - want.double()).abs().max()) / spacing if spacing else float("inf")


@dataclass(kw_only=True)
class _Course:
    """An episode under way.

    Attributes:
        oracle: by number of steps.
        saved: what the last leg held, by number of steps.
        rounded: parameters whose runs by shards may have rounded otherwise.
        source: the last checkpoint, or empty.
    """

    oracle: Mapping[int, Whole]
    saved: dict[int, Whole] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)
    source: str = ""
    ran: Ran = field(default_factory=Ran)


def run_episode(
    pool: RankPool, episode: Episode, *, patience: float = 1.0, deadline_s: float | None = None, sabotage: str = ""
) -> Ran:
    """Runs all of it.

    Args:
        pool: of 4 ranks or more.
        episode: which.
        patience: how many times longer than usual all wait for ranks; 1 is for a machine with a core for each.
        deadline_s: for each leg, in seconds; who has not answered by then hangs. By default a minute, times patience.
        sabotage: key of ``sabotage.SABOTAGE``, or empty.

    Raises:
        Failure: with the first thing that is not as it must be.
    """
    begun = time.monotonic()
    (alone,) = pool.outcomes(1, run_oracle, episode, process_group=False, deadline_s=2 * patience * _DEADLINE_S)
    if alone.kind != "ok":
        raise Failure("soak", f"the unsharded run: {alone.kind}: {alone.error}\n{alone.traceback}{alone.stacks}")
    course = _Course(oracle={step: assembled([held]) for step, held in alone.value.items()})
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        for number, leg in enumerate(episode.legs):
            over = leg.save == "over" and course.source
            target = course.source if over else str(root / f"leg {number}")
            orders = Orders(
                episode=episode,
                number=number,
                source=course.source,
                target=target,
                patience=patience,
                sabotage=sabotage,
            )
            told = _run_leg(pool, orders, leg, patience * _DEADLINE_S if deadline_s is None else deadline_s)
            _judge(episode, number, told, course)
            course.source = target
    finally:
        shutil.rmtree(root)
    course.ran.seconds = round(time.monotonic() - begun, 2)
    return course.ran


def _run_leg(pool: RankPool, orders: Orders, leg: Leg, deadline_s: float) -> list[Told]:
    signals = [Signal(rank=leg.victim, signal=signal.SIGKILL, at="kill")] if leg.kill else []
    outcomes = pool.outcomes(
        leg.world_size,
        run_leg,
        orders,
        deadline_s=deadline_s,
        grace_s=orders.patience * _GRACE_S,
        signals=signals,
    )
    wrong = [one for one in outcomes if one.kind != ("died" if leg.kill and one.rank == leg.victim else "ok")]
    if wrong:
        raise _of_outcomes(orders.number, wrong)
    last = Path(last_words(orders.target))
    return [one.value if one.kind == "ok" else unpack(last.read_bytes()) for one in outcomes]


def _of_outcomes(number: int, wrong: Sequence[Outcome]) -> Failure:
    # Who waited in vain for a rank that failed otherwise says nothing of its own.
    causes = [
        one for one in wrong if not (one.error_type == "RankFailureError" and one.error_attributes.get("missing"))
    ]
    kind = "hang" if any(one.kind == "hang" for one in wrong) else "error"
    if causes and all(one.kind == "error" and _is_of_soak(one.traceback) for one in causes):
        kind = "soak"
    lines = [f"leg {number}:"]
    for one in causes or wrong:
        lines.append(
            f"rank {one.rank}: {one.kind}: {one.error_type} {one.error}\n{one.traceback}{one.stacks}{one.output}"
        )
    return Failure(kind, "\n".join(lines))


def _is_of_soak(traceback: str) -> bool:
    """Whether the soak's code, and none of shardopt's, is the last that an error has gone through before torch's."""
    last = traceback.rpartition("/src/shardopt/")
    return any(place in (last[2] or traceback) for place in ("/benchmarks/soaking/", "/tests/"))


def _judge(episode: Episode, number: int, told: Sequence[Told], course: _Course) -> None:
    """Holds a leg against the oracle, and against the checkpoint it came from."""
    leg = episode.legs[number]
    found = [f"rank {rank}: {problem}" for rank, one in enumerate(told) for problem in one.problems]
    seen: dict[int, Whole] = {}
    looks = [one.looks for one in told]
    for same in zip(*looks, strict=True):
        step = same[0].held.step
        whole = assembled([look.held for look in same])
        if same[0].trained:
            course.rounded |= _rounding(episode, leg, whole)
            seen[step] = whole
        else:
            what = f"{same[0].moment}, against what was saved"
            found += [f"{what}: {item}" for item in differences(whole, course.saved[step], set())]
        against = differences(whole, course.oracle[step], course.rounded)
        found += [f"{same[0].moment}, step {step}, against the unsharded run: {item}" for item in against]
        course.ran.compared += len(whole.tensors) + len(whole.values)
    course.saved = seen or course.saved
    course.ran.legs += 1
    course.ran.faults += len(leg.faults)
    course.ran.kills += bool(leg.kill)
    if found:
        more = [f"... and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
        raise Failure("difference", "\n".join([f"leg {number}:", *found[:_MOST_SHOWN], *more]))


def _rounding(episode: Episode, leg: Leg, whole: Whole) -> set[str]:
    """Parameters that this leg may round otherwise than a run without shards."""
    if not RULES[episode.rule].rounds or leg.compute not in _BY_SHARD:
        return set()
    return {name for name, counts in whole.counts.items() if any(count % 64 for count in counts)}
