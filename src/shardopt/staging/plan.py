"""One parameter's new state, checked and waiting to be put in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardopt.layouts.tracked import Tracked
from shardopt.portable.handles import BytesHandle
from shardopt.portable.scratch import Scratch
from shardopt.portable.tensor_bytes import dtype_name
from shardopt.staging.finite import find_non_finite_in
from shardopt.staging.options import LoadOptions
from shardopt.staging.report import Report
from shardopt.staging.source import Source

__all__ = ["TAKEN_OVER", "ParameterPlan", "bytes_of", "in_dtype", "judge_values", "judged", "place_value"]

TAKEN_OVER = "what was read of it has been taken over by an earlier load and may have changed; read it again."


@dataclass(slots=True)
class ParameterPlan:
    """The whole new state of one parameter.

    Attributes:
        state: the inner optimizer's own state mapping.
        param: the user's parameter, its key there.
        fill: live tensors that keep their identity, with what is copied into them.
        publish: new values, put in place by reference.
        read: all scratch that values come from.
        taken_over: the scratch of it whose memory is published.
        keep: all entries the parameter has afterwards.
    """

    state: dict[Any, dict[str, Any]]
    param: Tensor
    fill: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    publish: dict[str, Any] = field(default_factory=dict)
    read: list[Scratch] = field(default_factory=list)
    taken_over: list[Scratch] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)

    def commit(self) -> None:
        """Puts the state in place; a parameter that had none in the checkpoint has none afterwards."""
        if not self.keep:
            self.state.pop(self.param, None)
            return
        for live, loaded in self.fill:
            live.copy_(loaded)
        entries = self.state.setdefault(self.param, {})
        for entry in [entry for entry in entries if entry not in self.keep]:
            del entries[entry]
        entries.update(self.publish)
        for scratch in self.taken_over:
            scratch.taken_over = True


def judge_values(label: str, loaded: Any, options: LoadOptions, report: Report) -> None:
    """Reports infinities and NaNs."""
    found = find_non_finite_in(loaded.tensor() if isinstance(loaded, Scratch) else loaded)
    if found is None:
        return
    if options.finite == "report":
        report.notes.append(f"{label} holds {found} on this rank.")
    else:
        report.problems.append(f"{label} holds {found} on this rank; finite='report' loads it all the same.")


def in_dtype(
    label: str, tracked: Tracked, loaded: Scratch | Tensor, live: Any, source: Source, report: Report
) -> Scratch | Tensor | None:
    """What was loaded, in the dtype this optimizer keeps, or None with a problem reported."""
    keeps = tracked.local.dtype
    if isinstance(live, Tensor):
        keeps = live.dtype
    elif source.record(tracked).dtype == dtype_name(keeps):
        # The same parameter dtype: the dtype of state that is made anew is the rule's own, as it was when it was saved.
        return loaded
    if loaded.dtype == keeps:
        return loaded
    if source.options.dtype == "live" and loaded.dtype.is_floating_point and keeps.is_floating_point:
        report.notes.append(f"{label} was saved as {dtype_name(loaded.dtype)} and is converted to {dtype_name(keeps)}.")
        # Beside what was read, which another load may want as it is.
        return (loaded.tensor() if isinstance(loaded, Scratch) else loaded).to(keeps)
    report.problems.append(
        f"{label} was saved as {dtype_name(loaded.dtype)}, this optimizer keeps {dtype_name(keeps)}; dtype='live' "
        "converts floating-point state."
    )
    return None


def judged(tracked: Tracked, name: str, value: Any, live: Any, source: Source, report: Report) -> Any:
    """A value that is stored whole, in the dtype this optimizer keeps; problems go to the report."""
    label = f"{tracked.fqn}: state {name!r}"
    judge_values(label, value, source.options, report)
    if not isinstance(value, Tensor):
        return value
    cast = source.record(tracked).dtype != dtype_name(tracked.local.dtype)
    if not cast or value.dim() == 0 or not value.is_floating_point():
        return value
    return in_dtype(label, tracked, value, live, source, report)


def place_value(plan: ParameterPlan, source: Source, name: str, value: Any, live: Any, device: torch.device) -> None:
    """Plans a value: copied into the live tensor where that takes it, else put in its place."""
    if isinstance(value, Tensor):
        if source.takes(live, value):
            plan.fill.append((live, value))
            return
        value = value.to(device)
    plan.publish[name] = value


def bytes_of(handle: Any, label: str, from_storage: bool, report: Report) -> Tensor | None:
    """The bytes of a handle that were fully delivered, or None with a problem reported."""
    if not isinstance(handle, BytesHandle):
        report.problems.append(f"{label}: expected bytes, found a pickled {type(handle).__name__}.")
    elif from_storage and not handle.was_read:
        report.problems.append(f"{label}: not read; the load skipped its key.")
    elif (problem := handle.problem()) is not None:
        report.problems.append(f"{label}: {problem}")
    else:
        return handle.contents()
    return None
