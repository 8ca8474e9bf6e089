"""``shardopt.save`` and ``shardopt.load``: the format of dcp, and one rank's failure is every rank's error."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.ranks.checkpoint_functions import (
    KINDS,
    fail_load,
    fail_save,
    killed,
    load_all,
    save_all,
    stopped_and_back,
    stopped_in_commit,
)
from tests.support.ranks import RankPool, Signal

STEPS = (0, 1)


@pytest.mark.parametrize("ranks_loading", [1, 2, 4])
@pytest.mark.parametrize(("saved", "loaded"), [("shardopt", "shardopt"), ("dcp", "shardopt"), ("shardopt", "dcp")])
def test_what_was_saved_on_two_ranks_comes_back_bit_for_bit(
    saved: str, loaded: str, ranks_loading: int, ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(2, save_all, str(tmp_path), saved, STEPS, 4.0)[0]
    for differences, in_place in ranks.run(ranks_loading, load_all, str(tmp_path), loaded, expected):
        assert differences == []
        assert in_place


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("point", "kind", "text", "operation"),
    [
        *[("collect", kind, text, "collect") for kind, (_, text) in KINDS.items()],
        ("local plan", "raises", "ValueError: on purpose", "collect"),
        ("global plan", "unpicklable", "LocalError: one two", "plan"),
        ("write", "raises", "ValueError: on purpose", "write"),
        ("write", "interrupted", "KeyboardInterrupt", "write"),
        ("write", "checkpoint", "CheckpointException", "write"),
        ("full disk", "raises", "OSError: [Errno 27] File too large", "write"),
        ("finish", "raises", "IsADirectoryError: [Errno 21] Is a directory", "finish"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_checkpoint_T2_T4_E6(
    point: str, kind: str, text: str, operation: str, world_size: int, ranks: RankPool, tmp_path: Path
) -> None:
    bad = 0 if point in ("global plan", "finish") else 1
    expected = ranks.run(world_size, save_all, str(tmp_path / "good"), "shardopt", STEPS, 4.0)[0]
    for rank, found in enumerate(
        ranks.run(world_size, fail_save, str(tmp_path), bad, point, kind, expected, deadline_s=45.0)
    ):
        error_type, message, said = found["error"]
        if kind == "interrupted" and rank == bad:
            assert error_type == "KeyboardInterrupt"
        else:
            assert error_type == "RankFailureError"
            assert message.startswith(f"save: {operation} failed on rank {bad}: {text}")
            assert list(said["failures"]) == [bad]
            assert said["cause"].startswith(text) == (rank == bad)
        assert found["changes"] == []
        assert found["new files"] in ([], [".metadata.tmp"] if point == "finish" else [])
        assert found["gone"] == []
        assert found["old"] == []


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("point", "kind", "text", "operation"),
    [
        *[("collect", kind, text, "plan") for kind, (_, text) in KINDS.items()],
        ("open", "raises", "LoadError: ", "plan"),
        ("read", "unpicklable", "LocalError: one two", "read"),
        ("read", "interrupted", "KeyboardInterrupt", "read"),
        ("commit", "raises", "ValueError: on purpose", "commit"),
        ("commit", "interrupted", "KeyboardInterrupt", "commit"),
    ],
)
def test_a_load_that_fails_on_one_rank_fails_on_all_and_changes_nothing(
    point: str, kind: str, text: str, operation: str, world_size: int, ranks: RankPool, tmp_path: Path
) -> None:
    bad = 1
    ranks.run(world_size, save_all, str(tmp_path / "good"), "shardopt", STEPS, 4.0)
    found_on = ranks.run(world_size, fail_load, str(tmp_path / "good"), bad, point, kind, deadline_s=45.0)
    for rank, found in enumerate(found_on):
        error_type, message, said = found["error"]
        if kind == "interrupted" and rank == bad:
            assert error_type == "KeyboardInterrupt"
        elif point == "open" and rank == bad:
            assert error_type == "LoadError"
            assert "on purpose" in message
        else:
            assert error_type == "RankFailureError"
            assert message.startswith(f"load: {operation} failed on rank {bad}: {text}")
            assert list(said["failures"]) == [bad]
            assert said["cause"].startswith(text) == (rank == bad)
        if point != "commit":
            assert found["changes"] == []
        else:
            assert found["step"][0] == found["save"][0] == "RankFailureError"
            assert "an earlier load failed after it had begun to write" in found["step"][1]
            assert "an earlier load failed after it had begun to write" in found["save"][1]


STOPS = [("collect", "state_dict"), ("write", "save: write"), ("read", "load: read")]


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("point", "operation"), STOPS)
def test_a_rank_stopped_past_the_deadline_is_named_and_comes_back(
    point: str, operation: str, bad: int, ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(3, save_all, str(tmp_path / "good"), "shardopt", STEPS, 4.0)
    plan = [
        Signal(rank=bad, signal=signal.SIGSTOP, at="ready"),
        Signal(rank=bad, signal=signal.SIGCONT, at="given up", by=2),
    ]
    # Less than the time-out of the optimizer's own votes.
    found_on = ranks.run(3, stopped_and_back, str(tmp_path), bad, point, signals=plan, fresh=True, deadline_s=25.0)
    for found in found_on:
        error_type, message, said = found["error"]
        assert error_type == "RankFailureError"
        assert message.startswith(f"{operation}: rank {bad} did not arrive within 2 s")
        assert said["missing"] == (bad,)
        assert found["changes"] == []
    # Of the good save at the end: what the late rank had written is gone.
    saves = {name.split("_")[2] for name in os.listdir(tmp_path / "good") if name.startswith("__")}
    assert len(saves) == 1


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("point", "operation"), STOPS)
def test_a_killed_rank_is_named_and_the_old_checkpoint_stays(
    point: str, operation: str, bad: int, ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(3, save_all, str(tmp_path / "good"), "shardopt", STEPS, 4.0)[0]
    files = sorted(os.listdir(tmp_path / "good"))
    plan = [Signal(rank=bad, signal=signal.SIGKILL, at="ready")]
    outcomes = ranks.outcomes(3, killed, str(tmp_path), bad, point, signals=plan, fresh=True, deadline_s=25.0)
    assert outcomes[bad].kind == "died"
    for outcome in outcomes:
        if outcome.rank != bad:
            error_type, message, said = outcome.value["error"]
            assert error_type == "RankFailureError"
            assert message.startswith(f"{operation}: rank {bad} did not arrive within 2 s")
            assert said["missing"] == (bad,)
            assert outcome.value["changes"] == []
    assert sorted(os.listdir(tmp_path / "good")) == files
    for differences, _ in ranks.run(2, load_all, str(tmp_path / "good"), "shardopt", expected):
        assert differences == []


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_stopped_in_the_commit_stops_all_until_a_good_load(bad: int, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, save_all, str(tmp_path / "good"), "shardopt", STEPS, 4.0)
    plan = [
        Signal(rank=bad, signal=signal.SIGSTOP, at="ready"),
        Signal(rank=bad, signal=signal.SIGCONT, at="given up", by=2),
    ]
    path = str(tmp_path / "good")
    for found in ranks.run(3, stopped_in_commit, path, bad, signals=plan, fresh=True, deadline_s=30.0):
        error_type, message, said = found["error"]
        assert error_type == "RankFailureError"
        assert message.startswith(f"load: commit: rank {bad} did not arrive within 2 s")
        assert "What was loaded may be in place in part, on any rank: load a good checkpoint to go on." in message
        assert said["missing"] == (bad,)
        assert found["step"][0] == "RankFailureError"
        assert "an earlier load failed after it had begun to write" in found["step"][1]
