"""Slabs have the size of what is in them, every piece is its own, and the memory goes when the last piece does."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.swap import slabs
from shardopt.swap.slabs import Slabs, plan_pieces

WIDTHS = st.sampled_from([2, 4])


@given(st.lists(st.tuples(st.integers(0, 1 << 18), WIDTHS), max_size=60))
def test_pieces_are_apart_and_aligned_and_waste_less_than_one_percent(pieces: list[tuple[int, int]]) -> None:
    # Wide ones first, as the optimizer orders them.
    pieces = sorted(pieces, key=lambda piece: -piece[1])
    sizes = [numel * width for numel, width in pieces]
    starts, total = plan_pieces(sizes, [width for _, width in pieces])
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip([0, *ends], starts, strict=False))
    assert total == (ends[-1] if ends else 0)
    assert total <= 1.01 * sum(sizes)
    assert all(start % width == 0 for start, (_, width) in zip(starts, pieces, strict=True))
    assert all(start % 256 == 0 for start, size in zip(starts, sizes, strict=True) if size >= 256 * 128)


@pytest.mark.parametrize(
    "numels",
    [[32 * 64] * 300, [1, 3, 5, 7] * 2500, [70_001] * 9, [1] * 5000],
    ids=["300 shards of 64x64", "thousands of tiny ones", "odd large ones", "single elements"],
)
def test_a_slab_takes_at_most_one_percent_more_than_what_is_in_it(numels: list[int]) -> None:
    made = Slabs(pin=False)
    wanted = [(numel, torch.float32) for numel in numels] + [(numel, torch.bfloat16) for numel in numels]
    pieces = made.make(wanted)
    needed = sum(numel * (4 + 2) for numel in numels)
    assert needed <= made.nbytes <= 1.01 * needed
    assert [piece.numel() for piece in pieces] == [numel for numel, _ in wanted]


RESIDENT = """
import os, torch
from shardopt.swap.slabs import Slabs
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
torch.zeros(1).add_(1)
before = resident()
slabs = Slabs(pin=False)
pieces = slabs.make([(2048, torch.float32)] * 40_000)
made = resident()
for piece in pieces:
    piece.fill_(1)
print(sum(piece.nbytes for piece in pieces), made - before, resident() - made)
"""


def test_the_system_gives_a_slab_no_more_memory_than_that() -> None:
    # In a process of its own: here, other tests' garbage would come and go in between.
    output = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True).stdout
    needed, untouched, touched = map(int, output.split())
    assert needed == 40_000 * 8192
    # Nothing is resident before it is touched, but for the Python objects of 40,000 tensors.
    assert untouched < 0.25 * needed
    assert 0.99 * needed < touched < 1.01 * needed


def test_pieces_are_zeros_that_share_nothing() -> None:
    pieces = Slabs(pin=False).make([(5, torch.float32), (0, torch.float32), (7, torch.int16), (3, torch.bfloat16)])
    assert [piece.dtype for piece in pieces] == [torch.float32, torch.float32, torch.int16, torch.bfloat16]
    assert all(not piece.any() for piece in pieces)
    for number, piece in enumerate(pieces, start=1):
        piece.fill_(number)
    assert [piece.tolist() for piece in pieces] == [[1.0] * 5, [], [3] * 7, [4.0] * 3]


def test_each_piece_has_a_storage_of_its_own_so_that_saving_one_does_not_save_the_slab() -> None:
    piece, _ = Slabs(pin=False).make([(8, torch.float32), (1 << 20, torch.float32)])
    assert piece.untyped_storage().nbytes() == 32
    file = io.BytesIO()
    torch.save(piece, file)
    assert len(file.getvalue()) < 1 << 16
    assert copy.deepcopy(piece).untyped_storage().nbytes() == 32


def test_memory_lives_as_long_as_a_tensor_over_it_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []

    class Watched(slabs._Mapping):
        def __del__(self) -> None:
            gone.append(self.address)

    monkeypatch.setattr(slabs, "_Mapping", Watched)
    made = Slabs(pin=False)
    first, second = made.make([(8, torch.float32), (8, torch.float32)])
    view = first.view(2, 4)
    gc.disable()  # by counting references alone
    try:
        del made, first
        second.fill_(1)
        assert not gone
        del second
        assert view.sum() == 0
        assert not gone
        del view
        assert len(gone) == 1
    finally:
        gc.enable()


def test_an_impossible_slab_is_a_memory_error_that_names_its_size() -> None:
    with pytest.raises(MemoryError, match=r"slab of 4503599627370496 bytes"):
        Slabs(pin=False).make([(1 << 50, torch.float32)])


class Runtime:
    """CUDA's, as far as slabs call it."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: list[int] = []
        self.calls: list[tuple[int, int, int]] = []
        self.devices: list[object] = []
        self.last_error = 0
        self.launches = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((address, nbytes, flags))
        if self.code == 0:
            self.registered.append(address)
        self.last_error = self.code
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    @contextlib.contextmanager
    def on(self, device: object) -> Iterator[None]:
        """With another current device."""
        self.devices.append(device)
        yield
        self.devices.append(None)

    def launch(self, size: tuple[int, ...], *, device: str) -> None:
        """As torch's: the runtime's last error is what the launch is said to have failed with, and is gone then."""
        assert device == "cuda"
        self.launches += 1
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


def with_runtime(monkeypatch: pytest.MonkeyPatch, code: int) -> Runtime:
    runtime = Runtime(code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.on)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    return runtime


def test_a_slab_is_registered_once_in_its_exact_size_and_let_go_before_it_is_unmapped_F8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = with_runtime(monkeypatch, 0)
    made = Slabs(pin=True)
    pieces = made.make([(100, torch.float32), (3, torch.float32)])
    # 1: for every device of the process.
    assert runtime.calls == [(pieces[0].data_ptr(), 412, 1)]
    assert made.pin
    del pieces
    assert runtime.registered == []


@pytest.mark.parametrize("available", [False, True])
def test_without_registration_there_is_one_warning_and_pageable_memory_F9(
    monkeypatch: pytest.MonkeyPatch, available: bool
) -> None:
    runtime = with_runtime(monkeypatch, 2) if available else Runtime(0)
    made = Slabs(pin=True)
    why = r"cudaHostRegister of 40 bytes gave error 2 .*`ulimit -l`" if available else "torch finds no CUDA device"
    with pytest.warns(RuntimeWarning, match=why + ".*pageable memory") as caught:
        made.make([(10, torch.float32)])[0].fill_(1)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.make([(10, torch.float32)])
    # Or the next kernel, of whoever launches one, would raise it.
    assert runtime.last_error == 0
    assert runtime.launches == (2 if available else 0)


def test_an_error_that_another_launch_does_not_clear_is_raised_F8(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = with_runtime(monkeypatch, 2)

    def launch(size: tuple[int, ...], *, device: str) -> None:
        raise RuntimeError(f"the {device} device is lost")

    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(RuntimeError, match="the cuda device is lost"):
        Slabs(pin=True).make([(10, torch.float32)])
    assert runtime.registered == []


def test_a_slab_is_registered_with_the_device_that_it_is_for_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = with_runtime(monkeypatch, 0)
    pieces = Slabs(pin=True, device=torch.device("cuda", 3)).make([(10, torch.float32)])
    assert runtime.devices == [torch.device("cuda", 3), None]
    del pieces
    assert runtime.devices == [torch.device("cuda", 3), None] * 2


FORKED = """
import gc, os, sys, torch
from shardopt.swap.slabs import Slabs

class Runtime:
    calls = []
    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append("register")
        return 0
    def cudaHostUnregister(self, address):
        self.calls.append("unregister")
        return 0

torch.cuda.is_available, torch.cuda.cudart = lambda: True, Runtime
pieces = Slabs(pin=True).make([(1 << 20, torch.float32)])
address = pieces[0].data_ptr()
def is_mapped():
    spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)
assert is_mapped()
child = os.fork()
if child == 0:
    found = is_mapped()
    # Whatever is there by now is the child's own.
    del pieces
    gc.collect()
    os._exit(10 + found + 2 * len(Runtime.calls[1:]))
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), Runtime.calls)
del pieces
print(Runtime.calls, is_mapped())
kept = Slabs(pin=True).make([(8, torch.float32)])
sys.stdout.flush()
"""


def test_a_forked_child_has_no_pinned_pages_and_unregisters_none() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["10 ['register']", "['register', 'unregister'] False"]
    # Nor is anything said at the interpreter's end, with a slab that is still registered.
    assert done.stderr == ""
