"""What is being loaded, and what it may replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardopt.layouts.tracked import Tracked
from shardopt.portable.manifest import Manifest, ParameterRecord
from shardopt.staging.filling import can_be_filled
from shardopt.staging.options import LoadOptions

__all__ = ["Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """What is being loaded.

    Attributes:
        manifest: the checkpoint's manifest.
        handles: the portable state's values by key.
        from_storage: whether a reader filled the handles; otherwise they lend another optimizer's live memory.
        saved_as: live FQN -> the parameter's FQN in the checkpoint.
        options: what the load may do.
        shared: ids of live state tensors that share memory with others.
        tables: what codes will mean of optimizers that learn that, by number of the optimizer.
    """

    manifest: Manifest
    handles: Mapping[str, Any]
    from_storage: bool
    saved_as: Mapping[str, str]
    options: LoadOptions
    shared: frozenset[int] = frozenset()
    tables: Mapping[int, Tensor | None] = field(default_factory=dict)

    def takes(self, live: Any, loaded: Tensor) -> bool:
        """Whether what was loaded is copied into the live tensor; otherwise it takes its place."""
        return (
            isinstance(live, Tensor)
            and live.shape == loaded.shape
            and live.dtype == loaded.dtype
            and can_be_filled(live)
            and id(live) not in self.shared
        )

    def record(self, tracked: Tracked) -> ParameterRecord:
        """What the checkpoint says of a live parameter."""
        return self.manifest.parameters[self.saved_as[tracked.fqn]]
