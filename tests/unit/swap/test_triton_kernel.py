"""The Triton kernel in triton's interpreter: the bits of the host kernel, and nothing written but rows.

The interpreter runs each operation in numpy on the CPU. Its multiply-add is replaced with a fused one, which is
compared with exact arithmetic in test_exact_fma.py, and here, with everything else, with the host kernel's. What a GPU
makes of the same kernel has not been run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.swap.device_rows import BLOCK, Kind
from shardopt.swap.kernel_rows import Table
from tests.support.device_chunks import Chunk, assert_same_chunk, chunk_of, stepped_on_host
from tests.support.host_rows import FORMATS, Buffers, Format, hypers_of, made
from tests.support.triton_worker import Step

Interpret: TypeAlias = Callable[[Step], tuple[Chunk, Kind]]

# Four that differ in all that a kind has.
DIVERSE = [
    Format(param="fp32"),
    Format(param="fp32 with a copy", grad=torch.bfloat16),
    Format(param="bf16 over fp32", moments=torch.bfloat16),
    Format(param="bf16 with a remainder", grad=torch.bfloat16, moments=torch.bfloat16, amsgrad=True),
]
# Rows of one launch that have little in common.
HYPERS = hypers_of({}, {"beta1": 0.3, "beta2": 0.5, "maximize": True}, {"lr": 0.5, "beta1": 0.5, "step": 1})
# Elements by which memory misses what accesses of 128 bits need.
UNALIGNED = {"param": 1, "grad": 3, "out": 5, "slot": 7}


def rows_made(kind: Format, lengths: Sequence[int]) -> list[Buffers]:
    return [made(numel, kind, seed=row) for row, numel in enumerate(lengths)]


def assert_host_bits(
    interpret: Interpret, chunk: Chunk, *, hypers: Table = HYPERS, aligned: bool | None = None, **given: float
) -> Chunk:
    """What the kernel makes of the chunk, after a comparison with what the host kernel does."""
    got, kind = interpret(Step(chunk=chunk, hypers=hypers, **given))
    if aligned is not None:
        assert kind == chunk.kind(aligned=aligned)
    scale = given.get("grad_scale", 1.0)
    assert_same_chunk(got, stepped_on_host(chunk, hypers, grad_scale=scale))
    return got


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_every_kind_gives_the_bits_of_the_host_kernel_G6(kind: Format, interpret: Interpret) -> None:
    buffers = rows_made(kind, (67, BLOCK + 6, 5))
    for shift, aligned in (({}, True), (UNALIGNED, False)):
        chunk = chunk_of(buffers, shift=shift, hyper=[1, 0, 2], stream=[8, 2**63 + 5, 8])
        assert_host_bits(interpret, chunk, aligned=aligned, grad_scale=0.37)


@pytest.mark.parametrize("shift", [{}, UNALIGNED], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("kind", DIVERSE, ids=str)
def test_every_length_gives_the_bits_of_the_host_kernel_G4_G21(
    kind: Format, shift: dict[str, int], interpret: Interpret
) -> None:
    # Rows without elements come first, last and in the middle.
    lengths = [0, *range(35), 0, *range(35, 68), 0]
    chunk = chunk_of(rows_made(kind, lengths), shift=shift, hyper=[row % 3 for row in range(len(lengths))])
    assert_host_bits(interpret, chunk, aligned=not shift)


@pytest.mark.parametrize("shift", [{"param": 2}, {"grad": 2}, {"out": 4}, {"slot": 4}], ids=str)
def test_memory_that_is_not_aligned_is_found_by_itself(shift: dict[str, int], interpret: Interpret) -> None:
    chunk = chunk_of(rows_made(DIVERSE[1], [5, BLOCK + 9]), shift=shift)
    assert_host_bits(interpret, chunk, aligned=False)


@pytest.mark.parametrize("kind", DIVERSE, ids=str)
def test_rows_of_several_blocks_end_anywhere_in_the_last(kind: Format, interpret: Interpret) -> None:
    lengths = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8, 3 * BLOCK + 13]
    assert_host_bits(interpret, chunk_of(rows_made(kind, lengths), hyper=[0, 1, 2, 0, 1]), aligned=True)


@pytest.mark.parametrize("kind", DIVERSE, ids=str)
def test_offsets_are_of_64_bits_G16(kind: Format, interpret: Interpret) -> None:
    # 2**33 elements lie before the ones that are stepped, so an offset of 32 bits in bytes or elements would show.
    numel = BLOCK + 5
    chunk = chunk_of(rows_made(kind, [numel]), index=[(2**40 + 3, 2**62, 0)])
    got, _ = interpret(Step(chunk=chunk, hypers=HYPERS, blocks_before=2**33 // BLOCK))
    assert_same_chunk(got, stepped_on_host(chunk, HYPERS))


RUNS = st.one_of(st.integers(1, 70), st.integers(BLOCK - 2, BLOCK + 2), st.integers(1, 2**40))


@settings(max_examples=25, deadline=None)
@given(
    numel=st.integers(1, 2 * BLOCK + 70),
    start=st.one_of(st.integers(0, 200), st.integers(0, 2**45)),
    run=RUNS,
    gap=st.integers(0, 2**30),
)
@pytest.mark.parametrize("shift", [{}, {"slot": 1}], ids=str)
def test_random_words_follow_the_global_index(
    shift: dict[str, int], numel: int, start: int, run: int, gap: int, interpret: Interpret
) -> None:
    kind = Format(param="bf16", grad=torch.bfloat16, moments=torch.bfloat16)
    chunk = chunk_of([made(numel, kind)], shift=shift, index=[(start, run, run + gap)])
    assert_host_bits(interpret, chunk)


@pytest.mark.parametrize("kind", DIVERSE[2:], ids=str)
def test_cuts_into_rows_change_nothing_G2(kind: Format, interpret: Interpret) -> None:
    numel, start = 2 * BLOCK, 77
    whole = made(numel, kind)
    expected, _ = interpret(Step(chunk=chunk_of([whole], index=[(start, numel, 0)]), hypers=HYPERS))
    cuts = [0, 3, 64, BLOCK + 1, numel]
    parts = [whole.part(first, end - first) for first, end in itertools.pairwise(cuts)]
    index = [(start + first, numel, 0) for first in cuts[:-1]]
    got, _ = interpret(Step(chunk=chunk_of(parts, index=index), hypers=HYPERS))
    for name, tensor in expected.read()[0].named().items():
        again = torch.cat([part.named()[name] for part in got.read()])
        assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8)), name


def test_words_depend_on_seed_stream_and_step(interpret: Interpret) -> None:
    kind = Format(param="fp32", moments=torch.bfloat16)
    one = made(256, kind)
    chunk = chunk_of([one, one, one], stream=[5, 6, 5], hyper=[0, 0, 1])
    hypers = hypers_of({"step": 10**6}, {"step": 10**6 + 1})
    moments = [row.exp_avg for row in assert_host_bits(interpret, chunk, hypers=hypers).read()]
    other, _ = interpret(Step(chunk=chunk, hypers=hypers, seed=2**64 - 1))
    assert_same_chunk(other, stepped_on_host(chunk, hypers, seed=2**64 - 1))
    moments.append(other.read()[0].exp_avg)
    for first, second in itertools.combinations(moments, 2):
        assert not torch.equal(first, second)


@pytest.mark.parametrize("skip", [1.0, -1.0, 1e-45, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", DIVERSE[::3], ids=str)
def test_a_launch_that_is_skipped_changes_nothing(kind: Format, skip: float, interpret: Interpret) -> None:
    chunk = chunk_of(rows_made(kind, [BLOCK + 11, 5]))
    got, _ = interpret(Step(chunk=chunk, hypers=HYPERS, skip=skip))
    assert_same_chunk(got, chunk)
    # And one that is not does: zero has two signs.
    stepped, _ = interpret(Step(chunk=chunk, hypers=HYPERS, skip=-0.0))
    assert not np.array_equal(stepped.tensors["exp_avg"], chunk.tensors["exp_avg"])
