"""How ranks that construct the same scope find each other in the store, and notice when they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import distributed as dist

from shardopt.errors import ScopeError
from shardopt.scope.ballot import FIRST_VERDICT, Ballot, peek
from shardopt.scope.record import Record
from shardopt.scope.verdict import Verdict, say_ranks

__all__ = ["meet"]


@dataclass(frozen=True, slots=True)
class _Announcement:
    """Which scope a rank is constructing, under a key of that rank: ``now/<rank>``.

    Attributes:
        rank: the rank that says so.
        name: of the scope.
        ranks: of the scope.
        prefix: of the scope's keys.
    """

    rank: int
    name: str
    ranks: tuple[int, ...]
    prefix: str

    @property
    def text(self) -> str:
        """What the rank does, for a sentence."""
        return f"constructs scope {self.name!r} over {say_ranks(self.ranks)} there"

    @property
    def verdict_key(self) -> str:
        """The key of the scope's first verdict."""
        return f"{self.prefix}/{FIRST_VERDICT}"

    @classmethod
    def read(cls, store: dist.Store, rank: int) -> _Announcement | None:
        """What a rank is constructing, or None."""
        if not (announced := peek(store, f"now/{rank}")):
            return None
        name, ranks, prefix = json.loads(announced)
        return cls(rank, name, tuple(ranks), prefix)

    def publish(self, store: dist.Store) -> None:
        """Says it."""
        store.set(f"now/{self.rank}", json.dumps([self.name, self.ranks, self.prefix]))

    def withdraw(self, store: dist.Store) -> None:
        """Says that the rank is not constructing a scope any more."""
        key = f"now/{self.rank}"
        store.set(key, "")
        # Nothing answers a set; this is answered after it. Else it could come after what this rank announces next, by
        # another connection. (Deleted instead, the key could vanish between the two requests of who reads it.)
        store.check([key])


def meet(store: dist.Store, ranks: Sequence[int], rank: int, *, name: str, timeout_s: float) -> Ballot:
    """Collective: the ballot of these ranks, after a first vote over it has succeeded.

    The ballot's keys are its own: they are derived from the ranks, the name, and how many times this rank
    has constructed a scope with these over this store. That count lives in the store, so it starts anew
    with a new process group and goes on when a store is used again.

    Args:
        store: a connection of its own, with a prefix all scopes share.
        ranks: global ranks, sorted; at least two.
        rank: this process's global rank, one of ``ranks``.
        name: the scope's name, the same on every rank.
        timeout_s: how long to wait for the others, here and in later votes.

    Raises:
        ScopeError: a rank did not come, or constructs another scope, one that waits for this rank.
        DistNetworkError: the store is gone.
    """
    index = ranks.index(rank)
    identity = hashlib.sha256(json.dumps([name, *ranks]).encode()).hexdigest()[:32]
    prefix = f"{identity}.{store.add(f'made/{identity}/{index}', 1)}"
    ballot = Ballot(dist.PrefixStore(prefix, store), ranks, index, timeout_s=timeout_s)
    announcement = _Announcement(rank, name, tuple(ranks), prefix)
    announcement.publish(store)
    try:
        verdict = ballot.cast(Record("construct"), interrupt=lambda: _conflict(store, announcement))
    finally:
        # Before this rank votes in the new scope: then its first verdict may go, and this would read as unfinished.
        announcement.withdraw(store)
    if not verdict.ok:
        raise ScopeError(_refusal(verdict, ranks, name))
    return ballot


def _conflict(store: dist.Store, mine: _Announcement) -> Verdict | None:
    """A verdict against ranks that wait for this one in another scope, which gets a verdict against this rank.

    Those ranks and this one would wait for each other to the deadline. A rank in a scope without this rank
    may still come. A scope that has its verdict is about to be left, theirs as well as this one: the other
    may have read the verdict already, and be in the next scope.
    """
    elsewhere: dict[int, str] = {}
    for rank in mine.ranks:
        theirs = None if rank == mine.rank else _Announcement.read(store, rank)
        if theirs is None or theirs.prefix == mine.prefix or mine.rank not in theirs.ranks:
            continue
        if not any(store.check([key]) for key in (mine.verdict_key, theirs.verdict_key)):
            # Here, because this rank leaves once it has read its own verdict, and is not there to be seen any more.
            store.compare_set(theirs.verdict_key, "", Verdict(failures={mine.rank: mine.text}).encode())
            elsewhere[rank] = theirs.text
    return Verdict(failures=elsewhere) if elsewhere else None


def _refusal(verdict: Verdict, ranks: Sequence[int], name: str) -> str:
    what = f"scope {name!r} over {say_ranks(ranks)} cannot be made"
    if verdict.missing:
        return (
            f"{what}: {say_ranks(verdict.missing)} did not construct it within {verdict.waited_s:g} s; "
            "every rank that holds these parameters must construct it, with the same ones"
        )
    causes = "; ".join(f"rank {rank} {text}" for rank, text in verdict.failures.items())
    return f"{what}: {causes}; every rank must construct it over the same ranks, under the same name"
