"""One checkpoint directory, read on one rank alone; what is pickled in it is never run."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from shardopt.collector import paused_collector
from shardopt.geometry import Box
from shardopt.portable.handles import BoxHandle, Handle
from shardopt.portable.tagged import NUMPY_SCALARS

__all__ = ["Storage", "foreign", "why_not_read_back"]

_DCP_METADATA = ".metadata"

# A computed lr often is a NumPy scalar, and a random state holds an array. They are pickled as calls of these two
# functions, which run nothing; under numpy 1 they have another module's name.
_SCALAR = np.float64(0).__reduce__()[0]
_ARRAY = np.zeros(0).__reduce__()[0]
_NUMPY: list[Any] = [
    np.dtype,
    np.ndarray,
    (_ARRAY, "numpy.core.multiarray._reconstruct"),
    (_ARRAY, "numpy._core.multiarray._reconstruct"),
    *{type(np.dtype(name)) for name in NUMPY_SCALARS},
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
]


class Storage:
    """An open checkpoint of ``dcp.save``. Without collectives: every rank plans and reads alone.

    Attributes:
        path: its directory.
        entries: what torch's metadata says of each key.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._reader = dcp.FileSystemReader(path)
        # An object for each part of each entry on each rank that has saved: ten times slower with the collector on.
        with paused_collector():
            self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata] = self._metadata.state_dict_metadata

    def read(self, handles: Mapping[str, Handle]) -> None:
        """Fills handles, given by their keys in the checkpoint."""
        self._run(dcp.DefaultLoadPlanner(flatten_state_dict=False), handles)

    def tensors(self, keys: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Whole tensors, on the CPU in memory of their own, and what is wrong with those that are not there."""
        handles: dict[str, BoxHandle] = {}
        dtypes: dict[str, torch.dtype] = {}
        for key in keys:
            entry = self.entries[key]
            if not isinstance(entry, TensorStorageMetadata):
                raise AssertionError(f"{key} is not stored as a tensor")
            shape, dtypes[key] = tuple(entry.size), entry.properties.dtype
            like = torch.empty(shape, dtype=dtypes[key])
            handles[key] = BoxHandle.make(shape, Box.whole(shape), None, like=like, place=lambda tensor: tensor)
        self.read(handles)
        found: dict[str, Tensor] = {}
        problems: dict[str, str] = {}
        for key, handle in handles.items():
            (scratch,) = handle.scratch or [None]
            if scratch is None or scratch.missing() is not None:
                problems[key] = "is incomplete: not all of its elements are in the checkpoint"
            elif scratch.wrong_dtype is not None or scratch.tensor().dtype != dtypes[key]:
                problems[key] = "has another dtype than the checkpoint's metadata says"
            else:
                found[key] = scratch.tensor()
        return found, problems

    def values(self, keys: Iterable[str]) -> tuple[dict[str, object], dict[str, str]]:
        """Pickled values, and what is wrong with those that cannot be had.

        Only what ``torch.load(weights_only=True)`` builds, and NumPy's scalars and arrays: plain values and tensors,
        never a call that a pickle asks for.
        """
        planner = _ValuePlanner()
        self._run(planner, dict.fromkeys(keys))
        return planner.found, planner.problems

    def _run(self, planner: dcp.DefaultLoadPlanner, wanted: Mapping[str, object]) -> None:
        planner.set_up_planner(dict(wanted), self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


class _ValuePlanner(dcp.DefaultLoadPlanner):
    """DCP's own planner unpickles whatever it finds."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.found: dict[str, object] = {}
        self.problems: dict[str, str] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.found[key] = _unpickle(value)
        except Exception as error:
            self.problems[key] = f"is a pickle that is not read ({_reason(error)})"


def why_not_read_back(value: object) -> str | None:
    """Why ``Storage.values`` would not have this value again after a save, in words; None when it would."""
    if isinstance(value, Tensor):
        return None
    pickled = io.BytesIO()
    try:
        torch.save(value, pickled)
    except Exception as error:
        return f"cannot be pickled ({_reason(error)})"
    pickled.seek(0)
    try:
        _unpickle(pickled)
    except Exception as error:
        return f"would be a pickle that is not read back ({_reason(error)})"
    return None


def _unpickle(value: io.BytesIO) -> object:
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(value, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    # The first line says what was refused; the rest is advice to allow it.
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), ''):.200}"


def foreign(path: str | os.PathLike[str]) -> str:
    """What a path that DCP cannot read looks like, in words after the error; empty for nothing known."""
    place = Path(path)
    if place.is_file():
        what = "safetensors" if place.suffix == ".safetensors" else "such as torch.save writes"
        return f" It is a foreign format: a single file, {what}, not a directory of dcp.save."
    if not place.is_dir() or (place / _DCP_METADATA).exists():
        return ""
    names = sorted(child.name for child in place.iterdir())
    if any(name.endswith(".safetensors") for name in names):
        return " It is a foreign format: a directory of safetensors, which hold no optimizer state of dcp.save."
    if any(name.endswith(".distcp") for name in names):
        return f" It has data files and no {_DCP_METADATA}: its save did not finish; load another one."
    return f" It is no checkpoint of dcp.save, which has a {_DCP_METADATA}; it holds {names[:5] or 'nothing'}."
