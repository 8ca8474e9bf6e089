"""Verdicts: what a set of records comes to, and what the error says of it."""

from __future__ import annotations

import pytest

from shardopt.scope.record import Record, Status
from shardopt.scope.verdict import Verdict, judge, say_ranks

RANKS = (2, 3, 7)


def failed(text: str) -> Record:
    return Record("step", Status.FAILED, text=text)


def test_all_well_gives_the_or_of_the_facts() -> None:
    verdict = judge(RANKS, [Record("step", facts=facts, digest=b"d") for facts in (1, 2, 8)])
    assert verdict.ok
    assert verdict.complete
    assert verdict.facts == 11


def test_one_failure_fails_all_and_is_named() -> None:
    verdict = judge(RANKS, [Record("step"), failed("ValueError: nan"), Record("step")])
    assert not verdict.ok
    error = verdict.error("step")
    assert error.failures == {3: "ValueError: nan"}
    assert str(error) == "step failed on rank 3: ValueError: nan"


def test_several_failures_are_all_named() -> None:
    error = judge(RANKS, [failed("a"), Record("step"), failed("b")]).error("step")
    assert str(error) == "step failed on ranks 2, 7: rank 2: a; rank 7: b"


def test_what_several_ranks_say_alike_is_said_once() -> None:
    error = judge(RANKS, [failed("a"), failed("a"), failed("a")]).error("step")
    assert str(error) == "step failed on ranks 2-3, 7: a"
    assert error.failures == {2: "a", 3: "a", 7: "a"}
    error = judge(RANKS, [failed("a"), failed("b"), failed("a")]).error("step")
    assert str(error) == "step failed on ranks 2-3, 7: ranks 2, 7: a; rank 3: b"


def test_digests_of_well_ranks_must_agree() -> None:
    records = [Record("step", digest=b"\1"), Record("step", digest=b"\2"), Record("step", digest=b"\1")]
    error = judge(RANKS, records).error("step")
    assert error.disagree == {"01": (2, 7), "02": (3,)}
    assert str(error) == "step: ranks disagree, by digest: ranks 2, 7 01, rank 3 02"


def test_the_digest_of_a_failed_rank_counts_for_nothing() -> None:
    verdict = judge(RANKS, [Record("step", digest=b"\1"), failed("x"), Record("step", digest=b"\1")])
    assert verdict.disagree == {}


def test_different_operations_are_named_and_their_digests_not_compared() -> None:
    records = [Record("step", digest=b"\1"), Record("save", digest=b"\2"), Record("step", digest=b"\1")]
    verdict = judge(RANKS, records)
    error = verdict.error("step")
    assert "ranks 2, 7 called 'step', rank 3 called 'save'" in str(error)
    assert error.failures == {2: "called 'step'", 3: "called 'save'", 7: "called 'step'"}
    assert verdict.disagree == {}


def test_a_rank_without_a_record_is_missing_once_the_deadline_has_passed() -> None:
    records = [Record("step"), None, Record("step")]
    error = judge(RANKS, records, waited_s=600.0).error("step")
    assert error.missing == (3,)
    assert "step: rank 3 did not arrive within 600 s" in str(error)
    assert "a rank that has left an operation out stays behind" in str(error)
    early = judge(RANKS, [failed("x"), None, Record("step")])
    assert early.missing == ()
    assert not early.complete


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(complete=True, facts=2**64 - 1),
        Verdict(
            complete=False,
            facts=3,
            failures={1: "naïve 😀"},
            missing=(4, 5),
            waited_s=0.5,
            disagree={"": (1,), "ff": (2, 3)},
            operations={"step": (1,), "save": (2,)},
        ),
    ],
)
def test_decode_gives_what_was_encoded(verdict: Verdict) -> None:
    assert Verdict.decode(verdict.encode().encode()) == verdict


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((1,), "rank 1"), ((10,), "rank 10"), ((3, 1), "ranks 1, 3"), ((0, 1, 2, 3, 7), "ranks 0-3, 7")],
)
def test_ranks_in_a_sentence(ranks: tuple[int, ...], text: str) -> None:
    assert say_ranks(ranks) == text
