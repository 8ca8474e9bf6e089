"""Counting ranks, what they say, and deadlines in one integer of a store, which adds to it in one request."""

from __future__ import annotations

import hashlib

__all__ = ["Tally"]

_BITS = 63  # of a store's counter, which is signed
_MIN_WORD_BITS = 24


class Tally:
    """How ranks add themselves to a vote's counter.

    From the lowest bit: how many have arrived, the sum of a hash of what each said, how many have closed the vote. The
    sums of equal words are equal; those of other words are so by accident only, once in ``2 ** word_bits``.

    Attributes:
        num_ranks: how many have to arrive.
        word_bits: of each hash. Below 24, for more than 8,000 ranks, nobody relies on it.
        closed: what a rank adds that has reached its deadline.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._count_bits = num_ranks.bit_length()
        self.word_bits = _BITS - 3 * self._count_bits
        self.closed = 1 << (_BITS - self._count_bits)

    def share(self, said: bytes) -> int:
        """What a rank adds that has said this."""
        if self.word_bits < _MIN_WORD_BITS:
            return 1
        word = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") >> (64 - self.word_bits)
        return 1 + (word << self._count_bits)

    def is_last(self, count: int) -> bool:
        """Whether a rank is the last to arrive at a vote that nobody has closed, by the count after its own share."""
        return count < self.closed and count % (1 << self._count_bits) == self.num_ranks

    def is_unanimous(self, count: int, share: int) -> bool:
        """Whether all ranks have said what one with this share has, by the count after the last one's."""
        return self.word_bits >= _MIN_WORD_BITS and count == self.num_ranks * share
