"""The protocol of a vote over a store: who writes which key, who decides, when keys go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import distributed as dist

from shardopt.scope.record import Record, facts_if_well
from shardopt.scope.tally import Tally
from shardopt.scope.verdict import Verdict, all_well, judge

__all__ = ["FIRST_VERDICT", "Ballot", "peek"]

# How long one request may block inside the store, where Python sees neither Ctrl-C nor the deadline. After that the
# store is asked now and then. Shorter would make torch log a warning for every vote with a slow peer.
_BLOCK_S = 5.0
_POLL_SHARE = 0.05  # of the time already waited, so that polling makes a vote 5 % longer at most
_MIN_POLL_S = 0.001
_MAX_POLL_S = 1.0
# Keys nobody needs any more are deleted this many at a time. A deletion waits for the store's answer, and a single one
# mostly for the store's process to be woken.
_SWEEP = 32


class Ballot:
    """Votes of a fixed set of ranks over a store, one after the other, each with exactly one verdict.

    In vote ``n`` every rank sets its record and then adds itself to the vote's count, which tells whoever comes
    last that it is the last, and whether all have said the same. It publishes the verdict; the others wait for it.
    Whoever reaches its deadline before that closes the count and publishes a verdict over the records that are there.
    ``compare_set`` lets the first verdict stand, and every rank, the late included, acts on that one only.
    So no rank leaves with another verdict than its peers, and the sequence numbers stay in step.

    That all are well is published without a question, and is known to the last rank after a single one. It may be,
    because the count was complete before anybody closed it: whoever closes it later finds all records, and judges
    them the same.

    Keys: ``v/<n>``, a verdict, and ``c/<n>``, a count, may go once a later verdict has a record of every rank: a
    rank that votes again has read it. ``r/<n>/<index>``, a record, may go when its rank votes again: nobody needs it
    by then. All do so a few dozen at a time. The first rank overwrites one record, ``r/first``, instead.

    A store whose host is stopped stops its votes, past the deadline, until the host runs again or the
    connection breaks: nobody could know what verdict the host has already read.

    Args:
        store: a connection of its own (a request that waits holds up others on the same connection), with
            a prefix of its own.
        ranks: global ranks, in the same order everywhere.
        index: this rank's place in ``ranks``.
        timeout_s: how long to wait for the others, from this rank's arrival.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], index: int, *, timeout_s: float) -> None:
        self.store = store
        self.sequence = 0
        self._ranks = tuple(ranks)
        self._index = index
        self.set_timeout(timeout_s)
        self._tally = Tally(len(self._ranks))
        self._written: list[list[str]] = []  # keys of each vote, the oldest first; only the last may still be needed
        self._stale: list[str] = []  # keys that go at this rank's next sweep

    def cast(
        self, record: Record, *, leave: bool = False, interrupt: Callable[[], Verdict | None] | None = None
    ) -> Verdict:
        """Votes, and returns the verdict every rank gets. Collective.

        Args:
            record: this rank's word; its sequence number is filled in here.
            leave: publish a verdict at once, over the records that are there, instead of waiting for
                more; for a rank that has failed and will not be back.
            interrupt: in the first vote, asked again and again while waiting; a verdict it returns is published.

        Raises:
            DistNetworkError: the store is gone.
        """
        data = record.encode(self.sequence + 1)
        # Counted before anything is written: whatever interrupts this vote, the next one has its own number.
        self.sequence += 1
        share, count = self._arrive(data)
        verdict = self._close(None) if leave else self._outcome(data, share, count, interrupt)
        self._clear(verdict)
        return verdict

    def set_timeout(self, timeout_s: float) -> None:
        """Sets how long to wait for the others from now on, in seconds."""
        self.timeout_s = timeout_s
        self.store.set_timeout(timedelta(seconds=min(_BLOCK_S, timeout_s)))

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of keys, or None when they are not all there before the deadline."""
        return self._await(list(keys), lambda: False)

    def _arrive(self, data: bytes) -> tuple[int, int]:
        """Leaves the record, then counts this rank in: what it adds, and the count after that."""
        # torch's stub says text; bytes are what it is for
        self.store.set(self._record_key(self._index), data)  # pyrefly: ignore[bad-argument-type]
        # What has no owner is deleted by the first rank, for all.
        shared = [_verdict_key(self.sequence), self._count_key()]
        self._written.append([self._record_key(self._index)] if self._index else shared)
        share = self._tally.share(data)
        return share, self.store.add(self._count_key(), share)

    def _outcome(self, own: bytes, share: int, count: int, interrupt: Callable[[], Verdict | None] | None) -> Verdict:
        """The verdict: this rank's, if it is the last to arrive, else the one it waits for."""
        if self._tally.is_last(count):
            facts = facts_if_well(own)
            # The first vote of a scope may be given a verdict from outside, so there nothing is published unasked.
            if facts is not None and self.sequence > 1 and self._tally.is_unanimous(count, share):
                verdict = all_well(facts)
                self.store.set(_verdict_key(self.sequence), verdict)
                return Verdict.decode(verdict.encode())
            return self._publish(judge(self._ranks, self._records(all_there=True)).encode())
        keys = [_verdict_key(self.sequence)]
        found = self._await(keys, lambda: self._is_decided(interrupt), block=interrupt is None)
        if found:
            return Verdict.decode(found[0])
        decided = peek(self.store, keys[0])
        return self._close(self.timeout_s) if decided is None else Verdict.decode(decided)

    def _await(self, keys: list[str], give_up: Callable[[], bool], *, block: bool = True) -> list[bytes] | None:
        """The values of keys as soon as all are there; None when it was given up or the deadline has passed."""
        start = time.monotonic()
        values = _get(self.store, keys) if block else None
        while values is None and (waited_s := time.monotonic() - start) < self.timeout_s and not give_up():
            if self.store.check(keys):
                values = _get(self.store, keys)
            else:
                time.sleep(min(_MAX_POLL_S, max(_MIN_POLL_S, _POLL_SHARE * waited_s), self.timeout_s - waited_s))
        return values

    def _is_decided(self, interrupt: Callable[[], Verdict | None] | None) -> bool:
        verdict = interrupt() if interrupt else None
        if verdict is not None:
            self._publish(verdict.encode())
        return self.store.check([_verdict_key(self.sequence)])

    def _close(self, waited_s: float | None) -> Verdict:
        """Publishes a verdict over the records that are there, once nobody can decide otherwise without them."""
        self.store.add(self._count_key(), self._tally.closed)
        return self._publish(judge(self._ranks, self._records(), waited_s=waited_s).encode())

    def _records(self, *, all_there: bool = False) -> list[Record | None]:
        keys = [self._record_key(index) for index in range(len(self._ranks))]
        found = _get(self.store, keys) if all_there else None
        records: list[Record | None] = []
        for data in [peek(self.store, key) for key in keys] if found is None else found:
            record = None if data is None else Record.decode(data)
            # The record that is overwritten may be of another vote. Of a later one: then the verdict is out already.
            records.append(record if record and record.sequence == self.sequence else None)
        return records

    def _publish(self, encoded: str) -> Verdict:
        """The verdict that stands: this one, unless there is one already."""
        return Verdict.decode(self.store.compare_set(_verdict_key(self.sequence), "", encoded))

    def _clear(self, verdict: Verdict) -> None:
        """Takes the keys nobody needs any more out of the store, once there are enough of them."""
        if self._index or verdict.complete:
            for keys in self._written[:-1]:
                self._stale += keys
            del self._written[:-1]
        if len(self._stale) >= _SWEEP:
            while self._stale:
                self.store.delete_key(self._stale.pop())

    def _count_key(self) -> str:
        return f"c/{self.sequence}"

    def _record_key(self, index: int) -> str:
        return f"r/{self.sequence}/{index}" if index else "r/first"


def _verdict_key(sequence: int) -> str:
    return f"v/{sequence}"


FIRST_VERDICT = _verdict_key(1)


def peek(store: dist.Store, key: str) -> bytes | None:
    """The value of a key, or None when it is not there; ``get`` alone would wait for it.

    Not by ``compare_set`` with a value that never is, which answers at once too: on a key that is not there it
    wakes those who wait for the key, who then read an empty value (torch 2.11 and 2.13).
    """
    found = _get(store, [key]) if store.check([key]) else None
    return found[0] if found else None


def _get(store: dist.Store, keys: list[str]) -> list[bytes] | None:
    """The values of keys, or None when they are not all there within the store's own time-out."""
    try:
        return store.multi_get(keys)
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        # A time-out: a DistStoreError, on a FileStore a bare RuntimeError. Of anything else the next request tells.
        return None
