"""A parcel arrives as it was sent, bit for bit, in memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.parcel import pack, unpack
from tests.support.raw_values import value_differences

VALUES: dict[str, Any] = {
    "signed zero and nan payload": torch.tensor([0, -(1 << 31), 0x7FC0_1234], dtype=torch.int32).view(torch.float32),
    "0-d": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 5),
    "bool": torch.tensor([[True], [False]]),
    "bfloat16": torch.arange(3, dtype=torch.bfloat16),
    "8-bit float": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "with holes": torch.arange(6.0)[::2],
    "expanded": torch.tensor([1.0]).expand(3),
    "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    "needs a gradient": torch.ones(2, requires_grad=True),
    "nested": {"a": [(1, 2.0, True, None, torch.float16)], "b": torch.Size([1, 2])},
}


@pytest.mark.parametrize("name", VALUES)
def test_it_arrives_as_it_was_sent(name: str) -> None:
    arrived = unpack(pack(VALUES[name]))
    assert value_differences({"value": VALUES[name]}, {"value": arrived}) == []


def test_a_small_view_does_not_send_its_storage() -> None:
    assert len(pack(torch.zeros(1_000_000)[:4])) < 1_000
