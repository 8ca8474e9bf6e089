"""What goes wrong half way through a step on a device, and memory that is used on another stream than its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from shardopt import ShardoptError
from shardopt.swap.backend import CudaBackend, Stream
from shardopt.swap.simulator import SimBackend
from tests.unit.swap.device_cases import give_gradients, on_device, parameters


def stepped(backend: SimBackend, **options: Any) -> tuple[list[Any], Any]:
    params = parameters()
    optimizer = on_device(params, backend, **options)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    return params, optimizer


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_whatever_a_launch_raises_half_way_poisons(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    _, optimizer = stepped(SimBackend())
    kernel, launched = optimizer._engine._kernel, []
    launch = kernel.launch

    def failing(name: str, *args: Any) -> Any:
        launched.append(name)
        if len(launched) == 2:
            raise kind("a pointer cannot be read")
        return launch(name, *args)

    monkeypatch.setattr(kernel, "launch", failing)
    with pytest.raises(ShardoptError, match="half way: a pointer cannot be read") as caught:
        optimizer.step()
    assert type(caught.value.__cause__) is kind
    assert optimizer.has_written
    with pytest.raises(ShardoptError, match="a pointer cannot be read"):
        optimizer.step()


def test_tables_that_are_refused_poison_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = stepped(SimBackend())
    ring = optimizer._engine._ring
    with monkeypatch.context() as patch:
        patch.setattr(ring._tables, "_room", 8)
        with pytest.raises(ValueError, match="make a new ring"):
            optimizer.step()
    assert not optimizer.has_written
    optimizer.step()


@pytest.mark.parametrize("stream", [Stream.UPLOAD, Stream.DOWNLOAD])
def test_a_drain_waits_for_copies_of_a_step_that_was_interrupted(stream: Stream) -> None:
    for seed in range(6):
        backend = SimBackend(seed)
        _, optimizer = stepped(backend)
        optimizer._engine.drain()
        copy, asked = backend.copy, 0

        def interrupted(target: Tensor, source: Tensor, on: Stream) -> None:
            nonlocal asked
            copy(target, source, on)  # noqa: B023
            # The first upload is that of the tables.
            asked += on is stream
            if asked == 2:
                raise KeyboardInterrupt

        backend.copy = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        backend.copy = copy  # type: ignore[method-assign]
        optimizer._engine.drain()
        for chunk in optimizer._engine._state.chunks:
            for entry in chunk.values():
                backend.host_writes(entry)
        assert backend.races == []


@dataclass(eq=False)
class FakeStream:
    cuda_stream: int


@dataclass
class Launch:
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    name: str = "launch"
    runs: list[int] = field(default_factory=list)

    def run(self) -> None:
        self.runs.append(1)


def test_memory_that_is_used_on_another_stream_than_its_own_is_told_to_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [FakeStream(0)]
    streams = iter([FakeStream(1), FakeStream(2)])
    used: list[tuple[int, int]] = []
    empty = torch.empty

    @contextlib.contextmanager
    def nothing(_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch, "empty", lambda nbytes, dtype, device: empty(nbytes, dtype=dtype))
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: used.append((tensor.numel(), stream.cuda_stream))
    )
    backend = CudaBackend(torch.device("cuda", 0))
    memory = backend.allocate(12)
    launch = Launch([memory[:5]], [memory[5:]])
    used.clear()
    backend.launch(launch, Stream.COMPUTE)
    assert used == []
    current[0] = FakeStream(9)
    backend.launch(launch, Stream.COMPUTE)
    assert used == [(5, 9), (7, 9)]
    assert len(launch.runs) == 2
