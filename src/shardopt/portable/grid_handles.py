"""Handles of quantised entries: what they hold, and what they ask for, depends on blocks that a load hears of late."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardopt.errors import ShardoptError
from shardopt.geometry import Box
from shardopt.layouts.grid import Grid, covering_of_any
from shardopt.layouts.quantised import CODES_PER_BYTE
from shardopt.layouts.tracked import Tracked
from shardopt.portable.bound import ThisProcessOnly
from shardopt.portable.handles import ABSENT_SHAPE, Handle
from shardopt.portable.scratch import Scratch
from shardopt.torch_compat import make_wrapper

__all__ = ["GridHandle", "codes_handle", "scales_handle"]

_Ask = Callable[[tuple[int, ...]], "Box | None"]


class GridHandle(Handle):
    """A tensor with a cell for each element, pair or block of a parameter, of which this rank holds some or none."""

    ask: ThisProcessOnly

    @staticmethod
    def make(
        shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[tuple[Box, Tensor]], ask: _Ask, device: torch.device
    ) -> GridHandle:
        """A handle.

        Args:
            shape: of all cells.
            dtype: of them.
            parts: live memory of this rank's cells.
            ask: what a load reads of a saved tensor, by its shape; None when it can be none of these.
            device: where what is read is put.
        """
        handle: GridHandle = make_wrapper(GridHandle, shape, dtype, device)
        handle._fill([tensor.detach() for _, tensor in parts], [box.offset for box, _ in parts])
        handle.ask = ThisProcessOnly(ask)
        return handle

    @staticmethod
    def absent(ask: _Ask, device: torch.device) -> GridHandle:
        """A handle for what does not exist yet."""
        return GridHandle.make(
            ABSENT_SHAPE,
            torch.uint8,
            [(Box((0,), ABSENT_SHAPE), torch.empty(ABSENT_SHAPE, dtype=torch.uint8))],
            ask,
            device,
        )

    def _make_scratch(self) -> list[Scratch]:
        ask = self.ask.value
        if ask is None:
            raise ShardoptError(
                "a copy of a handle (staged, deep-copied or sent to another process) cannot be read into; load into "
                "what state_dict() returns."
            )
        box = None if self.saved_size is None else ask(self.saved_size)
        if box is None:
            return []
        device = self.device
        return [
            Scratch(box, self.dtype, lambda dtype: torch.empty(box.size, dtype=dtype, device=device), any_dtype=True)
        ]


def codes_handle(
    tracked: Tracked, shape: tuple[int, ...] | None, dtype: torch.dtype | None, parts: Sequence[tuple[Box, Tensor]]
) -> GridHandle:
    """Of a parameter's codes, or its values where it is not quantised; absent without a shape."""
    whole, box = tracked.shape, tracked.state_box
    pairs = Grid(whole, CODES_PER_BYTE)

    def ask(saved: tuple[int, ...]) -> Box | None:
        if box is None or saved not in (whole, pairs.shape):
            return None
        return box if saved == whole else pairs.covering(box)

    if shape is None or dtype is None:
        return GridHandle.absent(ask, tracked.local.device)
    return GridHandle.make(shape, dtype, parts, ask, tracked.local.device)


def scales_handle(
    tracked: Tracked, shape: tuple[int, ...] | None, dtype: torch.dtype | None, parts: Sequence[tuple[Box, Tensor]]
) -> GridHandle:
    """Of a parameter's scales; absent without a shape."""
    whole, box = tracked.shape, tracked.state_box

    def ask(saved: tuple[int, ...]) -> Box | None:
        if box is None or saved == ABSENT_SHAPE or math.prod(saved) > math.prod(whole):
            return None
        return covering_of_any(whole, saved, box)

    if shape is None or dtype is None:
        return GridHandle.absent(ask, tracked.local.device)
    return GridHandle.make(shape, dtype, parts, ask, tracked.local.device)
