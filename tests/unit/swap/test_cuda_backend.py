"""What ``CudaBackend`` asks torch for, with the CUDA parts of torch replaced: no GPU has seen it."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardopt.swap.backend import Backend, CudaBackend, Stream
from shardopt.swap.simulator import SimBackend
from tests.unit.swap.ring_cases import Work

REAL_EMPTY = torch.empty


@dataclass(eq=False)
class FakeStream:
    cuda_stream: int = 0
    waited: list[object] = field(default_factory=list)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@dataclass(eq=False)
class FakeEvent:
    enable_timing: bool
    recorded: list[object] = field(default_factory=list)
    is_done: bool = False

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class FakeCuda:
    """Streams of one device; which one is current, and for which memory was said to be used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = [FakeStream(7)]
        self.current = self.made[0]
        self.used: list[tuple[int, object]] = []
        self.asked: list[dict[str, Any]] = []
        for name, fake in {
            "Stream": self.stream_of,
            "Event": FakeEvent,
            "current_device": lambda: 1,
            "current_stream": self.current_of,
            "stream": self.entered,
            "device": lambda device: contextlib.nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.used.append((len(tensor), stream))
        )

    def stream_of(self, device: torch.device) -> FakeStream:
        assert device == torch.device("cuda", 1)
        self.made.append(FakeStream(len(self.made)))
        return self.made[-1]

    def current_of(self, device: torch.device) -> FakeStream:
        assert device == torch.device("cuda", 1)
        return self.current

    @contextlib.contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty(self, *size: int, **how: Any) -> torch.Tensor:
        self.asked.append(how)
        return REAL_EMPTY(*size, dtype=how["dtype"])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize("backend", [CudaBackend, SimBackend])
def test_a_backend_has_all_that_the_ring_calls(backend: type) -> None:
    wanted = {name: method for name, method in vars(Backend).items() if inspect.isfunction(method) and name[0] != "_"}
    assert len(wanted) == 12
    for name, method in wanted.items():
        assert (
            inspect.signature(getattr(backend, name)).parameters.keys() == inspect.signature(method).parameters.keys()
        )


def test_streams_are_made_once_and_compute_is_the_current_one(cuda: FakeCuda) -> None:
    backend = CudaBackend(torch.device("cuda"))
    event = backend.event()
    assert event.enable_timing is False
    for _ in range(3):
        for stream in Stream:
            backend.record(event, stream)
            backend.wait(stream, event)
    compute, upload, download = cuda.made
    assert event.recorded == [compute, upload, download] * 3
    assert all(stream.waited == [event] * 3 for stream in cuda.made)
    assert backend.compute() == 7
    cuda.current = upload
    assert backend.compute() == upload.cuda_stream != 7


def test_memory_that_other_streams_use_is_told_to_the_allocator(cuda: FakeCuda) -> None:
    backend = CudaBackend(torch.device("cuda", 1))
    assert backend.allocate(12).shape == (12,)
    assert cuda.used == [(12, cuda.made[1]), (12, cuda.made[2])]
    assert backend.allocate_host(5).shape == (5,)
    assert cuda.asked == [
        {"dtype": torch.uint8, "device": torch.device("cuda", 1)},
        {"dtype": torch.uint8, "device": "cpu", "pin_memory": True},
    ]
    backend.allocate(0)
    assert len(cuda.used) == 2


def test_copies_and_launches_run_on_their_stream_and_wait_for_nothing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CudaBackend(torch.device("cuda", 1))
    seen: list[object] = []
    copy = torch.Tensor.copy_

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        seen.append((cuda.current, non_blocking))
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    target = torch.zeros(3)
    for stream in Stream:
        backend.copy(target, torch.ones(3), stream)
        backend.launch(Work("", [], [], lambda: seen.append(cuda.current)), stream)
    assert torch.equal(target, torch.ones(3))
    assert seen == [one for stream in cuda.made for one in ((stream, True), stream)]
    assert cuda.current is cuda.made[0]


def test_the_host_waits_for_an_event_alone(cuda: FakeCuda) -> None:
    backend = CudaBackend(torch.device("cuda", 1))
    event = backend.event()
    assert not backend.query(event)
    backend.synchronize(event)
    assert backend.query(event)
    # Told for the simulator; memory and streams stay as they are.
    backend.host_reads(torch.zeros(1))
    backend.host_writes(torch.zeros(1))
    assert all(not stream.waited for stream in cuda.made)


def test_importing_it_needs_no_gpu_and_no_triton() -> None:
    program = (
        "import sys, torch\n"
        "import shardopt.swap.ring, shardopt.swap.simulator\n"
        "print('triton' in sys.modules, torch.cuda.is_initialized())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]
