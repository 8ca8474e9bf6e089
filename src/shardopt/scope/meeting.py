"""How ranks that construct the same scope find each other in the store, and notice when they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from torch import distributed as dist

from shardopt.errors import ScopeError
from shardopt.scope.ballot import Ballot
from shardopt.scope.record import Record
from shardopt.scope.verdict import Verdict, say_ranks

__all__ = ["meet"]


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
    store.set(_place(rank), json.dumps([name, list(ranks), prefix]))
    try:
        verdict = ballot.cast(Record("construct"), interrupt=lambda: _conflict(store, ranks, rank, prefix))
    finally:
        # Before this rank votes in the new scope: then its first verdict may go, and this would read as unfinished.
        store.set(_place(rank), "")
    if not verdict.ok:
        raise ScopeError(_refusal(verdict, ranks, name))
    return ballot


def _conflict(store: dist.Store, ranks: Sequence[int], rank: int, prefix: str) -> Verdict | None:
    """A verdict against ranks that wait for this one in a scope that is not this one.

    Such ranks and this one would wait for each other to the deadline. A rank in a scope without this rank
    may still come; one whose scope is decided is about to leave it.
    """
    elsewhere: dict[int, str] = {}
    for other in ranks:
        if other == rank or not store.check([_place(other)]):
            continue
        announced = store.get(_place(other))
        if not announced:
            continue
        their_name, their_ranks, their_prefix = json.loads(announced)
        if their_prefix != prefix and rank in their_ranks and not store.check([f"{their_prefix}/v/1"]):
            elsewhere[other] = f"constructs scope {their_name!r} over {say_ranks(their_ranks)} there"
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


def _place(rank: int) -> str:
    """The key under which a rank says which scope it is constructing."""
    return f"now/{rank}"
