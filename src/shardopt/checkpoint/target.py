"""Everything of a load but wrapped optimizers: read into scratch, judged, and put in place afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from shardopt.errors import LoadError, PlacementError
from shardopt.layouts.tracked import Tracked, track
from shardopt.naming import Name, canonical
from shardopt.portable.export import handle_for
from shardopt.portable.handles import BoxHandle, Handle
from shardopt.portable.storage import Storage
from shardopt.staging.filling import can_be_filled, sharing_memory
from shardopt.staging.options import LoadOptions
from shardopt.staging.report import Report, say_names

__all__ = ["Targets"]


@dataclass(slots=True)
class _Tensor:
    """A live tensor and what is read for it."""

    tracked: Tracked
    handle: BoxHandle
    dtype: Any


@dataclass(slots=True)
class Targets:
    """The states that a load fills, flattened as DCP does, and what has been read for them.

    Attributes:
        states: key of the dict -> its state; tensors in it are live memory.
        reports: key of the dict -> what was found; problems refuse the load.
    """

    states: dict[str, Any]
    reports: dict[str, Report] = field(default_factory=dict)
    _flat: dict[str, Any] = field(default_factory=dict)
    _paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    _tensors: dict[str, _Tensor] = field(default_factory=dict)
    _leaves: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, states: dict[str, Any]) -> Targets:
        """Flattens the states.

        Raises:
            LoadError: two values would have one key.
        """
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(states)
        except ValueError as error:
            raise LoadError(f"{error}: give the keys of the dict other names.") from error
        targets = cls(states, {key: Report() for key in states})
        targets._flat, targets._paths = planner.state_dict, planner.mappings
        return targets

    def read(self, storage: Storage, options: LoadOptions, others: set[str]) -> None:
        """Reads all that fits into scratch; what does not is in the reports. Changes nothing live.

        Args:
            storage: the checkpoint.
            options: what a load may leave out or convert.
            others: the keys of the dict that are read in another way.
        """
        self._compare_keys(storage, options, others)
        leaves: list[str] = []
        for key in self._flat:
            if key not in storage.entries:
                continue
            report, value, entry = self._report(key), self._flat[key], storage.entries[key]
            if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata):
                self._want(key, value, entry, options)
            elif isinstance(value, Tensor) or isinstance(entry, TensorStorageMetadata):
                saved = "a tensor" if isinstance(entry, TensorStorageMetadata) else "a pickled value"
                report.problems.append(f"{key}: saved as {saved}, here it is a {type(value).__name__}.")
            elif not isinstance(self._container(key), (MutableMapping, list)):
                report.problems.append(f"{key}: what holds it cannot be written to; keep it in a dict or a list.")
            else:
                leaves.append(key)
        for top in self.states:
            self._read_tensors(top, storage)
            self._read_leaves(top, storage, leaves)
        self._compare_shared()

    def _compare_shared(self) -> None:
        """Notes live tensors that share memory, as tied weights do, and would have to take two values."""
        mend = "tie them after the load, or leave one of them out of the dict"
        first: dict[tuple[Any, ...], tuple[str, Tensor, Tensor]] = {}
        for key, one in self._tensors.items():
            if not one.handle.scratch or _incomplete(one):
                continue
            live, value = one.tracked.local, one.handle.scratch[0].tensor()
            view = (live.data_ptr(), live.shape, live.stride(), live.dtype) if live.numel() else (key,)
            other, _, others = first.setdefault(view, (key, live, value))
            if other != key and not torch.equal(_bytes(value), _bytes(others)):
                self._report(key).problems.append(
                    f"{key}: here it is one tensor with {other}, and they were saved with different values; {mend}."
                )
        views = sharing_memory([live for _, live, _ in first.values()])
        keys = [key for key, live, _ in first.values() if id(live) in views]
        for key in keys:
            self._report(key).problems.append(f"{key}: its memory overlaps that of others of {keys}; {mend}.")

    def _compare_keys(self, storage: Storage, options: LoadOptions, others: set[str]) -> None:
        missing: dict[str, list[str]] = {key: [] for key in self.states}
        unused: dict[str, list[str]] = {key: [] for key in self.states}
        for key, path in self._paths.items():
            if key in storage.entries:
                continue
            fresh = isinstance(self._flat[key], Tensor) and options.is_fresh(_name(path))
            (self._report(key).fresh if fresh else missing[str(path[0])]).append(key)
        tops = [*self.states, *others]
        for key in storage.entries:
            top = max((top for top in tops if key == top or key.startswith(f"{top}.")), key=len, default=None)
            if top in unused and key not in self._flat and not options.is_fresh(_name((top, key[len(top) + 1 :]))):
                unused[top].append(key)
        for top, report in self.reports.items():
            report.missing += missing[top]
            report.unused += unused[top]
            if options.strict and missing[top]:
                report.problems.append(
                    f"the checkpoint does not have {say_names(missing[top])}; strict=False keeps what is there."
                )
            if options.strict and unused[top]:
                report.problems.append(
                    f"the checkpoint has {say_names(unused[top])}, which are not here; strict=False leaves them out."
                )

    def _report(self, key: str) -> Report:
        return self.reports[str(self._paths[key][0])]

    def _container(self, key: str) -> Any:
        container: Any = self.states
        for part in self._paths[key][:-1]:
            container = container[_key_in(container, part)]
        return container

    def names(self) -> list[Name]:
        """What the tensors are called, without the keys of the dict."""
        return [_name(path) for key, path in self._paths.items() if isinstance(self._flat[key], Tensor)]

    def _want(self, key: str, value: Tensor, entry: TensorStorageMetadata, options: LoadOptions) -> None:
        report = self._report(key)
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            return
        if isinstance(value, Handle):
            report.problems.append(f"{key}: it is a part of an optimizer's state_dict(); give the optimizer itself.")
            return
        try:
            if not (isinstance(value, DTensor) or type(value) in (Tensor, nn.Parameter)):
                raise PlacementError(f"{key}: a {type(value).__name__} is read by dcp.load only.")
            tracked = track(Name(key), value, optimizer=0, group=0)
        except PlacementError as error:
            report.problems.append(str(error))
            return
        if not can_be_filled(tracked.local):
            report.problems.append(
                f"{key}: it cannot be written to: its elements share memory, or it was made in inference mode; give a "
                "clone of it."
            )
            return
        misfit = _misfit(tracked, entry, options)
        if misfit is None:
            self._tensors[key] = _Tensor(tracked, handle_for(tracked, None), entry.properties.dtype)
        elif options.is_fresh(_name(self._paths[key])):
            report.fresh.append(key)
            report.notes.append(f"{key}: {misfit}. It keeps its values.")
        else:
            report.problems.append(f"{key}: {misfit}.")

    def _read_tensors(self, top: str, storage: Storage) -> None:
        mine = {key: one for key, one in self._tensors.items() if self._paths[key][0] == top}
        with self._reported(top, "tensors"):
            storage.read({key: one.handle for key, one in mine.items()})
            for key, one in mine.items():
                if _incomplete(one):
                    self.reports[top].problems.append(
                        f"{key}: some of its elements are not in the checkpoint, or not as its metadata says."
                    )
                else:
                    self.reports[top].restored.append(key)

    def _read_leaves(self, top: str, storage: Storage, keys: list[str]) -> None:
        with self._reported(top, "values"):
            found, problems = storage.values([key for key in keys if self._paths[key][0] == top])
            self._leaves.update(found)
            self.reports[top].restored += found
            self.reports[top].problems += [
                f"{key}: {problem}; dcp.load would, and would run it. Leave it out of the dict."
                for key, problem in problems.items()
            ]

    @contextlib.contextmanager
    def _reported(self, top: str, what: str) -> Generator[None]:
        """What reading raises becomes a problem; which of the keys it was is not known."""
        try:
            yield
        except Exception as error:
            self.reports[top].problems.append(
                f"reading its {what} failed ({type(error).__name__}: {error}); a file of the checkpoint is damaged or "
                "missing. Load another one."
            )

    def fill(self, top: str) -> Any:
        """Puts what was read for one key of the dict into its state, and returns that."""
        for key, one in self._tensors.items():
            if self._paths[key][0] == top and one.handle.scratch:
                one.tracked.local.detach().copy_(one.handle.scratch[0].tensor())
        for key, value in self._leaves.items():
            if self._paths[key][0] == top:
                container = self._container(key)
                container[_key_in(container, self._paths[key][-1])] = value
        return self.states[top]


def _misfit(tracked: Tracked, entry: TensorStorageMetadata, options: LoadOptions) -> str | None:
    """Why what is saved cannot be copied into a tensor, or None."""
    saved, live = entry.properties.dtype, tracked.local.dtype
    if tuple(entry.size) != tracked.shape:
        return f"saved with shape {tuple(entry.size)}, here it has {tracked.shape}"
    if saved != live and not (options.dtype == "live" and saved.is_floating_point and live.is_floating_point):
        return f"saved as {saved}, here it is {live}; dtype='live' converts floating-point values"
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _incomplete(one: _Tensor) -> bool:
    """Whether not all was read that was to be, in the dtype that the metadata promises."""
    scratch = one.handle.scratch[0] if one.handle.scratch else None
    if scratch is None or scratch.missing() is not None or scratch.wrong_dtype is not None:
        return True
    return bool(scratch.box.volume) and scratch.dtype != one.dtype


def _name(path: tuple[str | int, ...]) -> Name:
    """What a value is called in its state; the key in the dict is no part of that."""
    return Name(canonical(".".join(map(str, path[1:]))))


def _key_in(container: Any, part: str | int) -> Any:
    """The key that DCP has made a string of."""
    if isinstance(container, Mapping) and part not in container:
        return next(key for key in container if str(key) == part)
    return part
