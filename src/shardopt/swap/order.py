"""What is known to come after what: on three streams and the host. It leaves out waits that others imply."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardopt.swap.backend import Backend, Stream

__all__ = ["Mark", "Order", "Point"]

_HOST = len(Stream)


class Mark:
    """An event, and what it stands for since it was last recorded.

    Attributes:
        event: of the backend.
        stream: that it was recorded on.
        tick: how many marks had been made on that stream by then, itself among them.
        seen: the latest tick of each stream that everything before the mark came after.
    """

    __slots__ = ("event", "seen", "stream", "tick")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.stream = Stream.COMPUTE
        self.tick = 0
        self.seen = [0] * len(Stream)


class Point(NamedTuple):
    """The moment when a mark was made. The mark may have been made again later on its stream: who waits for that has
    waited for this."""

    mark: Mark
    tick: int


class Order:
    """Issues waits, and only those that the earlier ones do not imply.

    Each stream and the host know, of each stream, the latest tick that all they do next comes after. A wait adds what
    was known where the mark was made. A stream knows what the host knows, since it is the host that gives it work.

    Args:
        backend: whose streams they are.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ticks = [0] * len(Stream)
        self._known = [[0] * len(Stream) for _ in range(_HOST + 1)]
        self._compute = backend.compute()
        self._last = Point(Mark(None), 0)

    def new_mark(self) -> Mark:
        """A mark that was not made yet; waiting for it is waiting for nothing."""
        return Mark(self._backend.event())

    def enter(self) -> None:
        """Takes notice that another stream is the current one: it knows nothing, and must come after the one before."""
        compute = self._backend.compute()
        if compute == self._compute:
            return
        self._compute = compute
        # Not even of the stream that bore its name.
        self._known[Stream.COMPUTE] = [0] * len(Stream)
        self._require(Stream.COMPUTE, self._last)

    def mark(self, mark: Mark, stream: Stream) -> Point:
        """Makes a mark after all that the stream was given so far."""
        self._backend.record(mark.event, stream)
        self._ticks[stream] += 1
        mark.stream, mark.tick = stream, self._ticks[stream]
        mark.seen = _later(self._known[stream], self._known[_HOST])
        mark.seen[stream] = mark.tick
        # A stream comes after itself.
        self._known[stream][stream] = mark.tick
        point = Point(mark, mark.tick)
        if stream is Stream.COMPUTE:
            self._last = point
        return point

    def wait(self, stream: Stream, *points: Point) -> None:
        """Makes the stream wait for all points, with as few waits as that takes."""
        needed = [point for point in points if not self._knows(stream, point)]
        # The latest first: of marks on one stream it implies the others.
        for point in sorted(needed, key=lambda point: -point.mark.tick):
            self._require(stream, point)

    def host(self, point: Point) -> None:
        """Lets the host go on once the point is passed; it stops only if it is not."""
        if self._knows(_HOST, point):
            return
        if not self._backend.query(point.mark.event):
            self._backend.synchronize(point.mark.event)
        self._known[_HOST] = _later(self._known[_HOST], point.mark.seen)

    def _require(self, stream: Stream, point: Point) -> None:
        if not self._knows(stream, point):
            self._backend.wait(stream, point.mark.event)
            self._known[stream] = _later(self._known[stream], point.mark.seen)

    def _knows(self, who: int, point: Point) -> bool:
        known = max(self._known[who][point.mark.stream], self._known[_HOST][point.mark.stream])
        return known >= point.tick


def _later(left: list[int], right: list[int]) -> list[int]:
    return [max(pair) for pair in zip(left, right, strict=True)]
