"""A step or load that failed after its first write: from then on nobody steps or saves, until a good load."""

from __future__ import annotations

import hashlib

from shardopt.errors import RankFailureError, ShardoptError

__all__ = ["Poison", "fingerprint"]

# What a poisoned rank votes with in place of its state's digest: half-written state equals nobody's.
_MARK = b"a step failed after its first write"


def fingerprint(data: bytes) -> bytes:
    """What a vote's record has room for of ``data``: 16 bytes, none for none."""
    return hashlib.blake2b(data, digest_size=16).digest() if data else b""


class Poison:
    """Whether this rank's state is half written, and why.

    Attributes:
        reason: what a step or load raised after its first write, or None.
        operation: which of the two it was.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.operation = "step"

    def set(self, operation: str, failure: BaseException) -> None:
        """The operation has failed after it had begun to write."""
        self.operation = operation
        self.reason = f"{type(failure).__name__}: {failure}"

    def check(self) -> None:
        """Raises if the state is half written.

        Raises:
            ShardoptError: with the reason and the way out.
        """
        if self.reason is not None:
            raise ShardoptError(self.text())

    def text(self) -> str:
        """The reason and the way out."""
        return _say(self.operation, f"({self.reason})")

    def digest(self, own: bytes) -> bytes:
        """What to vote with when the state is described: ``own``, its digest, unless it is half written."""
        return own if self.reason is None else _MARK

    def refusal(self, verdict: RankFailureError | None) -> str | None:
        """Why the state must not be saved, or None. Half-written ranks are the only ones that may have disagreed.

        Raises:
            RankFailureError: the verdict, when it says anything else.
        """
        if verdict is None:
            return None if self.reason is None else self.text()
        ranks = self.known(verdict)
        if not ranks or verdict.failures or verdict.missing:
            raise verdict
        return self.text() if self.reason is not None else _say("step or load", f"on ranks {list(ranks)}")

    def known(self, verdict: RankFailureError) -> tuple[int, ...]:
        """The ranks that a verdict shows to be half written."""
        return verdict.disagree.get(fingerprint(_MARK).hex(), ())


def _say(operation: str, where: str) -> str:
    return (
        f"an earlier {operation} failed after it had begun to write {where}, so parameters and state may be half "
        "updated; load a good checkpoint (model and optimizer) to go on."
    )
