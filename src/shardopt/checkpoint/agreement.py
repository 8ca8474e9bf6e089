"""What all ranks must have been given alike, and which error a rank raises when they fail together."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Mapping, Sequence

from shardopt.errors import LoadError, RankFailureError
from shardopt.scope import Scope
from shardopt.scope.verdict import say_ranks

__all__ = ["agree", "agree_on_arguments", "own_error"]

_MOST_SHOWN = 20


@contextlib.contextmanager
def own_error(problem: BaseException | None) -> Generator[None]:
    """Around a vote on this rank's ``problem``: what tells this rank more than the verdict's short text is raised.

    That is its own list of problems, and a verdict that an optimizer's ranks have come to before.
    """
    try:
        yield
    except RankFailureError as verdict:
        if isinstance(problem, (LoadError, RankFailureError)):
            # What it has come from itself says more than that all ranks have heard of it.
            raise problem from problem.__cause__ or (None if problem is verdict else verdict)
        raise


def agree(scope: Scope, operation: str, said: Mapping[str, str], *, problem: BaseException | None = None) -> None:
    """Collective: a vote that also fails when ranks say different things.

    Args:
        scope: who votes.
        operation: what they are about to do.
        said: item -> text; both are in the error when ranks differ.
        problem: why this rank cannot.

    Raises:
        RankFailureError: a rank has a problem or is missing, or ranks differ: in what, and which.
    """
    data = json.dumps(said, sort_keys=True).encode()
    digest = b"" if problem else hashlib.blake2b(data, digest_size=16).digest()
    try:
        with own_error(problem):
            scope.vote(operation, problem=problem, digest=digest)
    except RankFailureError as verdict:
        if not verdict.disagree or verdict.failures or verdict.missing:
            raise
        held = [json.loads(one) for one in scope.exchange(operation, data)]
        sentences = _differences(scope.ranks, held)
        shown = "\n".join(f"  - {sentence}" for sentence in sentences[:_MOST_SHOWN])
        more = f"\n  - and {len(sentences) - _MOST_SHOWN} more" * (len(sentences) > _MOST_SHOWN)
        raise RankFailureError(
            f"{operation}: ranks were given different things; nothing was changed:\n{shown}{more}",
            operation=operation,
            disagree=verdict.disagree,
        ) from None


def agree_on_arguments(scope: Scope, operation: str, said: Mapping[str, str], *, problem: BaseException | None) -> None:
    """Collective: ``agree``, but a rank whose own arguments are wrong raises that itself, in full and of its type."""
    try:
        agree(scope, operation, said, problem=problem)
    except RankFailureError as verdict:
        if problem is not None:
            raise problem from verdict
        raise


def _differences(ranks: Sequence[int], held: Sequence[Mapping[str, str]]) -> list[str]:
    sentences: list[str] = []
    for item in sorted({item for one in held for item in one}):
        holders: dict[str | None, list[int]] = {}
        for rank, one in zip(ranks, held, strict=True):
            holders.setdefault(one.get(item), []).append(rank)
        if len(holders) > 1:
            texts = (f"{say_ranks(who)} {'none' if text is None else text}" for text, who in holders.items())
            sentences.append(f"{item}: {'; '.join(texts)}")
    return sentences
