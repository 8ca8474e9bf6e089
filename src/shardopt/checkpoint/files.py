"""The files of a save: never written over another save's, and gone again when it fails."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["Writer"]

_LOG = logging.getLogger(__name__)
_METADATA = ".metadata"
# A data file's name, ours or DCP's own, as it is spelled in the metadata. That is a pickle, and is not run to be asked.
_DATA_FILE = re.compile(rb"__\w+\.distcp")


class _AtomicFileSystem(FileSystem):
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Leaves the old metadata, which ``finish`` removes before it renames; renaming replaces it in one step."""


class Writer(FileSystemWriter):
    """DCP's own writer, except that what is in the directory stays valid until ``finish`` has replaced the metadata.

    Data files are ``__<16 hex digits>_<index>_<n>.distcp``: the digits are this save's, the index a rank's place among
    those that save.

    Attributes:
        directory: where the checkpoint goes.
        prefix: what this rank's data files begin with; empty before there is a plan.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fs = _AtomicFileSystem()
        self.directory = Path(path)
        self.prefix = ""
        self._replaced: set[str] = set()

    @property
    def _metadata_path(self) -> Path:
        return self.directory / _METADATA

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan; the directory is made when all ranks have one, and nothing in it is overwritten."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives each rank's files a prefix that no other save has."""
        save = secrets.token_hex(8)
        prepared: list[SavePlan] = []
        for index, plan in enumerate(super().prepare_global_plan(plans)):
            storage = dataclasses.replace(plan.storage_data, prefix=f"__{save}_{index}_")
            # Every rank knows the names that its dict is flattened to.
            prepared.append(dataclasses.replace(plan, storage_data=storage, planner_data=None))
        return prepared

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's data files and waits until they are on storage."""
        self.prefix = plan.storage_data.prefix
        self.directory.mkdir(parents=True, exist_ok=True)
        # A file without items would be in no metadata, and stay for ever.
        return self.write_data(plan, planner).wait() if plan.items else []

    def publish(self, metadata: Metadata, results: Sequence[list[WriteResult]]) -> None:
        """On one rank: makes the new checkpoint the one in the directory, in one step."""
        if self._metadata_path.exists():
            self._replaced = _data_files(self._metadata_path)
        self.finish(metadata, list(results))
        _sync(self.directory)

    def is_published(self) -> bool:
        """On the rank that publishes: whether the checkpoint in the directory is this save's, whatever was raised."""
        try:
            return bool(self.prefix) and self._save_prefix.encode() in self._metadata_path.read_bytes()
        except OSError:
            return False

    def remove_replaced(self) -> None:
        """On the rank that publishes: removes the data files of the checkpoint that was replaced."""
        _remove(self.directory / name for name in self._replaced - _data_files(self._metadata_path))

    def discard(self, *, of_all: bool) -> None:
        """Removes the files of a save that has failed, this rank's own or all ranks'; never raises an OSError."""
        if not self.prefix:
            return
        pattern = self._save_prefix if of_all else self.prefix
        _remove(self.directory.glob(f"{pattern}*.distcp"))
        if of_all:
            _remove([self.directory / f"{_METADATA}.tmp"])

    @property
    def _save_prefix(self) -> str:
        return self.prefix.rsplit("_", 2)[0] + "_"


def _data_files(metadata: Path) -> set[str]:
    return {name.decode() for name in _DATA_FILE.findall(metadata.read_bytes())}


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("%s could not be removed and belongs to no checkpoint any more: %s", file, error)


def _sync(directory: Path) -> None:
    """Makes a rename in the directory last through a power failure, where the file system can do that."""
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # The checkpoint is there, for every rank to see, so its save has not failed.
        _LOG.warning("%s: the save is complete, but would not survive a power failure now: %s", directory, error)
