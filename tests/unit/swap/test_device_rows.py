"""The tables of the GPU kernel: the numbers that the host kernel works out, laid out for a device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.swap.device_rows import (
    BLOCK,
    DEVICE_HYPER,
    DEVICE_ROW,
    Kind,
    as_int64,
    device_blocks,
    device_hypers,
    device_rows,
    device_scalars,
    is_aligned,
    random_keys,
)
from shardopt.swap.kernel_rows import HYPER, ROW, DtypeCode, MasterKind
from tests.support import host_reference
from tests.support.host_rows import hypers_of

FP32, BF16 = DtypeCode.FP32, DtypeCode.BF16


@settings(deadline=None)
@given(seed=st.integers(0, 2**64 - 1), stream=st.integers(0, 2**64 - 1), step=st.integers(1, 2**63 - 1))
def test_keys_are_those_of_the_host_kernel(seed: int, stream: int, step: int) -> None:
    # The host kernel's words are compared with those of this reference, which is compared with the published ones.
    halves = host_reference._halves
    words = [int(word) for word in host_reference.philox(halves(stream) + halves(step), halves(seed))]
    keys, uppers = random_keys(seed, np.array([7, stream], np.uint64), np.array([3, step]))
    assert int(keys[1]) == words[0] | words[1] << 32
    assert int(uppers[1]) == words[2] | words[3] << 32


def host_rows(count: int) -> np.ndarray:
    rows = np.zeros(count, ROW)
    names = ("param", "grad", "out", "numel", "index_start", "index_run", "index_stride")
    for place, name in enumerate(names):
        rows[name] = np.arange(count) * 100 + place * 10 + 16
    rows["stream"], rows["hyper"] = np.arange(count) + 5, np.arange(count) % 2
    return rows


@pytest.mark.parametrize("moments", [FP32, BF16])
def test_rows_take_over_what_the_host_kernel_would_read(moments: DtypeCode) -> None:
    hypers, rows = hypers_of({"step": 3}, {"step": 2**40}), host_rows(3)
    rows["moment_dtype"] = moments
    made = device_rows(rows, offset=np.array([0, 64, 640]), hypers=hypers, seed=9)
    for name in ("param", "grad", "out", "numel", "index_start", "index_run", "index_stride", "hyper"):
        assert np.array_equal(made[name], rows[name])
    assert list(made["offset"]) == [0, 64, 640]
    keys = random_keys(9, np.array([5, 6, 7], np.uint64), np.array([3, 2**40, 3]))
    none = np.zeros(3, np.uint64)
    assert np.array_equal(made["key"], keys[0] if moments == BF16 else none)
    assert np.array_equal(made["upper"], keys[1] if moments == BF16 else none)


def test_a_chunk_may_have_no_rows() -> None:
    assert len(device_rows(host_rows(0), offset=np.zeros(0, np.int64), hypers=hypers_of(), seed=0)) == 0
    assert device_blocks(np.zeros(0, np.int64)).shape == (0, 2)


def test_rows_are_a_matrix_of_int64_in_the_order_of_their_fields() -> None:
    rows = np.zeros(2, DEVICE_ROW)
    for column, name in enumerate(DEVICE_ROW.names or ()):
        rows[name] = [column, 100 + column]
    rows["key"][1] = 2**64 - 1
    matrix = as_int64(rows)
    assert matrix.base is not None
    assert matrix.dtype == np.int64
    assert matrix.tolist() == [list(range(11)), [*range(100, 108), -1, 109, 110]]


@settings(deadline=None)
@given(st.lists(st.floats(width=64), min_size=8, max_size=8))
def test_hypers_are_rounded_once(values: list[float]) -> None:
    hypers = np.array([(*values, 1)], HYPER)
    made = device_hypers(hypers)
    with np.errstate(over="ignore"):
        expected = np.array([values]).astype(np.float32)
    assert np.array_equal(made, expected, equal_nan=True)
    assert made.dtype == np.float32
    assert HYPER.names == (*DEVICE_HYPER, "step")


@settings(deadline=None)
@given(st.floats(width=64, allow_nan=False), st.sampled_from([1.0, -1.0]))
def test_the_factor_of_gradients_is_rounded_as_on_the_host(grad_scale: float, sign: float) -> None:
    with np.errstate(over="ignore"):
        on_host = np.float32(sign * grad_scale)
    assert np.float32(sign) * device_scalars(grad_scale)[0] == on_host
    assert list(device_scalars(0.5)) == [0.5, 0.0]
    assert list(device_scalars(0.5, skip=True)) == [0.5, 1.0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5 * BLOCK), max_size=8))
def test_blocks_cover_every_element_once(numel: list[int]) -> None:
    blocks = device_blocks(np.array(numel, np.int64))
    assert blocks.dtype == np.int32
    programs = sum(-(-count // BLOCK) for count in numel)
    # As the kernel looks them up: the last row that begins with the program or before it.
    rows = [int(np.searchsorted(blocks[:, 0], program, side="right")) - 1 for program in range(programs)]
    assert [(row, program - blocks[row, 0]) for program, row in enumerate(rows)] == [
        (row, part) for row, count in enumerate(numel) for part in range(-(-count // BLOCK))
    ]


def test_blocks_reach_past_32_bits_of_elements() -> None:
    blocks = device_blocks(np.array([2**33 + 1, 1]))
    assert int(blocks[1, 0]) * BLOCK == 2**33 + BLOCK


@pytest.mark.parametrize("name", ["param", "grad", "out", "offset"])
def test_one_row_that_is_not_aligned_decides(name: str) -> None:
    rows = np.zeros(3, DEVICE_ROW)
    rows["param"], rows["grad"], rows["offset"] = [32, 64, 96], [16, 48, 80], [0, 8, 24]
    assert is_aligned(rows)
    rows[name][1] += 4
    assert not is_aligned(rows)


def test_kinds_that_the_host_kernel_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match="master_kind is FP32, but param_dtype is FP32"):
        Kind(param_dtype=FP32, grad_dtype=FP32, moment_dtype=FP32, master_kind=MasterKind.FP32)
    with pytest.raises(ValueError, match="has_out is set, but param_dtype is BF16"):
        Kind(param_dtype=BF16, grad_dtype=FP32, moment_dtype=FP32, has_out=True)
