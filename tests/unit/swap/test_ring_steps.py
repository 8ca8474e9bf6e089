"""What a step of the ring asks the device for, how much memory there is, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from shardopt.errors import ShardoptError
from shardopt.swap.backend import Launch, Stream
from shardopt.swap.chunks import Part, cut_chunks, plan_layout
from shardopt.swap.ring import Ring
from shardopt.swap.simulator import SimBackend
from shardopt.swap.spans import spans_of
from shardopt.swap.step_tables import table_room
from tests.unit.swap.ring_cases import FIRST, Scenario, Streamed, Work, plain_steps, serial


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
def test_a_step_allocates_nothing_and_the_host_waits_for_nothing(budget_bytes: int) -> None:
    # A device that keeps up.
    backend = SimBackend(eagerness=1.0)
    run = Streamed(Scenario(1, 3, budget_bytes, plain_steps(20)), backend)
    made = replace(backend.counts)
    for number, step in enumerate(run.scenario.steps):
        run.step(number, step)
    assert backend.counts.launches > 40
    assert backend.counts.allocations == made.allocations
    assert backend.counts.host_allocations == made.host_allocations == 1
    assert backend.counts.synchronizations == 0


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
def test_the_host_is_at_most_four_steps_ahead(budget_bytes: int) -> None:
    backend = SimBackend(eagerness=0.0)
    run = Streamed(Scenario(1, 3, budget_bytes, plain_steps(12)), backend)
    behind = []
    for number, step in enumerate(run.scenario.steps):
        run.step(number, step)
        behind.append(sum(1 for launches in run.unfinished if launches))
    assert behind[:4] == [1, 2, 3, 4]
    assert max(behind) == 4
    # One for each step that finds its buffers in use.
    assert backend.counts.synchronizations == 12 - 4


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_uploads_are_ahead_by_as_many_chunks_as_there_are_slots(depth: int) -> None:
    backend = SimBackend()
    run = Streamed(Scenario(1, depth, 0, plain_steps(1)), backend)
    run.step(0, run.scenario.steps[0])
    # The first chunks find their slots free, and each of the others waits for one.
    waits = [text for text in backend.log if text.startswith("upload for download")]
    assert len(waits) == len(run.model.chunks) - depth > 0


def test_chunks_without_a_gradient_are_left_out() -> None:
    backend = SimBackend(eagerness=1.0)
    run = Streamed(Scenario(1, 3, 0, plain_steps(2, FIRST)), backend)
    first = [number for number, (chunk, _) in enumerate(run.model.chunks) if (chunk.rows["param"] < 2).any()]
    run.step(0, run.scenario.steps[0])
    # Tables; and each entry of the chunks, there and back.
    assert backend.counts.copies == 1 + 2 * sum(len(run.model.entries[number]) for number in first)
    # Nothing to do, not even tables.
    before = replace(backend.counts)
    run.ring.step([], [], pytest.fail)
    assert backend.counts == before


def test_chunks_that_stay_are_copied_once_and_back_when_asked_for() -> None:
    backend = SimBackend(eagerness=1.0)
    run = Streamed(Scenario(1, 3, 1 << 20, plain_steps(4)), backend)
    assert (run.ring.num_resident, run.ring.num_slots) == (len(run.model.chunks), 0)
    entries = sum(map(len, run.model.entries))
    for copies in (1 + entries, 1, 1):
        before = backend.counts.copies
        run.step(0, run.scenario.steps[0])
        assert backend.counts.copies - before == copies
    for copies in (entries, 0):
        before = backend.counts.copies
        run.ring.drain()
        assert backend.counts.copies - before == copies
    run.ring.host_changed()
    before = backend.counts.copies
    run.step(0, run.scenario.steps[0])
    assert backend.counts.copies - before == 1 + entries


def test_values_of_the_host_that_would_be_lost_are_refused() -> None:
    run = Streamed(Scenario(1, 3, 1024, plain_steps(1)), SimBackend())
    run.ring.host_changed()
    run.step(0, run.scenario.steps[0])
    with pytest.raises(ShardoptError, match=r"chunks \[0\] were stepped on the device.*call drain\(\) before"):
        run.ring.host_changed()
    run.ring.drain()
    run.ring.host_changed()


class Breaks(SimBackend):
    """Refuses one launch when it is asked for it, as a kernel that does not compile."""

    fails = ""

    def launch(self, launch: Launch, stream: Stream) -> None:
        if launch.name == self.fails:
            raise ShardoptError("no such kernel")
        super().launch(launch, stream)


def refuse(*given: object) -> Work:
    """Fails before the chunk's launch is made, and before anything has waited for its tables."""
    raise ShardoptError("no such kernel")


@pytest.mark.parametrize("budget_bytes", [0, 2048, 1 << 20])
@pytest.mark.parametrize("chunk", [0, 3])
def test_a_launch_that_fails_leaves_the_ring_as_it_was(budget_bytes: int, chunk: int) -> None:
    # The step that fails is one of no gradient, but for the chunk; so all that comes after is as if it had not been.
    scenario = Scenario(1, 2, budget_bytes, plain_steps(8))
    expected = serial(scenario)
    for seed in range(8):
        backend = Breaks(seed)
        run = Streamed(scenario, backend)
        backend.fails = f"nothing of chunk {chunk}"
        broken = Work(backend.fails, [], [], pytest.fail)
        for number, step in enumerate(scenario.steps):
            if number == 2:
                # Its tables, and what it has uploaded, are nobody's.
                tables = [np.full(64, number, np.uint8)]
                with pytest.raises(ShardoptError, match="no such kernel"):
                    run.ring.step([chunk], tables, refuse)
            run.step(number, step)
            # By now another step has had the buffers of the one that failed.
            if number == 6:
                with pytest.raises(ShardoptError, match="no such kernel"):
                    run.ring.step([chunk], tables, lambda *_, broken=broken: broken)
                # The host may write at once.
                for slab, value in zip(run.model.slabs, run.save(), strict=True):
                    backend.host_writes(slab)
                    slab.copy_(value)
                run.ring.host_changed()
        state = run.save()
        backend.finish()
        run.result.state = [*state, *run.model.params]
        assert not run.result.differs(expected)
        assert backend.races == []


def test_a_drain_waits_for_the_tables_of_a_step_that_failed() -> None:
    # All chunks are on the device, so that nothing but the tables is copied.
    backend = Breaks(eagerness=0.0)
    run = Streamed(Scenario(1, 2, 1 << 20, plain_steps(1)), backend)
    run.step(0, run.scenario.steps[0])
    run.ring.drain()
    backend.fails = "nothing"
    with pytest.raises(ShardoptError, match="no such kernel"):
        run.ring.step([0], [np.zeros(64, np.uint8)], lambda *_: Work("nothing", [], [], pytest.fail))
    before = backend.counts.synchronizations
    run.ring.drain()
    # Not for the tables alone: for all that the ring knows, copies and a part of the launch were asked for too.
    assert backend.counts.synchronizations == before + 3


def test_tables_that_do_not_fit_are_refused_before_anything_is_done() -> None:
    backend = SimBackend()
    run = Streamed(Scenario(1, 3, 0, plain_steps(1)), backend)
    before = replace(backend.counts)
    with pytest.raises(ValueError, match=r"take \[10000000, 8\] bytes, and there is room for \d+; .*make a new ring"):
        run.ring.step([0], [np.zeros(10_000_000, np.uint8), np.zeros(2, np.float32)], pytest.fail)
    assert backend.counts == before


def test_host_memory_is_not_let_go_while_copies_are_in_flight() -> None:
    backend = SimBackend(eagerness=0.0)
    run = Streamed(Scenario(1, 3, 2048, plain_steps(1)), backend)
    run.step(0, run.scenario.steps[0])
    assert backend.counts.synchronizations == 0
    del run.ring
    assert backend.counts.synchronizations == 1
    for slab in run.model.slabs:
        backend.host_writes(slab)
    assert backend.races == []


def test_a_ring_that_cannot_be_is_refused() -> None:
    good = {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)}
    bad = [good, {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(4)}, {"exp_avg": torch.zeros(16)[::2]}]
    with pytest.raises(ValueError, match="table_bytes is -1") as refused:
        Ring(SimBackend(), bad, table_bytes=-1, depth=0, budget_bytes=-5)
    lines = str(refused.value).split("\n")
    assert [line.split(";")[0] for line in lines] == [
        "table_bytes is -1",
        "depth is 0",
        "budget_bytes is -5",
        "chunk 1: its entries have shapes {'exp_avg': (8,), 'exp_avg_sq': (4,)}",
        "chunk 2: exp_avg has stride (2,)",
    ]


def sizes(numels: Sequence[int], *, budget_bytes: int = 0) -> tuple[int, int, int]:
    """Of a ring for fp32 parameters of these sizes: device bytes, those of slots, and bytes of the tables of a step."""
    parts = [Part("fp32", spans_of((numel,), (1,), (0,), (numel,), indexed=False)) for numel in numels]
    layout = plan_layout([part.kind for part in parts], numels)
    chunks = cut_chunks(parts, layout, element_bytes={"fp32": 8}, chunk_bytes=16 << 20, block=1024)
    # Nobody has that much memory here; sizes are all that the ring looks at.
    entries = [
        {name: torch.empty(chunk.end - chunk.start, device="meta") for name in ("exp_avg", "exp_avg_sq")}
        for chunk in chunks
    ]
    num_rows = sum(len(chunk.rows) for chunk in chunks)
    num_blocks = sum(int((-(-chunk.rows["numel"] // 1024)).sum()) for chunk in chunks)
    room = table_room([num_rows * 88, num_blocks * 8, 32, 8])
    backend = SimBackend(eagerness=0.0)
    ring = Ring(backend, entries, table_bytes=room, budget_bytes=budget_bytes)
    assert backend.counts.allocated_bytes == ring.device_bytes
    return ring.device_bytes, ring.num_slots * ring.slot_bytes, room


def test_device_memory_does_not_depend_on_the_largest_parameter() -> None:
    many, one = sizes([1 << 20] * 1024), sizes([1 << 30])
    print(f"1024 parameters of 1 Mi: {many[0]} bytes; one of 1 Gi: {one[0]}")
    assert many[1] == one[1] == 3 * (16 << 20)
    # Each parameter has a row.
    assert one[0] < many[0] < one[0] * 1.01
    # Besides the slots there is nothing but four times the tables, which are small beside the state.
    assert one[0] - one[1] == 4 * one[2] < 0.005 * (8 << 30)


def test_the_budget_is_used_and_kept() -> None:
    # 64 chunks of 16 MiB.
    for budget_bytes, resident in ((0, 0), ((16 << 20) - 1, 0), (16 << 20, 1), (100 << 20, 6), (2 << 30, 64)):
        nbytes, slots, room = sizes([128 << 20], budget_bytes=budget_bytes)
        assert nbytes == slots + 4 * room + resident * (16 << 20)
        assert slots == min(3, 64 - resident) * (16 << 20)
