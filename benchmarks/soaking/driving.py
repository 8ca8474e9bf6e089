"""Runs episodes in the pool of ranks, and holds what every rank tells against the run without shards and breaks."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import shardopt
from benchmarks.soaking.comparing import Failure, Whole, assembled, differences
from benchmarks.soaking.episode import Episode, Leg
from benchmarks.soaking.following import Way, follow
from benchmarks.soaking.leg import Orders, Told, last_words, run_leg, run_oracle
from benchmarks.soaking.rules import RULES
from tests.support.parcel import unpack
from tests.support.ranks import Outcome, RankError, RankPool, Signal

__all__ = ["Failure", "Ran", "check_steps", "hidden_differences", "run_episode", "steps_left"]

# For a leg and for what its ranks have to say after one has failed, in seconds, as patience 1 has it.
_DEADLINE_S = 60.0
_GRACE_S = 40.0
_MOST_SHOWN = 8
_DONE = ("save finish",)  # where a killed save may have put the new checkpoint in place
_PACKAGE = str(Path(shardopt.__file__).parent) + os.sep


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


@dataclass(kw_only=True)
class _Course:
    """An episode under way.

    Attributes:
        oracle: by number of steps.
        saved: what the last leg held at the steps that its checkpoint may be of, by number of steps.
        hidden: and what state each of its ranks hid.
        ways: that the legs went, of rules that round by piece.
        source: the last checkpoint, or empty.
    """

    oracle: Mapping[int, Whole]
    saved: dict[int, Whole] = field(default_factory=dict)
    hidden: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    ways: list[Way] = field(default_factory=list)
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
    course = _Course(oracle=_unsharded(alone))
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
            check_steps(number, leg, told, course.saved)
            if RULES[episode.rule].rounds:
                _follow(pool, episode, leg, told, course, 2 * patience * _DEADLINE_S)
            _judge(episode, number, told, course)
            course.source = target
    finally:
        shutil.rmtree(root)
    course.ran.seconds = round(time.monotonic() - begun, 2)
    return course.ran


def _run_leg(pool: RankPool, orders: Orders, leg: Leg, deadline_s: float) -> list[Told]:
    signals = [Signal(rank=leg.victim, signal=signal.SIGKILL, at="kill")] if leg.kill else []
    try:
        outcomes = pool.outcomes(
            leg.world_size,
            run_leg,
            orders,
            deadline_s=deadline_s,
            grace_s=orders.patience * _GRACE_S,
            signals=signals,
        )
    except RankError as error:
        # The victim did not come to where it was to be killed.
        outcomes = list(error.outcomes)
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
    last = traceback.rpartition(_PACKAGE)
    return any(place in (last[2] or traceback) for place in ("/benchmarks/soaking/", "/tests/"))


def check_steps(number: int, leg: Leg, told: Sequence[Told], saved: Mapping[int, Whole]) -> None:
    """Looks are at one step on all ranks; a load brings one that was saved, and steps lead to what was asked for.

    Raises:
        Failure: it is not so.
    """
    moments = [[(look.moment, look.held.step, look.trained) for look in one.looks] for one in told]
    if any(one != moments[0] for one in moments):
        raise Failure("difference", f"leg {number}: ranks were at different steps: {moments}")
    for moment, step, trained in moments[0]:
        known = {*leg.steps(begun(told))} if trained else set(saved)
        if step not in known:
            raise Failure("difference", f"leg {number}: {moment}: at step {step}, expected one of {sorted(known)}")


def begun(told: Sequence[Told]) -> int:
    """The step that a leg resumed from; 0 if from none."""
    return next((look.held.step for look in reversed(told[0].looks) if not look.trained), 0)


def steps_left(leg: Leg, begin: int) -> set[int]:
    """Of which step the checkpoint that a leg leaves may be.

    A save that failed leaves the old one, also when a rank was killed before all was written. Only a save that was cut
    off at its end may be there after all.
    """
    return {*leg.steps(begin)[: 2 if leg.kill in _DONE else 1]}


def _follow(
    pool: RankPool, episode: Episode, leg: Leg, told: Sequence[Told], course: _Course, deadline_s: float
) -> None:
    """Makes the oracle that rounds as this leg did: to the bit, from the step it resumed from."""
    begin = begun(told)
    ranks = tuple(one.pieces for one in told) if told[0].by_shard else ()
    course.ways.append(Way(begin=begin, end=leg.steps(begin)[1], ranks=ranks))
    (alone,) = pool.outcomes(1, follow, episode, tuple(course.ways), process_group=False, deadline_s=deadline_s)
    course.oracle = _unsharded(alone)


def _unsharded(alone: Outcome) -> dict[int, Whole]:
    if alone.kind != "ok":
        raise Failure("soak", f"the unsharded run: {alone.kind}: {alone.error}\n{alone.traceback}{alone.stacks}")
    return {step: assembled([held]) for step, held in alone.value.items()}


def _judge(episode: Episode, number: int, told: Sequence[Told], course: _Course) -> None:
    """Holds a leg against the oracle, and against the checkpoint it came from."""
    leg = episode.legs[number]
    found = [f"rank {rank}: {problem}" for rank, one in enumerate(told) for problem in one.problems]
    seen: dict[int, Whole] = {}
    hidden: dict[int, list[dict[str, str]]] = {}
    looks = [one.looks for one in told]
    for same in zip(*looks, strict=True):
        step = same[0].held.step
        whole = assembled([look.held for look in same])
        hides = [look.held.hidden for look in same]
        if same[0].trained:
            seen[step], hidden[step] = whole, hides
        else:
            what = f"{same[0].moment}, against what was saved"
            found += [f"{what}: {item}" for item in differences(whole, course.saved[step])]
            if leg.is_cut_like(episode.legs[number - 1]):
                found += [f"{what}: {item}" for item in hidden_differences(hides, course.hidden[step])]
                course.ran.compared += sum(map(len, hides))
        against = differences(whole, course.oracle[step])
        found += [f"{same[0].moment}, step {step}, against the unsharded run: {item}" for item in against]
        course.ran.compared += len(whole.tensors) + len(whole.values)
    course.saved = {step: whole for step, whole in seen.items() if step in steps_left(leg, begun(told))}
    course.hidden = hidden
    course.ran.legs += 1
    course.ran.faults += len(leg.faults)
    course.ran.kills += bool(leg.kill)
    if found:
        more = [f"... and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
        raise Failure("difference", "\n".join([f"leg {number}:", *found[:_MOST_SHOWN], *more]))


def hidden_differences(got: Sequence[Mapping[str, str]], want: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Where ranks hold other state than the same ranks did, in as much as one bit."""
    for rank, (one, other) in enumerate(zip(got, want, strict=True)):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                yield f"{key} on rank {rank}: {str(one.get(key))[:200]}, expected {str(other.get(key))[:200]}"
