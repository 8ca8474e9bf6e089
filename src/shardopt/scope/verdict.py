"""What all ranks read out of a vote: one verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from shardopt.errors import RankFailureError
from shardopt.scope.record import Record, Status

__all__ = ["Verdict", "all_well", "judge", "say_ranks"]

_OK = "ok "
_NOBODY: Mapping[int, str] = MappingProxyType({})
_NOTHING: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class Verdict(NamedTuple):
    """The outcome of one vote, the same on every rank.

    Attributes:
        complete: whether every rank's record is part of it.
        facts: the bitwise OR over the records.
        failures: global rank -> what went wrong there.
        missing: global ranks that did not arrive before the deadline.
        waited_s: the deadline they missed, in seconds.
        disagree: digest in hex -> the ranks that hold it; empty when there is one.
        operations: operation -> the ranks that called it; empty when there is one.
    """

    complete: bool = False
    facts: int = 0
    failures: Mapping[int, str] = _NOBODY
    missing: tuple[int, ...] = ()
    waited_s: float = 0.0
    disagree: Mapping[str, tuple[int, ...]] = _NOTHING
    operations: Mapping[str, tuple[int, ...]] = _NOTHING

    @property
    def ok(self) -> bool:
        """Whether every rank may go on."""
        return self.complete and not (self.failures or self.missing or self.disagree or self.operations)

    def encode(self) -> str:
        """The verdict as text (a store's ``compare_set`` takes nothing else)."""
        if self.ok:
            return all_well(self.facts)
        return json.dumps(self._asdict(), default=dict)

    @classmethod
    def decode(cls, data: bytes) -> Verdict:
        """The verdict that ``encode`` wrote."""
        if data == _NO_FACTS:
            return _WELL
        if data.startswith(_OK.encode()):
            return cls(complete=True, facts=int(data[len(_OK) :]))
        read = json.loads(data)
        return cls(
            complete=read["complete"],
            facts=read["facts"],
            failures={int(rank): text for rank, text in read["failures"].items()},
            missing=tuple(read["missing"]),
            waited_s=read["waited_s"],
            disagree={digest: tuple(ranks) for digest, ranks in read["disagree"].items()},
            operations={operation: tuple(ranks) for operation, ranks in read["operations"].items()},
        )

    def error(self, operation: str) -> RankFailureError:
        """The error every rank raises; ``operation`` is what this rank was doing."""
        calls = {rank: f"called {called!r}" for called, ranks in self.operations.items() for rank in ranks}
        return RankFailureError(
            "; ".join(self._sentences(operation)),
            operation=operation,
            failures=dict(sorted({**calls, **self.failures}.items())),
            missing=self.missing,
            disagree=self.disagree,
        )

    def _sentences(self, operation: str) -> list[str]:
        said: list[str] = []
        if self.failures:
            ranks_of: dict[str, list[int]] = {}
            for rank, text in self.failures.items():
                ranks_of.setdefault(text, []).append(rank)
            causes = "; ".join(f"{say_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
            if len(ranks_of) == 1:
                (causes,) = ranks_of
            said.append(f"{operation} failed on {say_ranks(self.failures)}: {causes}")
        if self.missing:
            said.append(
                f"{operation}: {say_ranks(self.missing)} did not arrive within {self.waited_s:g} s: "
                "stopped, dead, or not in this operation (a longer vote_timeout helps only if merely slow; a rank that "
                "has left an operation out stays behind in every vote from then on: restart the job)"
            )
        if self.operations:
            calls = ", ".join(f"{say_ranks(ranks)} called {called!r}" for called, ranks in self.operations.items())
            said.append(f"{calls}: every rank must call the same operations in the same order")
        if self.disagree:
            groups = ", ".join(f"{say_ranks(ranks)} {digest or '(none)'}" for digest, ranks in self.disagree.items())
            said.append(f"{operation}: ranks disagree, by digest: {groups}")
        return said


def all_well(facts: int) -> str:
    """The encoded verdict that every rank may go on."""
    return f"{_OK}{facts}"


# What nearly every vote ends in, made once.
_NO_FACTS = all_well(0).encode()
_WELL = Verdict(complete=True)


def judge(ranks: Sequence[int], records: Sequence[Record | None], *, waited_s: float | None = None) -> Verdict:
    """The verdict over ``records``, one per rank and None where there is none.

    Args:
        ranks: global ranks, in the order of ``records``.
        records: what each rank said.
        waited_s: the deadline that has passed, in seconds; None when it has not, then a rank without a
            record is not held to be missing, and the verdict is merely not complete.
    """
    there = {rank: record for rank, record in zip(ranks, records, strict=True) if record is not None}
    well = {rank: record for rank, record in there.items() if record.status is Status.OK}
    operations = _group((record.operation, rank) for rank, record in there.items())
    digests = _group((record.digest.hex(), rank) for rank, record in well.items())
    facts = 0
    for record in there.values():
        facts |= record.facts
    return Verdict(
        complete=len(there) == len(ranks),
        facts=facts,
        failures={rank: record.text for rank, record in there.items() if rank not in well},
        missing=() if waited_s is None else tuple(rank for rank in ranks if rank not in there),
        waited_s=waited_s or 0.0,
        # digests of different operations have nothing to do with each other
        disagree=digests if len(digests) > 1 and len(operations) == 1 else {},
        operations=operations if len(operations) > 1 else {},
    )


def say_ranks(ranks: Iterable[int]) -> str:
    """Ranks for a sentence: ``rank 1``, ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def _group(pairs: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """Key -> ranks that hold it, in the order of the first rank."""
    groups: dict[str, tuple[int, ...]] = {}
    for key, rank in pairs:
        groups[key] = (*groups.get(key, ()), rank)
    return groups
