"""The rank pool itself: what it returns, what it says of failures, and that it goes on afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from tests.support.ranks import Outcome, RankError, RankPool, Signal, reached, wait_until_reached

FOREVER_S = 3600.0


def sum_of_ranks(offset: int) -> tuple[int, int, float, int]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item(), os.getpid()


def store_port() -> int:
    return int(os.environ["MASTER_PORT"])


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    return "fine"


def raise_by_rank() -> None:
    kinds = [
        KeyboardInterrupt("stop"),
        SystemExit(3),
        dcp.CheckpointException("bad", {1: (OSError("disk full"), None)}),
    ]
    raise kinds[dist.get_rank()]


def fail_with_attributes() -> None:
    error = RuntimeError("many")
    error.failures = {1: OSError("disk full"), 2: torch.Size([3])}
    error.missing = (3,)
    error.problems = ["a", "b"]
    error.operation = "step"
    raise error from KeyError("why")


def hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        time.sleep(FOREVER_S)
    return "fine"


def fail_or_wait_in_collective() -> None:
    """Rank 0 raises where rank 1 waits for it."""
    if dist.get_rank() == 0:
        raise ValueError("left alone")
    dist.barrier()


def kill_self_on(rank: int) -> str:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        # A rank that is still setting up its group would see a closed connection.
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def exit_at_once() -> None:
    os._exit(7)


def kill_self_later() -> str:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return "fine"


def report_points() -> str:
    reached("a")
    reached("b")
    return "survived"


def report_in_turn() -> str:
    """Rank 1 is at its second point after rank 0 has been there."""
    reached("a")
    if dist.get_rank() == 1:
        wait_until_reached("b")
    reached("b")
    return "survived"


def report_points_or_fail() -> str:
    """Rank 1 fails once rank 0 is at its first point, so that the grace of rank 0 begins there."""
    if dist.get_rank() == 0:
        return report_points()
    wait_until_reached("a")
    raise ValueError("rank 0 is stopped")


def meet_in_turn() -> list[str]:
    rank = dist.get_rank()
    seen = [] if rank else ["first"]
    if rank == 0:
        reached("zero is here")
    else:
        wait_until_reached("zero is here")
        seen.append("after zero")
    reached("all")
    wait_until_reached("all", count=dist.get_world_size())
    return seen


def send_back(value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"same": value, "nan payload": torch.tensor([0x7FC0_1234], dtype=torch.int32).view(torch.float32)}


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())


def warn_twice() -> None:
    warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    warnings.warn("odd thing", UserWarning, stacklevel=1)


def return_a_group() -> dist.ProcessGroup:
    return dist.group.WORLD


def return_a_dtensor() -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(2), mesh, [Replicate()])


def change_the_process() -> None:
    os.environ["RANK_POOL_LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)


def look_at_the_process() -> tuple[str | None, str, torch.dtype, int, str]:
    left = os.environ.get("RANK_POOL_LEFT_BEHIND")
    return left, os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def start_a_child() -> int:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    return child.pid


def without_a_group() -> tuple[bool, str | None]:
    return dist.is_initialized(), os.environ.get("RANK")


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [outcome.kind for outcome in outcomes]


def exists(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_usable(pool: RankPool) -> None:
    values = pool.run(4, sum_of_ranks, 0)
    assert [value[:3] for value in values] == [(rank, 4, 6.0) for rank in range(4)]


def test_one_pool_serves_every_world_size(ranks: RankPool) -> None:
    for world_size in (2, 4, 1, 3, 4, 2):
        values = ranks.run(world_size, sum_of_ranks, 10)
        expected = float(sum(range(world_size)) + 10 * world_size)
        assert [value[:3] for value in values] == [(rank, world_size, expected) for rank in range(world_size)]


def test_twenty_jobs_run_in_the_same_processes(ranks: RankPool) -> None:
    first = ranks.run(4, sum_of_ranks, 0)
    for _ in range(20):
        assert ranks.run(4, sum_of_ranks, 0) == first
    assert tuple(value[3] for value in first) == ranks.pids


def test_no_port_is_fixed(ranks: RankPool) -> None:
    ports = [ranks.run(2, store_port) for _ in range(4)]
    assert all(of_rank_0 == of_rank_1 for of_rank_0, of_rank_1 in ports)
    assert len({port for port, _ in ports}) > 1


def test_rank_0_can_host_the_store(ranks: RankPool) -> None:
    values = ranks.run(3, sum_of_ranks, 0, store_host="rank 0")
    assert [value[:3] for value in values] == [(rank, 3, 3.0) for rank in range(3)]


def test_a_job_can_do_without_a_process_group(ranks: RankPool) -> None:
    assert ranks.run(1, without_a_group, process_group=False) == [(False, None)]
    with pytest.raises(ValueError, match="needs a process group"):
        ranks.run(2, without_a_group, process_group=False)


def test_tensors_travel_by_value(ranks: RankPool) -> None:
    sent = torch.tensor([[0.0, -0.0], [float("inf"), 1e-45]])
    for received in ranks.run(2, send_back, sent):
        assert received["same"].numpy().tobytes() == sent.numpy().tobytes()
        assert received["nan payload"].view(torch.int32).item() == 0x7FC0_1234
        assert not received["same"].is_shared()


def test_every_job_starts_with_the_same_seeds(ranks: RankPool) -> None:
    assert ranks.run(2, draw) == ranks.run(2, draw)
    assert len(set(ranks.run(2, draw))) == 1


def test_an_error_carries_type_message_and_traceback_of_each_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="ValueError: rank 1 says no") as caught:
        ranks.run(3, fail_on, 1)
    outcomes = list(caught.value.outcomes)
    assert kinds(outcomes) == ["ok", "error", "ok"]
    assert (outcomes[1].error_type, outcomes[1].error) == ("ValueError", "rank 1 says no")
    assert "in fail_on" in outcomes[1].traceback
    assert "in fail_on" in str(caught.value)
    assert outcomes[0].value == "fine"


def test_base_exceptions_are_errors_like_others(ranks: RankPool) -> None:
    before = ranks.run(3, sum_of_ranks, 0)
    outcomes = ranks.outcomes(3, raise_by_rank)
    assert kinds(outcomes) == ["error"] * 3
    assert [outcome.error_type for outcome in outcomes] == ["KeyboardInterrupt", "SystemExit", "CheckpointException"]
    assert [outcome.error for outcome in outcomes[:2]] == ["stop", "3"]
    assert "disk full" in outcomes[2].error
    assert "OSError" in outcomes[2].error_attributes["failures"][1][0]
    assert ranks.run(3, sum_of_ranks, 0) == before, "errors must not cost the pool its workers"


def test_an_error_keeps_its_attributes_and_cause(ranks: RankPool) -> None:
    (outcome,) = ranks.outcomes(1, fail_with_attributes)
    assert outcome.error_attributes == {
        "failures": {1: "OSError: disk full", 2: "torch.Size([3])"},
        "missing": (3,),
        "problems": ["a", "b"],
        "operation": "step",
    }
    assert outcome.cause == "KeyError: 'why'"


def test_warnings_are_captured_each_time(ranks: RankPool) -> None:
    for _ in range(2):
        (outcome,) = ranks.outcomes(1, warn_twice)
        assert outcome.kind == "ok"
        assert [text.partition(" (")[0] for text in outcome.warnings] == [
            "DeprecationWarning: old thing",
            "UserWarning: odd thing",
        ]


def test_a_hang_is_named_with_its_stacks_and_the_next_job_works(ranks: RankPool) -> None:
    before = ranks.run(4, sum_of_ranks, 0)
    # Long enough for the other ranks to finish on a busy machine.
    outcomes = ranks.outcomes(4, hang_on, 2, deadline_s=3.0)
    assert kinds(outcomes) == ["ok", "ok", "hang", "ok"]
    assert "3 s (deadline)" in outcomes[2].error
    assert "in hang_on" in outcomes[2].stacks
    assert_usable(ranks)
    assert not {value[3] for value in before} & set(ranks.pids)


def test_a_rank_blocked_in_a_collective_is_a_hang_once_the_grace_is_over(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(2, fail_or_wait_in_collective, grace_s=1.0, deadline_s=FOREVER_S)
    assert kinds(outcomes) == ["error", "hang"], "a peer that only raised must not look like a closed connection"
    assert "(grace)" in outcomes[1].error
    assert "barrier" in outcomes[1].stacks
    assert_usable(ranks)


def test_a_killed_rank_died_and_the_next_job_works(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(3, kill_self_on, 1, grace_s=5.0)
    assert kinds(outcomes) == ["ok", "died", "ok"]
    assert "SIGKILL" in outcomes[1].error
    assert outcomes[1].output == "last words\n"
    assert_usable(ranks)


def test_an_exit_is_a_death_with_its_code(ranks: RankPool) -> None:
    (outcome,) = ranks.outcomes(1, exit_at_once)
    assert (outcome.kind, outcome.error) == ("died", "ended with exit code 7")


def test_a_death_between_jobs_is_not_hidden() -> None:
    with RankPool(1) as pool:
        pool.run(1, kill_self_later)
        while pool.pids:
            time.sleep(0.05)
        with pytest.warns(UserWarning, match=r"died after .*kill_self_later: killed by SIGKILL"):
            pool.run(1, sum_of_ranks, 0)


def test_a_planned_signal_comes_before_its_point_returns(ranks: RankPool) -> None:
    before = ranks.run(4, sum_of_ranks, 0)
    plan = [Signal(rank=1, signal=signal.SIGKILL, at="b")]
    outcomes = ranks.outcomes(2, report_in_turn, fresh=True, signals=plan)
    assert kinds(outcomes) == ["ok", "died"]
    assert [outcome.points for outcome in outcomes] == [("a", "b"), ("a", "b")]
    assert not {outcome.pid for outcome in outcomes} & set(ranks.pids), "fresh must not use the pool's workers"
    assert not any(exists(outcome.pid) for outcome in outcomes)
    assert ranks.run(4, sum_of_ranks, 0) == before


def test_a_stopped_rank_hangs_and_a_continued_one_does_not(ranks: RankPool) -> None:
    stop = Signal(rank=0, signal=signal.SIGSTOP, at="a")
    go_on = Signal(rank=0, signal=signal.SIGCONT, at="a", after_s=0.3)
    outcomes = ranks.outcomes(2, report_points_or_fail, fresh=True, signals=[stop], grace_s=0.5)
    assert kinds(outcomes) == ["hang", "error"]
    assert outcomes[0].points == ("a",)
    assert "stopped by a signal" in outcomes[0].stacks
    assert ranks.run(1, report_points, fresh=True, signals=[stop, go_on]) == ["survived"]


def test_another_rank_can_trigger_a_signal(ranks: RankPool) -> None:
    plan = [Signal(rank=1, signal=signal.SIGKILL, at="zero is here", by=0)]
    outcomes = ranks.outcomes(2, meet_in_turn, fresh=True, signals=plan, grace_s=1.0)
    assert kinds(outcomes) == ["hang", "died"]
    assert outcomes[0].points == ("zero is here", "all")


def test_a_signal_that_was_never_sent_is_an_error(ranks: RankPool) -> None:
    plan = [Signal(rank=0, signal=signal.SIGKILL, at="no such point")]
    with pytest.raises(RankError, match=r"never sent.*no such point"):
        ranks.outcomes(1, report_points, fresh=True, signals=plan)


def test_ranks_can_meet_without_torch(ranks: RankPool) -> None:
    assert ranks.run(3, meet_in_turn) == [["first"], ["after zero"], ["after zero"]]


def test_a_job_leaves_nothing_behind_in_the_process(ranks: RankPool) -> None:
    before = ranks.run(1, look_at_the_process)
    ranks.run(1, change_the_process)
    assert ranks.run(1, look_at_the_process) == before
    assert before[0][2:] == (torch.float32, 1, "1")


def test_a_killed_worker_takes_its_children_along(ranks: RankPool) -> None:
    (child,) = ranks.run(1, start_a_child, fresh=True)
    assert not exists(child)


def test_what_cannot_be_sent_is_said(ranks: RankPool) -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match="cannot be found by name"):
        ranks.run(1, local)
    with pytest.raises(RankError, match=r"ProcessGroup.* cannot leave its rank"):
        ranks.run(1, return_a_group)
    with pytest.raises(RankError, match="a DTensor cannot leave its rank"):
        ranks.run(1, return_a_dtensor)
    with pytest.raises(ValueError, match="world size 5"):
        ranks.run(5, store_port)
