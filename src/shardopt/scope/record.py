"""What one rank says in a vote: a record of a fixed size."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from shardopt.errors import ScopeError

__all__ = [
    "MAX_DIGEST_BYTES",
    "MAX_OPERATION_BYTES",
    "MAX_TEXT_BYTES",
    "RECORD_BYTES",
    "Record",
    "Status",
    "cut",
    "describe",
    "facts_if_well",
]

RECORD_BYTES = 512
MAX_OPERATION_BYTES = 64
MAX_DIGEST_BYTES = 32  # a SHA-256
_HEADER = struct.Struct("<BBBxHxxQ")  # status, three lengths, sequence
_FACTS = struct.Struct(
    "<Q"
)  # at the end: the rest of a record is its word, which is the same on all ranks that are well
_FACTS_AT = RECORD_BYTES - _FACTS.size
MAX_TEXT_BYTES = _FACTS_AT - _HEADER.size - MAX_OPERATION_BYTES - MAX_DIGEST_BYTES
_ELLIPSIS = "…"


class Status(IntEnum):
    """How the rank that wrote a record fares."""

    OK = 0
    FAILED = 1


class Record(NamedTuple):
    """One rank's word in one vote.

    Attributes:
        operation: what the rank is about to do; at most ``MAX_OPERATION_BYTES`` of UTF-8.
        status: whether it can.
        digest: what must be the same on all ranks; at most ``MAX_DIGEST_BYTES``.
        facts: 64 flags that may differ.
        text: what went wrong; cut when it is longer than ``MAX_TEXT_BYTES`` of UTF-8.
        sequence: how many votes the rank has taken part in, this one included.
    """

    operation: str
    status: Status = Status.OK
    digest: bytes = b""
    facts: int = 0
    text: str = ""
    sequence: int = 0

    def encode(self, sequence: int) -> bytes:
        """``RECORD_BYTES`` bytes, with this sequence number.

        Raises:
            ValueError: the operation or the digest is too long, or ``facts`` has more than 64 bits.
        """
        operation = self.operation.encode()
        if len(operation) > MAX_OPERATION_BYTES:
            raise ValueError(f"operation {self.operation!r} is longer than {MAX_OPERATION_BYTES} bytes")
        if len(self.digest) > MAX_DIGEST_BYTES:
            raise ValueError(f"{self.operation}: a digest of {len(self.digest)} bytes, at most {MAX_DIGEST_BYTES}")
        if not 0 <= self.facts < 1 << 64:
            raise ValueError(f"{self.operation}: facts {self.facts} are not 64 unsigned bits")
        text = cut(self.text, MAX_TEXT_BYTES) if self.text else b""
        lengths = (len(operation), len(self.digest), len(text))
        header = _HEADER.pack(self.status, *lengths, sequence)
        return (header + operation + self.digest + text).ljust(_FACTS_AT, b"\0") + _FACTS.pack(self.facts)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The record in ``data``.

        Raises:
            ScopeError: these are not the bytes of a record.
        """
        if len(data) != RECORD_BYTES:
            raise ScopeError(f"a vote found {len(data)} bytes where a record of {RECORD_BYTES} belongs")
        status, num_operation, num_digest, num_text, sequence = _HEADER.unpack_from(data)
        digest_at = _HEADER.size + num_operation
        text_at = digest_at + num_digest
        try:
            return cls(
                operation=data[_HEADER.size : digest_at].decode(),
                status=Status(status),
                digest=data[digest_at:text_at],
                facts=_FACTS.unpack_from(data, _FACTS_AT)[0],
                text=data[text_at : text_at + num_text].decode(),
                sequence=sequence,
            )
        except ValueError as error:
            raise ScopeError("a vote found bytes of something else where a record belongs") from error


def facts_if_well(data: bytes) -> int | None:
    """The facts of an encoded record whose rank is well; None if it is not."""
    if data[0] != Status.OK:
        return None
    facts: int = _FACTS.unpack_from(data, _FACTS_AT)[0]
    return facts


def cut(text: str, limit: int) -> bytes:
    """``text`` as at most ``limit`` bytes of UTF-8, cut between characters and marked when cut.

    Lone surrogates (file names that are not UTF-8) are written as escapes.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data
    mark = _ELLIPSIS.encode()
    return data[: limit - len(mark)].decode("utf-8", "ignore").encode() + mark


def describe(problem: BaseException | str) -> str:
    """A problem as one line: ``ValueError: what it says``. Works for exceptions that cannot be printed."""
    if isinstance(problem, str):
        return " ".join(problem.split())
    name = type(problem).__name__
    try:
        said = " ".join(str(problem).split())
    except Exception as error:
        return f"{name} (its text cannot be made: {type(error).__name__})"
    return f"{name}: {said}" if said else name
