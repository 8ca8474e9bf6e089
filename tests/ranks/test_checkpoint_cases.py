"""``shardopt.save`` and ``shardopt.load`` where ranks, dicts and checkpoints differ."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.ranks.checkpoint_cases import (
    after_a_forward,
    alone,
    beyond,
    bytes_mailed,
    count_scopes,
    die_in_finish,
    differently,
    in_different_orders,
    load_damaged,
    misfits,
    on_topology,
    other_ways,
    plain_only,
    stages,
    two_scopes,
    verdict_of_the_optimizer,
    while_a_rank_sees_another_directory,
)
from tests.ranks.checkpoint_functions import load_all, save_all
from tests.support.models import Topology
from tests.support.ranks import RankPool, Signal

STEPS = (0, 1)

DIFFERENCES = {
    "keys": "key 'more': ranks 0-1 none; rank 2 a value",
    "classes": "key 'extra': ranks 0-1 Extra; rank 2 a value",
    "path": "path: ranks 0-1 ",
    "options": "options: ranks 0-1 (True, [], 'checkpoint', 'same', 'error'); rank 2 (False, ",
    "checkpoint": "the checkpoint, by a digest of its metadata: ranks 0-1 ",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_do_something_else_are_named_with_what_it_is_H16_H23(
    what: str, ranks: RankPool, tmp_path: Path
) -> None:
    for name in ("good", "second"):
        ranks.run(3, save_all, str(tmp_path / name), "shardopt", STEPS, 4.0)
    for found in ranks.run(3, differently, what, str(tmp_path), deadline_s=45.0):
        for operation in {"save", "load"} & found.keys():
            error_type, message, said = found[operation]
            phase = "plan" if what == "checkpoint" else "keys"
            assert error_type == "RankFailureError"
            assert message.startswith(
                f"{operation}: {phase}: ranks were given different things; nothing was changed:\n"
            )
            assert DIFFERENCES[what] in message
            assert (said["failures"], said["missing"]) == ({}, ())
        assert found["changes"] == []
        assert not found["written"]


@pytest.mark.parametrize(
    ("met", "error", "text"),
    [
        (True, "RankFailureError", "save: keys: ranks 1-2 did not arrive"),
        (False, "ScopeError", "ranks 1-2 did not construct it within 2 s"),
    ],
)
def test_a_save_on_one_rank_only_ends_at_its_deadline_E9(
    met: bool, error: str, text: str, ranks: RankPool, tmp_path: Path
) -> None:
    kind, said = ranks.run(3, alone, str(tmp_path), met, deadline_s=25.0)[0]
    assert kind == error
    assert text in said


def test_the_problems_of_a_rank_are_in_its_own_error_and_the_others_name_it_E4(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_all, str(tmp_path / "good"), "shardopt", STEPS, 4.0)
    well, bad = ranks.run(2, misfits, str(tmp_path), 1)
    assert well["error"][0] == "RankFailureError"
    assert well["error"][1].startswith("load: read failed on rank 1: LoadError: ")
    error_type, _, said = bad["error"]
    assert error_type == "LoadError"
    assert [problem.partition(":")[0] for problem in said["problems"]] == ["model.offset", "nested.plain"]
    assert said["cause"].startswith("RankFailureError: load: read failed on rank 1")
    assert well["changes"] == bad["changes"] == []


@pytest.mark.parametrize("damage", ["cut everywhere", "cut for rank 1", "no metadata", "no metadata for rank 1"])
def test_a_damaged_checkpoint_is_refused_on_all_ranks_T3(damage: str, ranks: RankPool, tmp_path: Path) -> None:
    good = tmp_path / "good"
    ranks.run(2, save_all, str(good), "shardopt", STEPS, 4.0)
    for rank in range(2) if damage.endswith("1") else [None]:
        copied = tmp_path / ("bad" if rank is None else f"bad.rank{rank}")
        shutil.copytree(good, copied)
        if rank == 0:
            continue
        if damage.startswith("cut"):
            for file in copied.glob("*.distcp"):
                file.write_bytes(file.read_bytes()[:200])
        else:
            (copied / ".metadata").unlink()
    operation = "read" if damage.startswith("cut") else "plan"
    for rank, found in enumerate(ranks.run(2, load_damaged, str(tmp_path), "bad", deadline_s=45.0)):
        error_type, message, said = found["error"]
        assert found["changes"] == []
        if damage.endswith("1") and rank == 0:
            assert error_type == "RankFailureError"
            assert message.startswith(f"load: {operation} failed on rank 1: LoadError: ")
        else:
            assert error_type == "LoadError"
            assert "cannot be loaded" in message
            # What the error itself has come from says more than the verdict.
            verdict = f"RankFailureError: load: {operation} failed on rank"
            assert said["cause"].startswith("FileNotFoundError: " if damage.startswith("no") else verdict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "point", "there", "number"),
    [
        (1, "other", "the new checkpoint is complete", 5.0),
        (0, "after", "rank 0 publishes the checkpoint, and may have", 5.0),
        (0, "before", "rank 0 publishes the checkpoint, and may have", 4.0),
    ],
)
def test_a_rank_killed_at_the_end_leaves_one_complete_checkpoint(
    bad: int, point: str, there: str, number: float, ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "good")
    old = ranks.run(3, save_all, path, "shardopt", STEPS, 4.0)[0]
    new = ranks.run(3, save_all, str(tmp_path / "new"), "shardopt", (0, 1, 2), 5.0)[0]
    plan = [Signal(rank=bad, signal=signal.SIGKILL, at="ready")]
    outcomes = ranks.outcomes(3, die_in_finish, path, bad, point, signals=plan, fresh=True, deadline_s=25.0)
    for outcome in outcomes:
        if outcome.rank != bad:
            error_type, message, said = outcome.value
            assert error_type == "RankFailureError"
            assert message.startswith(f"save: finish: rank {bad} did not arrive within 2 s")
            assert f"In {path}: {there}" in message
            assert said["missing"] == (bad,)
    for differences, _ in ranks.run(2, load_all, path, "shardopt", new if number == 5.0 else old):
        assert differences == []


@pytest.mark.parametrize("how", ["shardopt", "dcp first"])
@pytest.mark.parametrize("topology", ["fsdp", "hsdp", "fsdp_tp"])
def test_topologies_come_back_bit_for_bit(topology: Topology, how: str, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, on_topology, str(tmp_path), topology, how) == [[]] * 4


@pytest.mark.parametrize("world_size", [1, 3])
def test_without_anything_sharded_all_ranks_take_part(world_size: int, ranks: RankPool, tmp_path: Path) -> None:
    numbers, saved, loaded = zip(*ranks.run(world_size, plain_only, str(tmp_path)), strict=True)
    assert numbers == (3,) * world_size
    # One rank's copy is saved of what should have been equal on all of them.
    assert loaded[0] in saved
    assert all(one == loaded[0] for one in loaded)
    assert len({name.split("_")[2] for name in os.listdir(tmp_path) if name.startswith("__")}) == 1


def test_parts_of_the_ranks_save_on_their_own(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, stages, str(tmp_path)) == [[]] * 4


def test_optimizers_of_different_ranks_are_loaded_together_or_not_at_all(ranks: RankPool, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run(4, two_scopes, str(tmp_path))):
        error_type, message, _ = found["error"]
        assert error_type == ("LoadError" if rank == 3 else "RankFailureError")
        assert "second1: " in message
        assert rank == 3 or message.startswith("load: read failed on rank 3: LoadError")
        assert found["kept"] == found["loaded"] == []


def test_ranks_that_cannot_be_told_from_the_dict_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for rank, text in enumerate(ranks.run(4, beyond, str(tmp_path / "x"))):
        others = "ranks 2-3" if rank < 2 else "ranks 0-1"
        assert f"hidden.tensor: it is on {others} too, which do not take part" in text


def test_the_ranks_meet_once(ranks: RankPool, tmp_path: Path) -> None:
    # And once more in the optimizer's own scope, before they are counted.
    assert ranks.run(2, count_scopes, str(tmp_path)) == [1, 1]


def test_dicts_in_different_orders_are_one(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, in_different_orders, str(tmp_path)) == [[], []]


def test_a_model_that_shows_whole_parameters_after_a_forward_pass_is_saved_by_its_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks.run(4, after_a_forward, str(tmp_path)) == [[]] * 4


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hook", "state_dict failed on rank 1: ArithmeticError: not on this rank"),
        ("values", "state_dict: ranks hold differently what has to be the same on all of them; nothing was saved"),
    ],
)
def test_the_verdict_of_the_optimizers_own_vote_is_what_is_raised(
    what: str, text: str, ranks: RankPool, tmp_path: Path
) -> None:
    for rank, (said, _, files) in enumerate(ranks.run(2, verdict_of_the_optimizer, str(tmp_path / "x"), 1, what)):
        assert said.startswith(text), rank
        assert files == []


@pytest.mark.parametrize("how", ["off", "per rank", "torch"])
def test_optimizers_of_every_kind_come_back(how: str, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, other_ways, str(tmp_path), how) == [[], []]


def test_plans_are_small_E11(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(4, bytes_mailed, str(tmp_path))
    assert set(first) == {"save: plan"}
    assert all(set(other) == {"save: collect", "save: write"} for other in others)
    # An entry has a name of some 30 bytes, a shape and an offset, and torch pickles them with the names of its classes.
    assert max(size for one in (first, *others) for size in one.values()) < 300


def test_a_rank_that_sees_another_directory_does_not_decide_E5(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, while_a_rank_sees_another_directory, str(tmp_path)) == [[], []]
    assert len(os.listdir(tmp_path)) == 3
