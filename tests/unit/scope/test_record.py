"""Records: what goes in comes out, in 512 bytes, whatever the text is."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardopt.errors import ScopeError
from shardopt.scope.record import (
    MAX_DIGEST_BYTES,
    MAX_OPERATION_BYTES,
    MAX_TEXT_BYTES,
    RECORD_BYTES,
    Record,
    Status,
    cut,
    describe,
    facts_if_well,
)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@given(
    operation=st.text(max_size=MAX_OPERATION_BYTES // 4),
    sequence=st.integers(0, 2**64 - 1),
    status=st.sampled_from(Status),
    digest=st.binary(max_size=MAX_DIGEST_BYTES),
    facts=st.integers(0, 2**64 - 1),
    text=st.text(max_size=MAX_TEXT_BYTES // 4),
)
def test_decode_gives_what_was_encoded(
    operation: str, sequence: int, status: Status, digest: bytes, facts: int, text: str
) -> None:
    data = Record(operation, status, digest, facts, text).encode(sequence)
    assert len(data) == RECORD_BYTES
    assert Record.decode(data) == Record(operation, status, digest, facts, text, sequence)


def test_every_field_at_its_longest_fits() -> None:
    record = Record("ä" * 32, Status.FAILED, b"\xff" * 32, 2**64 - 1, "x" * MAX_TEXT_BYTES)
    data = record.encode(2**64 - 1)
    assert len(data) == RECORD_BYTES
    assert Record.decode(data).text == record.text


@given(text=st.text(), limit=st.integers(3, 64))
@example(text="a\udc80b", limit=64)  # a lone surrogate, as in the name of a file that is not UTF-8
@example(text="a\udc80b", limit=5)
def test_text_is_cut_between_characters(text: str, limit: int) -> None:
    data = cut(text, limit)
    assert len(data) <= limit
    whole = text.encode("utf-8", "backslashreplace").decode()
    shown = data.decode()
    assert shown == whole or (shown.endswith("…") and whole.startswith(shown[:-1]))


@pytest.mark.parametrize("width", [1, 2, 3, 4])  # bytes of a character, so that every remainder at the cut occurs
def test_a_cut_text_uses_the_room_there_is(width: int) -> None:
    data = cut("aäあ😀"[width - 1] * 100, 50)
    assert 50 - width < len(data) <= 50


def test_a_long_text_survives_a_record() -> None:
    record = Record.decode(Record("step", Status.FAILED, text="é" * 1000).encode(1))
    assert record.text.startswith("éé")
    assert record.text.endswith("…")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (Record("x" * 65), "longer than 64 bytes"),
        (Record("step", digest=b"x" * 33), "digest of 33 bytes"),
        (Record("step", facts=1 << 64), "64 unsigned bits"),
        (Record("step", facts=-1), "64 unsigned bits"),
    ],
)
def test_what_does_not_fit_is_refused(record: Record, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        record.encode(1)


@pytest.mark.parametrize("data", [b"", b"x" * 511, b"\x07" + b"\0" * 511, b"\0\x02" + b"\0" * 14 + b"\xff" * 496])
def test_other_bytes_are_not_a_record(data: bytes) -> None:
    with pytest.raises(ScopeError, match="where a record"):
        Record.decode(data)


def test_a_problem_is_one_line_with_its_type() -> None:
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(KeyError()) == "KeyError"
    assert describe("no\nmemory") == "no memory"
    assert describe(Unprintable()) == "Unprintable (its text cannot be made: RuntimeError)"


def test_facts_are_those_of_a_rank_that_is_well() -> None:
    assert facts_if_well(Record("step", digest=b"d", facts=1 << 63).encode(3)) == 1 << 63
    assert facts_if_well(Record("step", Status.FAILED, facts=1).encode(3)) is None
