"""Damaging checkpoints, in one process: copies of good ones with something removed, changed or cut off."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

__all__ = ["cut_chunks", "read_tensors", "rewritten", "with_manifest", "write_tensors"]

MANIFEST = "optim.manifest"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its flat key, whole, read by torch alone."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {}
    for key, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{path}: {key!r} is pickled, not a tensor")
        found[key] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
    with _one_process():
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A checkpoint with these tensors, written by torch alone."""
    with _one_process():
        dcp.save(tensors, checkpoint_id=path, no_dist=True)


@contextmanager
def _one_process() -> Iterator[None]:
    # DCP warns of what it was asked for.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def rewritten(source: Path, target: Path) -> Iterator[dict[str, Tensor]]:
    """``target`` is ``source`` with what the block does to its tensors."""
    tensors = read_tensors(source)
    yield tensors
    write_tensors(tensors, target)


def with_manifest(tensors: dict[str, Tensor], change: Callable[[Any], Any], *, key: str = MANIFEST) -> None:
    """Replaces the manifest by what ``change`` returns: bytes, or a JSON tree."""
    made = change(json.loads(tensors[key].numpy().tobytes()))
    data = made if isinstance(made, bytes) else json.dumps(made, separators=(",", ":")).encode()
    tensors[key] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def cut_chunks(
    source: Path, target: Path, key: str, *, keep: Callable[[list[ChunkStorageMetadata]], list[ChunkStorageMetadata]]
) -> None:
    """``target`` is ``source`` with only some of the chunks that its metadata lists for ``key``."""
    shutil.copytree(source, target)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata[key]
    entry.chunks = keep(list(entry.chunks))
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
