"""The protocol over real stores, its ranks driven one after the other, so that each race has one outcome."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from shardopt.scope.ballot import Ballot, peek
from shardopt.scope.record import Record, Status
from shardopt.scope.verdict import Verdict

RANKS = (4, 5, 6)
TIMEOUT_S = 0.05
STEP = Record("step")


def tcp_store(path: Path) -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def hash_store(path: Path) -> dist.Store:
    return dist.HashStore()


def file_store(path: Path) -> dist.Store:
    return dist.FileStore(str(path / "store"), 1)


@pytest.fixture(params=[tcp_store, hash_store, file_store])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    make: Callable[[Path], dist.Store] = request.param
    return make(tmp_path)


@pytest.fixture
def ballots(store: dist.Store) -> list[Ballot]:
    return [Ballot(dist.PrefixStore("s", store), RANKS, index, timeout_s=TIMEOUT_S) for index in range(3)]


def arrive(ballot: Ballot, record: Record = STEP) -> None:
    """Leaves the rank's record for its next vote, and does not wait."""
    data = record.encode(ballot.sequence + 1)
    ballot.sequence += 1
    ballot._arrive(data)


def vote_with_the_first_rank_last(ballots: list[Ballot]) -> None:
    for ballot in ballots[1:]:
        arrive(ballot)
    assert ballots[0].cast(STEP).complete


def test_the_last_rank_decides_without_waiting(ballots: list[Ballot]) -> None:
    vote_with_the_first_rank_last(ballots)
    assert ballots[0].store.check(["v/1"])
    arrive(ballots[0])
    arrive(ballots[2])
    assert ballots[1].cast(STEP).ok
    assert ballots[0].store.get("v/2") == b"ok 0"


@pytest.mark.parametrize("num_votes", [0, 1])
@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([Record("step", Status.FAILED, text="ill"), STEP], Verdict(complete=True, facts=1, failures={5: "ill"})),
        ([Record("step", digest=b"a"), Record("step", digest=b"b")], None),
        ([Record("save"), STEP], None),
        ([Record("step", facts=2), Record("step", facts=4)], Verdict(complete=True, facts=7)),
    ],
)
def test_the_last_rank_judges_what_the_others_said(
    ballots: list[Ballot], others: list[Record], expected: Verdict | None, num_votes: int
) -> None:
    for _ in range(num_votes):
        vote_with_the_first_rank_last(ballots)
    arrive(ballots[1], others[0])
    arrive(ballots[2], others[1])
    verdict = ballots[0].cast(STEP._replace(facts=1))
    assert verdict == expected if expected else not verdict.ok
    assert ballots[0].store.get(f"v/{num_votes + 1}") == verdict.encode().encode()


def test_equal_failures_do_not_pass_for_agreement(ballots: list[Ballot]) -> None:
    vote_with_the_first_rank_last(ballots)
    ill = Record("step", Status.FAILED, text="ill")
    arrive(ballots[1], ill)
    arrive(ballots[2], ill)
    assert ballots[0].cast(ill).failures == {4: "ill", 5: "ill", 6: "ill"}


@pytest.mark.parametrize("closer", [1, 2])
def test_who_arrives_after_the_vote_was_closed_waits_for_that_verdict(ballots: list[Ballot], closer: int) -> None:
    vote_with_the_first_rank_last(ballots)
    missing = ballots[closer].cast(STEP)
    assert missing.missing == tuple(rank for rank in RANKS if rank != RANKS[closer])
    # All have arrived by then, and all are well: that does not count any more.
    assert [ballots[index].cast(STEP) for index in (0, 3 - closer)] == [missing, missing]


def test_a_closer_between_the_last_rank_and_its_verdict_finds_the_same(ballots: list[Ballot]) -> None:
    vote_with_the_first_rank_last(ballots)
    for index in (0, 1):
        arrive(ballots[index])
    # The last rank stops after it has been counted, before it publishes; another's deadline passes.
    arrive(ballots[2])
    verdict = ballots[1]._close(TIMEOUT_S)
    assert verdict == Verdict(complete=True)
    ballots[2].store.set("v/2", "ok 0")
    assert ballots[0]._close(TIMEOUT_S) == verdict


def test_a_deadline_names_the_missing_and_the_late_rank_reads_the_same(ballots: list[Ballot]) -> None:
    first = ballots[1].cast(Record("step", Status.FAILED, text="ill"))
    assert (first.missing, first.failures) == ((4, 6), {5: "ill"})
    assert ballots[2].cast(Record("step", facts=1)) == first
    # All records are there when the first rank comes, and it would decide otherwise: the verdict that is out stands.
    assert ballots[0].cast(STEP) == first
    vote_with_the_first_rank_last(ballots)


def test_when_all_came_but_the_first_rank_stopped_another_decides(ballots: list[Ballot]) -> None:
    arrive(ballots[0])
    arrive(ballots[2])
    verdict = ballots[1].cast(STEP)
    assert verdict.ok
    assert verdict.complete


def test_the_first_ranks_record_of_another_vote_does_not_count(ballots: list[Ballot]) -> None:
    vote_with_the_first_rank_last(ballots)
    assert ballots[1].cast(STEP).missing == (4, 6)


def test_a_leaving_rank_does_not_wait(ballots: list[Ballot]) -> None:
    gone = ballots[2].cast(Record("step", Status.FAILED, text="KeyboardInterrupt"), leave=True)
    assert (gone.failures, gone.missing, gone.complete) == ({6: "KeyboardInterrupt"}, (), False)
    assert ballots[0].cast(STEP) == gone
    assert ballots[1].cast(STEP) == gone


def test_an_interrupt_is_published(ballots: list[Ballot]) -> None:
    verdict = Verdict(failures={6: "is elsewhere"})
    assert ballots[1].cast(STEP, interrupt=lambda: verdict) == verdict
    assert ballots[0].cast(STEP) == verdict


def sweep_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardopt.scope.ballot._SWEEP", 1)


def test_a_verdict_stays_until_every_rank_has_voted_again(
    ballots: list[Ballot], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_at_once(monkeypatch)
    store = ballots[0].store
    ballots[1].cast(STEP)
    ballots[0].cast(STEP)
    ballots[1].cast(STEP)
    ballots[0].cast(STEP)
    assert store.check(["v/1", "v/2"])
    missed = [ballots[2].cast(STEP) for _ in range(2)]
    assert [verdict.missing for verdict in missed] == [(4, 6), (4, 6)]
    vote_with_the_first_rank_last(ballots)
    assert not store.check(["v/1"])
    assert not store.check(["v/2"])
    assert store.check(["v/3"])


def test_a_rank_deletes_its_record_when_it_votes_again(ballots: list[Ballot], monkeypatch: pytest.MonkeyPatch) -> None:
    sweep_at_once(monkeypatch)
    ballots[1].cast(STEP)
    assert ballots[1].store.check(["r/1/1"])
    ballots[1].cast(STEP)
    assert not ballots[1].store.check(["r/1/1"])


def test_an_interrupted_votes_record_goes_too(ballots: list[Ballot], monkeypatch: pytest.MonkeyPatch) -> None:
    sweep_at_once(monkeypatch)

    def interrupt() -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ballots[1].cast(STEP, interrupt=interrupt)
    assert ballots[1].store.check(["r/1/1"])
    ballots[1].cast(STEP)
    assert not ballots[1].store.check(["r/1/1"])


def test_peeking_wakes_nobody_who_waits_for_the_key(store: dist.Store) -> None:
    waiting = Ballot(dist.PrefixStore("s", store.clone()), RANKS, 1, timeout_s=0.3)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(waiting.read, ["v/1"])
        while not read.done():
            assert peek(dist.PrefixStore("s", store), "v/1") is None
    assert read.result() is None
