"""Infinities and NaNs are found wherever they are, in any layout and dtype, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from shardopt.staging import finite
from shardopt.staging.finite import find_non_finite

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk", [1 << 22, 4])
def test_one_element_is_enough(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_CHUNK_ELEMENTS", chunk)
    for at in range(15):
        tensor = torch.ones(3, 5)
        tensor.view(-1)[at] = float("nan")
        assert find_non_finite(tensor.to(dtype)) == "NaN"
        tensor.view(-1)[at] = float("-inf")
        # float8_e4m3fn has no infinity.
        assert dtype == torch.float8_e4m3fn or find_non_finite(tensor.to(dtype)) == "inf"
    assert find_non_finite(torch.ones(3, 5).to(dtype)) is None


def test_layouts() -> None:
    tensor = torch.ones(4, 6)
    tensor[1, 2] = float("inf")
    for view in (tensor.t(), tensor[:, ::2], tensor[1:], tensor[:, 2], tensor.as_strided((2, 3), (6, 1))):
        assert find_non_finite(view) == "inf"
    for view in (tensor[:, 1::2], tensor[2:], tensor[:, 3], tensor[:1]):
        assert find_non_finite(view) is None


def test_a_sum_that_overflows_is_no_infinity() -> None:
    assert find_non_finite(torch.full((1000,), torch.finfo(torch.float32).max)) is None
    assert find_non_finite(torch.full((1000,), 60000.0, dtype=torch.float16)) is None
    assert find_non_finite(torch.full((1000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)) is None


def test_infinities_that_cancel_are_found() -> None:
    assert find_non_finite(torch.tensor([float("inf"), float("-inf"), 1.0])) == "inf"


@pytest.mark.parametrize("part", [complex(1, float("nan")), complex(float("inf"), 0)])
def test_complex_numbers(part: complex) -> None:
    assert find_non_finite(torch.tensor([1j, part])) is not None
    assert find_non_finite(torch.tensor([1j, 2])) is None


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.tensor([1, 2]), torch.tensor([True]), torch.tensor(3.0)])
def test_nothing_to_find(tensor: torch.Tensor) -> None:
    assert find_non_finite(tensor) is None


def test_a_scalar() -> None:
    assert find_non_finite(torch.tensor(float("nan"))) == "NaN"
