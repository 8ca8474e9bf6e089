"""Finds accesses to the same bytes that nothing puts in an order. Plain integers; needs no device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

__all__ = ["Access", "Bytes", "Clock", "Race"]

# Of each thread (a stream, or the host), how many of its operations come before.
Clock: TypeAlias = Mapping[str, int]


class Access(NamedTuple):
    """One operation as it touches memory.

    Attributes:
        thread: whose it is.
        tick: which of that thread's operations it is, counted from 1.
        name: of the operation.
        is_write: whether it writes.
    """

    thread: str
    tick: int
    name: str
    is_write: bool

    def __str__(self) -> str:
        return f"{self.name} ({'writes' if self.is_write else 'reads'}, {self.thread} #{self.tick})"


class Race(NamedTuple):
    """Two accesses, at least one of them a write, that may happen in either order or at once.

    Attributes:
        first: the one that was asked for first.
        second: the other.
    """

    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{self.first} and {self.second} touch the same bytes, and neither comes after the other"


@dataclass(slots=True)
class _Segment:
    """Neighbouring bytes that have been touched alike: by whom last."""

    end: int
    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


class Bytes:
    """Who has touched which bytes last. Accesses come in the order in which they are asked for."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: dict[int, _Segment] = {}

    def touch(self, start: int, end: int, access: Access, clock: Clock) -> list[Race]:
        """Notes an access.

        Args:
            start: of the bytes.
            end: behind their last one.
            access: who touches them.
            clock: what comes before it.

        Returns:
            Its races with earlier ones; of one thread's reads of some bytes only the last one is known.
        """
        if start >= end:
            return []
        found: dict[Access, None] = {}
        for segment in self._cover(start, end):
            before = list(segment.reads.values()) if access.is_write else []
            if segment.write is not None:
                before.append(segment.write)
            found.update((other, None) for other in before if clock.get(other.thread, 0) < other.tick)
            if access.is_write:
                segment.write = access
                segment.reads.clear()
            else:
                segment.reads[access.thread] = access
        return [Race(other, access) for other in found]

    def _cover(self, start: int, end: int) -> list[_Segment]:
        """Segments that are just the given bytes together; made where there are none."""
        known = self._segments.get(start)
        if known is not None and known.end == end:
            return [known]
        self._cut(start)
        self._cut(end)
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        starts: list[int] = []
        at = start
        for begin in [*self._starts[first:last], end]:
            if at < begin:
                self._segments[at] = _Segment(begin)
                starts.append(at)
            if begin < end:
                starts.append(begin)
                at = self._segments[begin].end
        self._starts[first:last] = starts
        return [self._segments[one] for one in starts]

    def _cut(self, place: int) -> None:
        """Makes a segment end where another access begins or ends."""
        index = bisect_right(self._starts, place) - 1
        if index < 0:
            return
        segment = self._segments[self._starts[index]]
        if self._starts[index] < place < segment.end:
            self._segments[place] = _Segment(segment.end, segment.write, dict(segment.reads))
            self._starts.insert(index + 1, place)
            segment.end = place
