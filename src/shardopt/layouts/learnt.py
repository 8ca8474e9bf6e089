"""Codecs of optimizers that learn how to quantise: from gradients, for all parameters that they see."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from shardopt.layouts.codec import Codec, Form, Subject

__all__ = ["LearntCodec"]


class LearntCodec(Codec):
    """Of an optimizer that learns one table for all parameters that it sees, and for each how long its blocks are.

    What it has learnt is part of its state: a load gives it the table that most of its elements were saved with, and
    blocks like those that were saved. ``form`` says what a load makes where nothing was saved.

    Two ranks that see different parameters have different tables. Of a shard without elements it keeps nothing.
    """

    @abstractmethod
    def table(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """What codes mean, of all its parameters; None before it has learnt that."""

    @abstractmethod
    def adopt(self, optimizer: torch.optim.Optimizer, table: Tensor | None) -> None:
        """Gives it a table, in memory that nobody else has; None makes it learn one in its next step."""

    @abstractmethod
    def block(self, subject: Subject, saved: Sequence[int], common: int) -> int:
        """How long the blocks of a shard are that is made of others.

        Args:
            subject: the shard.
            saved: lengths of the blocks that its elements were in; none for a shard without elements.
            common: the greatest length with which every block lies within one of those.

        Returns:
            A length that divides the shard; with ``common`` values stay as they are.
        """

    @abstractmethod
    def why_not_local(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why shards cannot be stepped by themselves, or None."""

    @abstractmethod
    def form(self, subject: Subject, entry: str) -> Form:
        """How a load makes an entry of which nothing was saved."""

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``why_not_local`` has nothing against it."""
        return self.why_not_local(optimizer) is None
