"""Reading a checkpoint directory on one rank, manifest first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardopt.errors import FormatError, LoadError, ShardoptError
from shardopt.layouts.tracked import Keeping, Tracked
from shardopt.portable.export import handle_for
from shardopt.portable.grid_handles import codes_handle, scales_handle
from shardopt.portable.handles import BytesHandle, Handle
from shardopt.portable.keys import MANIFEST_KEY, blob_key, rank_keys, scale_key, state_key
from shardopt.portable.manifest import ElementwiseEntry, Manifest, PerRankEntry
from shardopt.portable.manifest_reader import read_manifest
from shardopt.portable.matching import match_names
from shardopt.portable.segments import BlockwiseEntry
from shardopt.portable.storage import Storage, foreign
from shardopt.portable.torch_format import read_torch_format, torch_roots

__all__ = ["read_checkpoint"]


def read_checkpoint(
    path: str | os.PathLike[str] | Storage,
    tracked: Mapping[str, Tracked],
    *,
    prefix: str | None = None,
    own_index: int = 0,
) -> dict[str, Handle]:
    """Reads what the checkpoint has for these parameters into scratch. Not collective; touches no live state.

    Args:
        path: directory written by ``dcp.save``, of a wrapped optimizer or of what torch's ``get_optimizer_state_dict``
            returned for an unwrapped one; or one that is open.
        tracked: live parameters by FQN.
        own_index: whose state is read where every rank has saved its own.
        prefix: key of the optimizer in the saved dict (``"optim"``); found by itself when there is only one.

    Returns:
        The portable state, its handles filled, ready to be prepared.

    Raises:
        LoadError: the path cannot be read, holds no optimizer or several of them, lacks keys that its manifest names,
            or has a manifest that is damaged or of an unknown format version.
    """
    try:
        return _read_all(path, tracked, prefix, own_index)
    except ShardoptError:
        raise
    except Exception as error:
        place = path.path if isinstance(path, Storage) else path
        raise LoadError(
            f"{place}: reading the checkpoint failed: {type(error).__name__}: {error}{foreign(place)}"
        ) from error


def _read_all(
    path: str | os.PathLike[str] | Storage, tracked: Mapping[str, Tracked], prefix: str | None, own_index: int
) -> dict[str, Handle]:
    storage = path if isinstance(path, Storage) else Storage(path)
    own = [
        key.removesuffix(MANIFEST_KEY)
        for key, entry in storage.entries.items()
        if (key == MANIFEST_KEY or key.endswith("." + MANIFEST_KEY)) and isinstance(entry, TensorStorageMetadata)
    ]
    # Below an own root they are parameters' names.
    others = [root for root in torch_roots(storage) if not any(root.startswith(one) for one in own)]
    root = _choose_root(storage, [*own, *others], prefix)
    return _read_own(storage, root, tracked, own_index) if root in own else read_torch_format(storage, root, tracked)


def _read_manifest(storage: Storage, root: str) -> tuple[BytesHandle, Manifest]:
    handle = BytesHandle.of(b"")
    storage.read({root + MANIFEST_KEY: handle})
    problem = handle.problem()
    if problem is not None:
        raise LoadError(f"{storage.path}: {MANIFEST_KEY}: {problem}")
    try:
        return handle, read_manifest(handle.contents().numpy().tobytes())
    except FormatError as error:
        raise LoadError(f"{storage.path}: {error}") from error


def _read_own(storage: Storage, root: str, tracked: Mapping[str, Tracked], own_index: int) -> dict[str, Handle]:
    path = storage.path
    manifest_handle, manifest = _read_manifest(storage, root)
    handles, stored_as = _wanted(tracked, manifest, own_index)
    saved = storage.entries
    lost = [key for key in stored_as.values() if root + key not in saved]
    if lost:
        raise LoadError(
            f"{path}: the manifest names {len(lost)} entries that the checkpoint does not have: "
            f"{', '.join(lost[:20])}. It is incomplete; load another one.",
            lost,
        )
    # Never read: DCP would unpickle them.
    pickled = [key for key in stored_as.values() if not isinstance(saved[root + key], TensorStorageMetadata)]
    if pickled:
        raise LoadError(
            f"{path}: {len(pickled)} entries are not stored as tensors but pickled: {', '.join(pickled[:20])}. They "
            "were not written by shardopt; load another checkpoint.",
            pickled,
        )
    # Parameters that were tied when they were saved want the same entries, and one read fills each once.
    rest = dict(stored_as)
    while rest:
        once = {saved_key: key for key, saved_key in reversed(rest.items())}
        storage.read({root + saved_key: handles[key] for saved_key, key in once.items()})
        for key in once.values():
            del rest[key]
    handles[MANIFEST_KEY] = manifest_handle
    return handles


def _wanted(
    tracked: Mapping[str, Tracked], manifest: Manifest, own_index: int
) -> tuple[dict[str, Handle], dict[str, str]]:
    """Handles for all that is to be read, and the key under which each is stored."""
    handles: dict[str, Handle] = {}
    stored_as: dict[str, str] = {}
    for fqn, saved_fqn in match_names(tracked, manifest).saved_as.items():
        if tracked[fqn].keeping is Keeping.ELSEWHERE:
            continue
        parameter = manifest.parameters[saved_fqn]
        for name, entry in parameter.entries.items():
            if isinstance(entry, ElementwiseEntry):
                handles[state_key(fqn, name)] = handle_for(tracked[fqn], None)
                stored_as[state_key(fqn, name)] = state_key(saved_fqn, name)
            elif isinstance(entry, BlockwiseEntry):
                handles[state_key(fqn, name)] = codes_handle(tracked[fqn], None, None, [])
                stored_as[state_key(fqn, name)] = state_key(saved_fqn, name)
                handles[scale_key(fqn, name)] = scales_handle(tracked[fqn], None, None, [])
                stored_as[scale_key(fqn, name)] = scale_key(saved_fqn, name)
            elif isinstance(entry, PerRankEntry) and own_index < manifest.world_size:
                for key, saved_key in zip(rank_keys(own_index, fqn), rank_keys(own_index, saved_fqn), strict=True):
                    handles[key] = BytesHandle.of(b"")
                    stored_as[key] = saved_key
        if parameter.blob is not None:
            handles[blob_key(fqn)] = BytesHandle.of(b"")
            stored_as[blob_key(fqn)] = blob_key(saved_fqn)
    return handles, stored_as


def _choose_root(storage: Storage, roots: Sequence[str], prefix: str | None) -> str:
    """What the keys of the optimizer that is meant begin with."""
    names = [root.removesuffix(".") for root in roots]
    if prefix is not None:
        if prefix in names:
            return roots[names.index(prefix)]
        raise LoadError(
            f"{storage.path}: no optimizer of shardopt is saved under {prefix!r}, nor one in torch's format; found "
            f"{names or 'none'}."
        )
    if len(roots) == 1:
        return roots[0]
    if roots:
        raise LoadError(f"{storage.path}: {len(roots)} optimizers are saved here, under {names}; pass prefix=.")
    keys = storage.entries
    found = sorted({key.partition(".")[0] for key in keys})
    raise LoadError(
        f"{storage.path}: no optimizer of shardopt is saved here (no {MANIFEST_KEY!r} among its {len(keys)} keys), nor "
        f"one in torch's format (no 'param_groups'). Its keys begin with {', '.join(found[:10]) or 'nothing'}. Save "
        "ShardedStateOptimizer itself in the dict given to dcp.save."
    )
