"""The host kernel in numpy: slow, and what the C++ one is compared with."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from shardopt.swap.host_kernel import DtypeCode, MasterKind

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def memory(address: int, numel: int, dtype: type[np.generic]) -> NDArray[np.generic]:
    """A writable view of ``numel`` elements at ``address``, whose owner must outlive it."""
    size = numel * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def philox(counter: list[NDArray[np.uint64]], key: list[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
    """Philox-4x32-10: four 32-bit words for each counter of four and key of two, held in uint64."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (second >> _HALF) ^ b ^ k0, second & _WORD, (first >> _HALF) ^ d ^ k1, first & _WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _WORD, (k1 + np.uint64(0xBB67AE85)) & _WORD
    return [a, b, c, d]


def _halves(value: int) -> list[NDArray[np.uint64]]:
    return [np.array(value & 0xFFFFFFFF, np.uint64), np.array(value >> 32 & 0xFFFFFFFF, np.uint64)]


def random_words(seed: int, step: int, stream: int, index: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The random word of each element: its low half rounds exp_avg, its high half exp_avg_sq."""
    k0, k1, upper0, upper1 = philox(_halves(stream) + _halves(step), _halves(seed))
    counter = (index.astype(np.uint64) >> np.uint64(6)) * np.uint64(16) + (index.astype(np.uint64) & np.uint64(15))
    words = philox([counter & _WORD, counter >> _HALF, upper0, upper1], [k0, k1])
    return np.choose((index >> 4) & 3, words).astype(np.uint32)


def _widened(address: int, numel: int, code: int) -> NDArray[np.float32]:
    if code == DtypeCode.FP32:
        return memory(address, numel, np.float32).copy()
    return (memory(address, numel, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _quiet(bits: NDArray[np.uint32], rounded: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """``rounded``, and a NaN where ``bits`` are one's."""
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def to_nearest(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits in bf16, rounded to nearest even."""
    bits = values.view(np.uint32)
    return _quiet(bits, (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16)


def stochastic(values: NDArray[np.float32], random16: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Bits in bf16, rounded up with the probability that keeps the mean."""
    bits = values.view(np.uint32)
    return _quiet(bits, (bits + random16) >> 16)


def _store(address: int, values: NDArray[np.float32], code: int, half: NDArray[np.uint16] | None) -> None:
    if code == DtypeCode.FP32:
        memory(address, len(values), np.float32)[:] = values
    else:
        memory(address, len(values), np.uint16)[:] = to_nearest(values) if half is None else half


def _load_param(row: np.void, numel: int) -> NDArray[np.float32]:
    if row["master_kind"] == MasterKind.FP32:
        return memory(int(row["master"]), numel, np.float32).copy()
    value = _widened(int(row["param"]), numel, row["param_dtype"])
    if row["master_kind"] == MasterKind.REMAINDER16:
        remainder = memory(int(row["master"]), numel, np.int16).astype(np.int32)
        value = (value.view(np.int32) + remainder).view(np.float32)
    return value


def _store_param(row: np.void, numel: int, value: NDArray[np.float32]) -> None:
    if row["master_kind"] == MasterKind.REMAINDER16:
        bits = np.where(np.isnan(value), np.uint32(0x7FC00000), value.view(np.uint32))
        memory(int(row["param"]), numel, np.uint16)[:] = ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16)
        memory(int(row["master"]), numel, np.uint16)[:] = (bits & 0xFFFF).astype(np.uint16)
        return
    if row["master_kind"] == MasterKind.FP32:
        memory(int(row["master"]), numel, np.float32)[:] = value
    _store(int(row["param"]), value, row["param_dtype"], None)
    if row["out"]:
        _store(int(row["out"]), value, DtypeCode.BF16, None)


def step_row(row: np.void, hyper: np.void, seed: int, grad_scale: float) -> None:
    """One row of ``adamw_rows``."""
    numel, moment = int(row["numel"]), row["moment_dtype"]
    f = {name: np.float32(hyper[name]) for name in hyper.dtype.names if name != "step"}
    value = _load_param(row, numel)
    grad = _widened(int(row["grad"]), numel, row["grad_dtype"]) * np.float32(hyper["grad_sign"] * grad_scale)
    avg, square = (_widened(int(row[name]), numel, moment) for name in ("exp_avg", "exp_avg_sq"))

    def fma(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    weight = f["grad_weight"]
    avg = fma(grad - avg, weight, avg) if weight < 0.5 else fma(grad - avg, np.float32(weight - 1), grad)
    square = fma(f["square_weight"] * grad, grad, square * f["beta2"])
    largest = square
    if row["max_exp_avg_sq"]:
        largest = np.maximum(_widened(int(row["max_exp_avg_sq"]), numel, moment), square)
        _store(int(row["max_exp_avg_sq"]), largest, moment, None)
    change = fma(value, f["decay"], f["step_size"] * avg / (np.sqrt(largest) / f["bias_correction"] + f["eps"]))
    _store_param(row, numel, value - change)
    halves: tuple[NDArray[np.uint16] | None, ...] = (None, None)
    if moment == DtypeCode.BF16:
        i = np.arange(numel)
        run = int(row["index_run"])
        index = int(row["index_start"]) + i // run * int(row["index_stride"]) + i % run
        words = random_words(seed, int(hyper["step"]), int(row["stream"]), index)
        halves = (stochastic(avg, words & np.uint32(0xFFFF)), stochastic(square, words >> np.uint32(16)))
    _store(int(row["exp_avg"]), avg, moment, halves[0])
    _store(int(row["exp_avg_sq"]), square, moment, halves[1])
