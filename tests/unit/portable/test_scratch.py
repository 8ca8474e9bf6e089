"""Scratch: what a load writes into, and which elements have arrived."""

from __future__ import annotations

import pytest
import torch

from shardopt.geometry import Box
from shardopt.portable.scratch import Scratch

# Rows 4 to 7, columns 2 to 4 of some larger tensor.
BOX = Box((4, 2), (4, 3))


class Allocation:
    """Counts how often memory was taken."""

    def __init__(self, size: tuple[int, ...] = BOX.size) -> None:
        self.size = size
        self.count = 0

    def __call__(self, dtype: torch.dtype) -> torch.Tensor:
        self.count += 1
        return torch.full(self.size, -1.0, dtype=dtype)


def test_pieces_arrive_at_their_places_and_are_counted() -> None:
    scratch = Scratch(BOX, torch.float32, Allocation())
    assert scratch.missing() == BOX
    target = scratch.target().detach()
    upper, rest = torch.arange(6.0).reshape(2, 3), torch.arange(10.0, 14.0).reshape(2, 2)
    target.narrow(0, 0, 2).narrow(1, 0, 3).copy_(upper)
    assert scratch.missing() == Box((6, 2), (2, 3))
    target.narrow(0, 2, 2).narrow(1, 1, 2).copy_(rest)
    assert scratch.missing() == Box((6, 2), (2, 1))
    target.narrow(1, 0, 1).narrow(0, 3, 1).copy_(torch.full((1, 1), 20.0))
    assert scratch.missing() == Box((6, 2), (1, 1))
    expected = torch.tensor([[0.0, 1, 2], [3, 4, 5], [-1, 10, 11], [20, 12, 13]])
    assert torch.equal(scratch.tensor(), expected)
    assert scratch.delivered == [Box((4, 2), (2, 3)), Box((6, 3), (2, 2)), Box((7, 2), (1, 1))]


def test_narrowing_twice_along_one_dim_adds_up() -> None:
    scratch = Scratch(BOX, torch.float32, Allocation())
    scratch.target().narrow(0, 1, 3).narrow(0, 1, 2).narrow(1, 2, 1).copy_(torch.full((2, 1), 5.0))
    assert scratch.delivered == [Box((6, 4), (2, 1))]
    assert (scratch.tensor() == 5).nonzero().tolist() == [[2, 2], [3, 2]]


def test_a_target_looks_like_a_tensor_of_the_box() -> None:
    target = Scratch(BOX, torch.bfloat16, Allocation()).target()
    assert target.size() == target.shape == torch.Size((4, 3))
    assert target.size(1) == 3
    assert target.dtype == torch.bfloat16
    assert target.narrow(1, 1, 2).size() == torch.Size((4, 2))
    assert target.detach() is target


def test_memory_is_taken_once_before_the_first_copy() -> None:
    allocation = Allocation()
    scratch = Scratch(BOX, torch.float32, allocation)
    target = scratch.target().narrow(0, 0, 1)
    assert allocation.count == 1
    assert target.copy_(torch.zeros(1, 3)) is target
    target.copy_(torch.zeros(1, 3), non_blocking=True)
    assert allocation.count == 1
    assert scratch.tensor() is scratch.tensor()
    assert allocation.count == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_another_dtype_is_noted_and_not_cast(dtype: torch.dtype) -> None:
    scratch = Scratch(BOX, torch.float32, Allocation())
    scratch.target().copy_(torch.zeros(4, 3, dtype=dtype))
    assert scratch.wrong_dtype == dtype
    # All of it came, so the dtype is the one thing to report.
    assert scratch.missing() is None


def test_a_0_d_tensor_is_one_element() -> None:
    scratch = Scratch(Box((), ()), torch.float32, Allocation(()))
    assert scratch.missing() == Box((), ())
    scratch.target().copy_(torch.tensor(3.0))
    assert scratch.missing() is None
    assert scratch.tensor().item() == 3.0


def test_of_an_empty_box_nothing_is_missing() -> None:
    assert Scratch(Box((4, 0), (0, 3)), torch.float32, Allocation((0, 3))).missing() is None
