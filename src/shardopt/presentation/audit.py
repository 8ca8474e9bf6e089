"""Which operations a rule uses that can let elements of a tensor act on each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperationAudit"]

# Make a tensor, or show one otherwise, and compute nothing.
_MAKING = frozenset(
    " ".join(
        (
            "alias arange as_strided clone copy_ detach empty empty_like empty_strided expand fill_ full full_like",
            "index_put_ is_pinned is_same_size lift_fresh new_empty new_full new_ones new_zeros ones ones_like permute",
            "resolve_conj reshape scalar_tensor set_ squeeze t transpose unbind unsqueeze view view_as_complex",
            "view_as_real _to_copy _unsafe_view zero_ zeros zeros_like",
        )
    ).split(" ")
)
# Act on each element alone, and lack torch's tag for that.
_POINTWISE_TOO = frozenset(("abs_", "lerp", "lerp_", "masked_fill_", "where"))
_POINTWISE_TOO |= {f"_fused_{rule}_" for rule in ("adam", "adamw", "sgd", "adagrad")}
# The only lists of tensors whose operation reduces each of them.
_REDUCING_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


class OperationAudit(TorchDispatchMode):
    """Notes what mixes elements, while it is entered.

    Attributes:
        mixing: names of such operations on tensors of more than one element, in order of their first use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixing: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation, and notes it if it may mix."""
        name = func.overloadpacket.__name__
        if any(tensor.numel() > 1 for tensor in _tensors(args)) and not _is_pointwise(name, func):
            self.mixing.setdefault(name)
        return func(*args, **(kwargs or {}))


def _is_pointwise(name: str, func: Any) -> bool:
    if torch.Tag.pointwise in func.tags or name in _MAKING or name in _POINTWISE_TOO:
        return True
    if not name.startswith("_foreach_"):
        return False
    # The pointwise maximum and minimum of two lists begin as the reducing ones do.
    return name.startswith(("_foreach_maximum", "_foreach_minimum")) or not name.startswith(_REDUCING_LISTS)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
