"""Payloads of any size through the store, around one vote."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import distributed as dist

from shardopt.scope.ballot import Ballot

__all__ = ["Parcel"]

# A TCPStore refuses values above 8 MiB.
_CHUNK_BYTES = 4 << 20
_LENGTH = struct.Struct("<Q")


class Parcel:
    """What the ranks of a ballot give each other around its next vote.

    Keys: ``p/<n>/<index>/<chunk>`` for vote ``n``, and ``p/<n>/read``, which counts the ranks that have read all.

    Args:
        ballot: whose store carries the payloads; its next vote tells when all are there.
        num_ranks: how many ranks the ballot has.
        index: this rank's place among them.
    """

    def __init__(self, ballot: Ballot, num_ranks: int, index: int) -> None:
        self._ballot = ballot
        self._store: dist.Store = ballot.store
        self._prefix = f"p/{ballot.sequence + 1}"
        self._num_ranks = num_ranks
        self._index = index

    def post(self, payload: bytes, *, index: int | None = None) -> None:
        """Puts a payload where the others can read it: this rank's, or one for rank ``index``. Before the vote."""
        framed = memoryview(_LENGTH.pack(len(payload)) + payload)
        place = self._index if index is None else index
        for key, start in zip(self._keys(place, len(payload)), range(0, len(framed), _CHUNK_BYTES), strict=True):
            # torch's stub says text; bytes are what it is for
            self._store.set(key, bytes(framed[start : start + _CHUNK_BYTES]))  # pyrefly: ignore[bad-argument-type]

    def withdraw(self, payload: bytes, *, index: int | None = None) -> None:
        """Takes back what was posted. After a vote that failed: nobody reads it then."""
        self._delete(self._keys(self._index if index is None else index, len(payload)))

    def collect(self, payload: bytes) -> list[bytes]:
        """All payloads in rank order, this rank's own given. After a vote that went well.

        The last rank to have read them all deletes them.

        Raises:
            TimeoutError: the store does not deliver what it holds before the ballot's deadline.
        """
        payloads = [payload if index == self._index else self._fetch(index) for index in range(self._num_ranks)]
        if self._store.add(f"{self._prefix}/read", 1) == self._num_ranks:
            for index, one in enumerate(payloads):
                self._delete(self._keys(index, len(one)))
            self._delete([f"{self._prefix}/read"])
        return payloads

    def take(self, index: int) -> bytes:
        """The payload of one place, which nobody else reads and which is deleted. After a vote that went well.

        Raises:
            TimeoutError: the store does not deliver what it holds before the ballot's deadline.
        """
        payload = self._fetch(index)
        self._delete(self._keys(index, len(payload)))
        return payload

    def _fetch(self, index: int) -> bytes:
        first = self._read(self._keys(index, 0)[0])
        (num_bytes,) = _LENGTH.unpack_from(first)
        rest = [self._read(key) for key in self._keys(index, num_bytes)[1:]]
        return b"".join([first[_LENGTH.size :], *rest])

    def _read(self, key: str) -> bytes:
        found = self._ballot.read([key])
        if found is None:
            raise TimeoutError(f"the store did not deliver {key!r}, which is there, before the deadline")
        return found[0]

    def _keys(self, index: int, num_bytes: int) -> list[str]:
        num_chunks = -(-(_LENGTH.size + num_bytes) // _CHUNK_BYTES)
        return [f"{self._prefix}/{index}/{chunk}" for chunk in range(num_chunks)]

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)
