"""A clip that waits for its step: the factor, and what tells whether the gradients are still those it is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt.swap.gradients import Gradients

__all__ = ["Clip"]


@dataclass(frozen=True, slots=True)
class Clip:
    """A factor for the gradients of one step.

    Attributes:
        factor: to multiply them with.
        marks: tell whether they are still those that it was worked out for.
        witness: the smallest of them; kept, since freed memory may be that of the next gradients.
        sample: copies of a few of their elements.
    """

    factor: float
    marks: list[list[int]]
    witness: Tensor | None
    sample: list[Tensor]

    @classmethod
    def of(cls, factor: float, gradients: Gradients) -> Clip:
        """The clip of the gradients that are there now."""
        return cls(factor, gradients.marks(), gradients.witness(), gradients.sample())

    def is_of(self, gradients: Gradients) -> bool:
        """Whether they are still the very ones, unchanged."""
        return (
            self.witness is gradients.witness()
            and self.marks == gradients.marks()
            and _same_bits(self.sample, gradients.sample())
        )


def _same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether 0-d tensors are alike, NaNs too."""
    return len(left) == len(right) and all(
        one.dtype == two.dtype and torch.equal(one.reshape(1).view(torch.uint8), two.reshape(1).view(torch.uint8))
        for one, two in zip(left, right, strict=True)
    )
