"""What ranks hold differently, named, once a vote has shown that something is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardopt.scope.scope import Scope
from shardopt.scope.verdict import say_ranks

__all__ = ["differences"]

_MOST_SHOWN = 20


def differences(scope: Scope, held: Mapping[str, str]) -> str:
    """Collective, after a verdict that ranks disagree. What they disagree on, and which ranks: a line for each thing.

    Args:
        scope: the ranks that voted.
        held: what has to be the same on all ranks: text, short, by what a message calls it.
    """
    all_held = [json.loads(data) for data in scope.exchange("differences", json.dumps(dict(held)).encode())]
    sentences = _compare(scope.ranks, all_held)
    more = len(sentences) - _MOST_SHOWN
    return "\n".join([f"  - {one}" for one in sentences[:_MOST_SHOWN]] + ([f"  - and {more} more"] if more > 0 else []))


def _compare(ranks: Sequence[int], held: Sequence[Mapping[str, str]]) -> list[str]:
    sentences: list[str] = []
    for item in dict.fromkeys(name for one in held for name in one):
        holders: dict[str, list[int]] = {}
        for rank, one in zip(ranks, held, strict=True):
            holders.setdefault(one.get(item, ""), []).append(rank)
        lacking = holders.pop("", [])
        without = f"; {say_ranks(lacking)} without it" if lacking else ""
        if len(holders) > 1 or lacking:
            sentences.append(f"{item}: {' / '.join(map(say_ranks, holders.values()))}{without}")
    return sentences
