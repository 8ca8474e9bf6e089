"""What ``shardopt.save`` leaves in a directory, in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardopt
from shardopt import ShardoptError
from shardopt.checkpoint.files import Writer

MODEL = nn.Linear(1, 1)


def names(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir())


def values(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"tensor": torch.zeros(3), "number": 0}
    shardopt.load(state, path)
    return state


def tensors(value: int) -> dict[str, Any]:
    return {"tensor": torch.full((3,), float(value)), "number": value}


@pytest.mark.parametrize("before", ["shardopt", "dcp"])
def test_a_checkpoint_that_was_replaced_leaves_no_file_T5(before: str, tmp_path: Path) -> None:
    if before == "dcp":
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(tensors(1), checkpoint_id=tmp_path)
    else:
        shardopt.save(tensors(1), tmp_path)
    (tmp_path / "notes.distcp.txt").write_text("the user's own")
    shardopt.save(tensors(2), tmp_path)
    assert values(tmp_path)["number"] == 2
    assert len(names(tmp_path)) == 3
    assert {".metadata", "notes.distcp.txt"} < set(names(tmp_path))


def test_metadata_is_replaced_and_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardopt.save(tensors(1), tmp_path)
    seen: list[bool] = []
    genuine = Path.rename

    def rename(self: Path, target: Path) -> Path:
        seen.append((tmp_path / ".metadata").exists())
        return genuine(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    shardopt.save(tensors(2), tmp_path)
    assert seen == [True]


@pytest.mark.parametrize("method", ["write_data", "finish"])
def test_a_save_that_fails_leaves_what_was_there_H11(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardopt.save(tensors(1), tmp_path)
    before = names(tmp_path)

    def fail(*args: Any) -> None:
        if method == "write_data":
            (tmp_path / f"{args[1].storage_data.prefix}0.distcp").write_bytes(b"part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, method, fail)
    with pytest.raises(OSError, match="No space left"):
        shardopt.save(tensors(2), tmp_path)
    assert names(tmp_path) == before
    assert values(tmp_path)["number"] == 1


def test_an_interrupt_after_the_new_checkpoint_is_there_destroys_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardopt.save(tensors(1), tmp_path)
    genuine = Writer.finish

    def interrupted(self: Writer, *args: Any) -> None:
        genuine(self, *args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Writer, "finish", interrupted)
    # As a training process has it: a shell's background jobs, these tests among them, ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            shardopt.save(tensors(2), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert values(tmp_path)["number"] == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Path("x"), "nested.value: a PosixPath would be a pickle that is not read back"),
        (nn.Linear(1, 1), "nested.value: a Linear would be a pickle that is not read back"),
        (lambda: 1, "nested.value: a function cannot be pickled"),
    ],
)
def test_values_that_no_load_would_read_are_refused(value: object, text: str, tmp_path: Path) -> None:
    with pytest.raises(ShardoptError, match=text):
        shardopt.save({"nested": {"value": value}, "number": 1}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1], "x"), TypeError, "state is a list"),
        (({1: 2}, "x"), TypeError, "keys of the dict must be strings"),
        (({"a": MODEL, "b": MODEL}, "x"), ValueError, "'a' and 'b' are the same Linear"),
        (({}, "s3://bucket/x"), ValueError, "not in a file system"),
        (({}, b"x"), TypeError, "must be a str or a Path"),
    ],
)
def test_arguments_are_checked(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    for function in (shardopt.save, shardopt.load):
        with pytest.raises(error, match=text):
            function(*arguments)


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_a_deadline_is_positive(timeout_s: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a positive number of seconds"):
        shardopt.save({}, tmp_path, timeout_s=timeout_s)
