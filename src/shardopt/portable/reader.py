"""Reading a checkpoint directory on one rank, manifest first."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardopt.errors import FormatError, LoadError, ShardoptError
from shardopt.layouts.tracked import Tracked
from shardopt.portable.export import handle_for
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import MANIFEST_KEY, blob_key, state_key
from shardopt.portable.manifest import ElementwiseEntry
from shardopt.portable.manifest_reader import read_manifest

__all__ = ["read_checkpoint"]


def read_checkpoint(
    path: str | os.PathLike[str], tracked: Mapping[str, Tracked], *, prefix: str | None = None
) -> dict[str, Handle]:
    """Reads what the checkpoint has for these parameters into scratch. Not collective; touches no live state.

    Args:
        path: directory written by ``dcp.save``.
        tracked: live parameters by FQN.
        prefix: key of the optimizer in the saved dict (``"optim"``); found by itself when there is only one.

    Returns:
        The portable state, its handles filled, ready to be prepared.

    Raises:
        LoadError: the path cannot be read, holds no optimizer of shardopt or several of them, lacks keys that its
            manifest names, or has a manifest that is damaged or of an unknown format version.
    """
    try:
        return _read_all(path, tracked, prefix)
    except ShardoptError:
        raise
    except Exception as error:
        raise LoadError(f"{path}: reading the checkpoint failed: {type(error).__name__}: {error}") from error


def _read_all(path: str | os.PathLike[str], tracked: Mapping[str, Tracked], prefix: str | None) -> dict[str, Handle]:
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    root = _find_prefix(path, metadata, prefix)
    manifest_handle = BytesHandle.of(b"")
    _read(reader, metadata, {root + MANIFEST_KEY: manifest_handle})
    problem = manifest_handle.problem()
    if problem is not None:
        raise LoadError(f"{path}: {MANIFEST_KEY}: {problem}")
    try:
        manifest = read_manifest(manifest_handle.contents().numpy().tobytes())
    except FormatError as error:
        raise LoadError(f"{path}: {error}") from error
    handles: dict[str, Handle] = {}
    for fqn, parameter in manifest.parameters.items():
        live = tracked.get(fqn)
        if live is None:
            continue
        for name, entry in parameter.entries.items():
            if isinstance(entry, ElementwiseEntry):
                handles[state_key(fqn, name)] = handle_for(live, None)
        if parameter.blob is not None:
            handles[blob_key(fqn)] = BytesHandle.of(b"")
    saved = metadata.state_dict_metadata
    lost = [key for key in handles if root + key not in saved]
    if lost:
        raise LoadError(
            f"{path}: the manifest names {len(lost)} entries that the checkpoint does not have: "
            f"{', '.join(lost[:20])}. It is incomplete; load another one.",
            lost,
        )
    # Never read: DCP would unpickle them.
    pickled = [key for key in handles if not isinstance(saved[root + key], TensorStorageMetadata)]
    if pickled:
        raise LoadError(
            f"{path}: {len(pickled)} entries are not stored as tensors but pickled: {', '.join(pickled[:20])}. They "
            "were not written by shardopt; load another checkpoint.",
            pickled,
        )
    _read(reader, metadata, {root + key: handle for key, handle in handles.items()})
    handles[MANIFEST_KEY] = manifest_handle
    return handles


def _read(reader: dcp.FileSystemReader, metadata: Metadata, handles: dict[str, Handle]) -> None:
    # Without collectives: every rank plans and reads alone, and the caller votes on the outcome.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(handles), metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _find_prefix(path: str | os.PathLike[str], metadata: Metadata, prefix: str | None) -> str:
    keys = metadata.state_dict_metadata
    ending = "." + MANIFEST_KEY
    roots = [
        key.removesuffix(MANIFEST_KEY)
        for key, entry in keys.items()
        if (key == MANIFEST_KEY or key.endswith(ending)) and isinstance(entry, TensorStorageMetadata)
    ]
    if prefix is not None:
        root = prefix + "." if prefix else ""
        if root in roots:
            return root
        raise LoadError(f"{path}: no optimizer of shardopt is saved under {prefix!r}; found {roots or 'none'}.")
    if len(roots) == 1:
        return roots[0]
    if not roots:
        raise LoadError(
            f"{path}: no optimizer of shardopt is saved here (no {MANIFEST_KEY!r} among its {len(keys)} keys). Save "
            "ShardedStateOptimizer itself in the dict given to dcp.save."
        )
    raise LoadError(f"{path}: {len(roots)} optimizers are saved here, under {roots}; pass prefix=.")
