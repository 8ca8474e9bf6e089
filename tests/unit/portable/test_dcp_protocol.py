"""What stock DCP calls on a handle, and in which order: each test here fails first when torch changes that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardopt.geometry import Box
from shardopt.portable.handles import BoxHandle, BytesHandle, Handle, _SavedSize
from shardopt.portable.scratch import _Target

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SHAPE = (7, 4)


def handle_of(tensor: torch.Tensor | None, *, shape: tuple[int, ...] = SHAPE) -> BoxHandle:
    return BoxHandle.make(shape, Box.whole(shape), tensor, like=torch.zeros(shape), place=lambda local: local)


def values() -> torch.Tensor:
    return torch.arange(28.0).reshape(SHAPE)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that DCP calls, in order."""
    noted: list[str] = []

    def spy(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def noting(self: Any, *arguments: Any, **options: Any) -> Any:
            noted.append(name)
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, name, noting)

    for name in ("size", "__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        spy(Handle, name)
    spy(_SavedSize, "__ne__")
    for name in ("narrow", "detach", "copy_"):
        spy(_Target, name)
    return noted


def test_a_save_asks_for_write_items_and_then_for_the_tensors(calls: list[str], tmp_path: Path) -> None:
    dcp.save({"x": handle_of(values())}, checkpoint_id=tmp_path)
    assert [name for name in calls if name != "size"] == ["__create_write_items__", "__get_tensor_shard__"]
    entry = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["x"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (tuple(entry.size), entry.properties.dtype) == (SHAPE, torch.float32)
    # Stock torch reads it back as a plain tensor.
    plain = {"x": torch.zeros(SHAPE)}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert torch.equal(plain["x"], values())


def test_a_load_compares_sizes_before_it_asks_for_chunks_and_copies_into_targets(
    calls: list[str], tmp_path: Path
) -> None:
    saved = handle_of(values())
    saved._fill([values()[:3], values()[3:]], [(0, 0), (3, 0)])
    dcp.save({"x": saved}, checkpoint_id=tmp_path)
    calls.clear()
    handle = handle_of(None)
    dcp.load({"x": handle}, checkpoint_id=tmp_path)
    first_size, compared = calls.index("size"), calls.index("__ne__")
    assert first_size < compared < calls.index("__create_chunk_list__") < calls.index("__get_tensor_shard__")
    # Two chunks were saved; each is copied into its part of the target.
    each_chunk = ["__get_tensor_shard__", "narrow", "detach", "copy_"]
    assert calls[calls.index("__get_tensor_shard__") :] == each_chunk * 2
    assert handle.saved_size == SHAPE
    (scratch,) = handle.scratch or ()
    assert scratch.missing() is None
    assert torch.equal(scratch.tensor(), values())


def test_dcp_refuses_another_size_of_a_plain_tensor_and_a_handle_remembers_it(tmp_path: Path) -> None:
    dcp.save({"x": values(), "y": values()}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"x": torch.zeros(7, 5)}, checkpoint_id=tmp_path)
    wrong, right = handle_of(None, shape=(7, 5)), handle_of(None)
    dcp.load({"x": wrong, "y": right}, checkpoint_id=tmp_path)
    assert wrong.saved_size == SHAPE
    assert wrong.scratch == []
    assert right.scratch


@pytest.mark.parametrize("saved", [b"", b"abc", b"0123456789"])
def test_bytes_of_any_length_come_back(saved: bytes, tmp_path: Path) -> None:
    dcp.save({"x": BytesHandle.of(saved)}, checkpoint_id=tmp_path)
    handle = BytesHandle.of(b"other")
    dcp.load({"x": handle}, checkpoint_id=tmp_path)
    assert handle.was_read
    assert handle.contents().numpy().tobytes() == saved


def test_an_absent_entry_is_saved_under_its_key_and_told_from_a_present_one(tmp_path: Path) -> None:
    dcp.save({"x": handle_of(None), "y": handle_of(values())}, checkpoint_id=tmp_path)
    into = {"x": handle_of(torch.zeros(SHAPE)), "y": handle_of(None)}
    dcp.load(into, checkpoint_id=tmp_path)
    assert (into["x"].saved_size, into["x"].scratch) == ((0,), [])
    assert into["y"].saved_size == SHAPE
    (scratch,) = into["y"].scratch or ()
    assert torch.equal(scratch.tensor(), values())


def test_a_key_the_checkpoint_lacks_is_dcps_error(tmp_path: Path) -> None:
    # So the keys of the portable state may not depend on what has happened in training.
    dcp.save({"x": handle_of(None)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: y"):
        dcp.load({"x": handle_of(None), "y": handle_of(None)}, checkpoint_id=tmp_path)


def test_a_checkpoint_exception_is_no_exception() -> None:
    assert not issubclass(CheckpointException, Exception)
