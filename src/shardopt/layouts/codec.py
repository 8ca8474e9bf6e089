"""What is known of optimizers whose state is quantised: which tensors are codes, which are scales, and of what."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardopt.layouts.interchange import qualified

__all__ = ["Blocks", "Codec", "Form", "Subject", "codec_of", "register_codec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a tensor is quantised.

    An element's value is ``table[code] * scale`` with the scale of its block, in fp32; without a table, the code itself
    is the number; without codes, every element of a block is its scale.

    Attributes:
        block: elements that share a scale: consecutive ones, row by row, from the tensor's first.
        codes: dtype of the codes, one byte long; None when there are none.
        scales: dtype of the scales.
        table: fp32, 1-D, what each code means; None when codes are numbers.
        per_byte: codes in a byte, the first in the high bits; 1 or 2.
    """

    block: int
    codes: torch.dtype | None = torch.uint8
    scales: torch.dtype = torch.float32
    table: Tensor | None = None
    per_byte: int = 1

    def __post_init__(self) -> None:
        if self.block < 1 or self.per_byte not in (1, 2) or (self.per_byte == 2 and self.block % 2):
            raise ValueError(
                f"blocks of {self.block} elements with {self.per_byte} codes in a byte: expected at least one element, "
                "one or two codes, and of two an even block."
            )
        if self.codes is not None and self.codes.itemsize != 1:
            raise ValueError(f"codes are {self.codes}; expected a dtype of one byte.")

    def is_like(self, other: Form) -> bool:
        """Whether codes and scales mean the same in both."""
        mine = (self.block, self.codes, self.scales, self.per_byte, self.table is None)
        if mine != (other.block, other.codes, other.scales, other.per_byte, other.table is None):
            return False
        if self.table is None or other.table is None:
            return True
        # As bytes: a table may hold a NaN, and zeros have signs.
        return torch.equal(self.table.cpu().view(torch.uint8), other.table.cpu().view(torch.uint8))


@dataclass(frozen=True, slots=True)
class Blocks:
    """One quantised tensor: the optimizer's own memory, never a copy.

    Attributes:
        form: what the parts mean.
        codes: as many bytes as the tensor has elements, or half as many, in the tensor's row-major order; any shape.
        scales: one a block; any shape.
    """

    form: Form
    codes: Tensor | None
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Subject:
    """One parameter, as its optimizer sees it.

    Attributes:
        optimizer: the optimizer.
        group: the parameter's group.
        shard: this rank's shard of the parameter, or the whole of it, whichever the optimizer steps; for its shape,
            dtype and device.
    """

    optimizer: Any
    group: Mapping[str, Any]
    shard: Tensor


class Codec(ABC):
    """Takes the state of one class of optimizers apart into ``Blocks``, and puts it together again.

    It is asked about one parameter at a time, and never about its place in a mesh. Nothing is copied, and nothing live
    is changed.

    Attributes:
        name: of the quantisation, in checkpoints; state is exchanged between codecs of one name only.
    """

    name: ClassVar[str]

    @abstractmethod
    def entries(self, subject: Subject) -> tuple[str, ...]:
        """Names of the tensors that may be quantised, as the group's options make the optimizer keep them."""

    def parts(self, entry: str) -> tuple[str, ...]:
        """Keys of ``optimizer.state[param]`` that make up the entry."""
        return (entry,)

    @abstractmethod
    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Blocks | Tensor | None:
        """The entry: quantised, or a floating-point tensor where the optimizer keeps one; None when it is not there.

        Raises:
            PlacementError: its parts contradict each other.
        """

    @abstractmethod
    def form(self, subject: Subject, entry: str) -> Form | torch.dtype:
        """How the optimizer would make the entry: quantised, or as numbers of a dtype."""

    @abstractmethod
    def quantise(self, values: Tensor, form: Form) -> Blocks:
        """Quantises fp32 values, contiguous, as the optimizer does in a step."""

    @abstractmethod
    def write(self, subject: Subject, entry: str, value: Blocks | Tensor) -> Mapping[str, Any]:
        """Items of ``optimizer.state[param]`` that make up the entry, over the memory of ``value``."""

    def backfill(self, subject: Subject, entry: str) -> Tensor | None:
        """Values, in the shape of the shard, of an entry that a checkpoint lacks and has others beside; None: refused.

        For entries that an earlier version of the optimizer did not keep, and whose absence meant something definite.
        """
        return None

    def refuse(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why this optimizer cannot be wrapped, or None."""
        return None

    def constants(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Attributes of the optimizer that hold tensors which are no state."""
        return ()

    def is_scratch(self, item: str) -> bool:
        """Whether an item of ``optimizer.state[param]``, or of a group, is no state: neither saved nor loaded."""
        return False

    def attributes(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Attributes of the optimizer that are part of its state, the same on every rank."""
        return ()

    def quantises(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it quantises anything, were its parameters larger; where it does not, ``form`` gives dtypes."""
        return True

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a shard's update needs only the shard, its blocks apart."""
        return True


_REGISTERED: dict[str, Codec] = {}

# By the module that its classes are in, the module that knows them. Neither is imported before it is needed.
_KNOWN: dict[str, str] = {
    "bitsandbytes.optim": "shardopt.layouts.adapters.bitsandbytes",
    "gefen.gefen": "shardopt.layouts.adapters.gefen",
    "torchao.optim": "shardopt.layouts.adapters.torchao",
}


def register_codec(optimizer_class: type[torch.optim.Optimizer] | str, codec: Codec) -> None:
    """Says for every optimizer of a class how its state is quantised. Declare it on every rank, before it is wrapped.

    Args:
        optimizer_class: the class, or its module and name; a subclass is a class of its own.
        codec: see ``Codec``; ``shardopt.testing.check_codec`` tries it out.

    Raises:
        TypeError: there is no such class, or it is no codec.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"register_codec(..., {codec!r}): expected a shardopt.Codec.")
    _REGISTERED[qualified(optimizer_class)] = codec


def codec_of(optimizer: torch.optim.Optimizer) -> Codec | None:
    """How the optimizer's state is quantised, or None when nothing is known of that."""
    name = qualified(type(optimizer))
    if name in _REGISTERED:
        return _REGISTERED[name]
    # Users' subclasses of a library's classes keep what these keep.
    modules = [f"{kind.__module__}." for kind in type(optimizer).__mro__]
    for package, adapter in _KNOWN.items():
        if any(module.startswith(package + ".") for module in modules):
            return importlib.import_module(adapter).codec_for(optimizer)
    return None
