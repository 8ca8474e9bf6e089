"""What a directory may be called and hold, which options there are, and loads beside saves that have not ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import shardopt
from shardopt import LoadError, ShardedStateOptimizer
from shardopt.checkpoint.files import Writer
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot

# DCP says so without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def parts(number: float, *, steps: int = 1) -> dict[str, Any]:
    torch.manual_seed(int(number))
    model = nn.Linear(3, 2)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=number / 8), model)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.full_like(param, number)
        optimizer.step()
    return {"model": model, "optim": optimizer, "number": number}


def values(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: value.clone() for name, value in state["model"].state_dict().items()}
    for name, param in state["model"].named_parameters():
        found.update({f"{name}/{key}": value.clone() for key, value in state["optim"].state.get(param, {}).items()})
    return {**found, "number": state["number"], "lr": state["optim"].param_groups[0]["lr"]}


def loaded(path: Path) -> dict[str, Any]:
    state = parts(7.0, steps=0)
    shardopt.load(state, path)
    return values(state)


ODD_NAMES = [
    ".metadata",
    ".metadata.tmp",
    "__0_0.distcp",
    "__0123456789abcdef_0_0.distcp",
    "model.safetensors",
    "checkpoint/pytorch_model_fsdp_0/optimizer",
    "state.optim/tmp/latest",
    "run [a-b]*? {x} %s",
    "ein Käse\n",
    "-rf",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_nothing_is_read_from_the_names_of_directories_H18(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / name / "step-1"
    first, second = parts(1.0), parts(2.0)
    shardopt.save(first, place)
    assert value_differences(values(first), loaded(place)) == []

    def fail(*args: Any) -> None:
        raise OSError("on purpose")

    # Files of this save are looked for and removed; those of the one before stay.
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "finish", fail)
        with pytest.raises(OSError, match="on purpose"):
            shardopt.save(second, place)
    assert len(list(place.iterdir())) == 2
    shardopt.save(second, place)
    assert len(list(place.iterdir())) == 2
    assert value_differences(values(second), loaded(place)) == []
    other = parts(7.0, steps=0)
    other["optim"].prepare_load(place).commit()
    dcp.load({"model": other["model"]}, checkpoint_id=place)
    assert value_differences(values(second), values(other) | {"number": 2.0}) == []


@pytest.mark.parametrize("options", [{"async_save": True}, {"keep": 1}, {"no_dist": True}], ids=str)
def test_a_save_with_an_option_that_is_not_known_overwrites_nothing_H10(
    options: dict[str, Any], tmp_path: Path
) -> None:
    first = parts(1.0)
    shardopt.save(first, tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError, match=next(iter(options))):
        shardopt.save(parts(2.0), tmp_path, **options)
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError, match=next(iter(options))):
        shardopt.load(parts(2.0), tmp_path, **options)
    assert value_differences(values(first), loaded(tmp_path)) == []


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Torch's writer tells that all but the metadata is written, and ends no save before it is told to."""
    written, event = threading.Event(), threading.Event()
    finish = FileSystemWriter.finish

    def late(self: FileSystemWriter, *args: Any, **options: Any) -> None:
        written.set()
        assert event.wait(60.0)
        finish(self, *args, **options)

    monkeypatch.setattr(FileSystemWriter, "finish", late)
    yield written, event
    event.set()


@pytest.mark.parametrize("load", [shardopt.load, lambda state, path: state["optim"].prepare_load(path).commit()])
def test_a_load_before_an_asynchronous_save_has_ended_is_refused_H6(
    load: Callable[..., object], held_back: tuple[threading.Event, threading.Event], tmp_path: Path
) -> None:
    first, other = parts(1.0), parts(7.0, steps=0)
    written, to_end = held_back
    future = dcp.async_save(first, checkpoint_id=tmp_path)
    assert written.wait(60.0)
    before = snapshot(other["optim"], other["model"])
    with pytest.raises(LoadError, match="its save did not finish"):
        load(other, tmp_path)
    assert before.diff(snapshot(other["optim"], other["model"])) == []
    to_end.set()
    future.result()  # pyrefly: ignore[missing-attribute]
    assert value_differences(values(first), loaded(tmp_path)) == []


def test_a_load_while_a_checkpoint_is_replaced_reads_the_old_one_whole_H6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = parts(1.0), parts(2.0)
    shardopt.save(first, tmp_path)
    found: list[dict[str, Any]] = []
    for method in ("write_data", "finish"):
        genuine = getattr(Writer, method)

        def beside(self: Writer, *args: Any, genuine: Callable[..., Any] = genuine) -> Any:
            found.append(loaded(tmp_path))
            result = genuine(self, *args)
            found.append(loaded(tmp_path))
            return result

        monkeypatch.setattr(Writer, method, beside)
    shardopt.save(second, tmp_path)
    *during, after = found
    assert [value_differences(values(first), one) for one in during] == [[]] * 3
    assert value_differences(values(second), after) == []


def test_names_of_what_is_saved_are_no_names_of_files_S3(tmp_path: Path) -> None:
    place = tmp_path / "in" / "checkpoint"
    state = {"../out": {"/etc": torch.ones(2), "a/../../b": 1}, "../../x": torch.ones(1)}
    shardopt.save(state, place)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in place.parent.iterdir()] == ["checkpoint"]
    # The manifest goes where the checkpoint goes: what it says names no file.
    shardopt.save(parts(1.0), place)
    manifest = b"".join(path.read_bytes() for path in place.glob("*.distcp"))
    assert b"distcp" not in manifest
    assert str(tmp_path).encode() not in manifest
    moved = place.rename(tmp_path / "moved")
    assert value_differences(values(parts(1.0)), loaded(moved)) == []


@pytest.mark.parametrize("folder", ["../victim", "..", "{root}/victim", "{root}"])
def test_a_save_removes_nothing_outside_of_its_directory_S3(folder: str, tmp_path: Path) -> None:
    """The files of a checkpoint that is replaced are those that its metadata names, whoever wrote that."""
    victim, place = tmp_path / "victim", tmp_path / "checkpoint"
    for made in (victim, place):
        made.mkdir()
    others = [victim / "__0_0.distcp", tmp_path / "__0_0.distcp"]
    for file in (*others, place / ".metadata"):
        file.write_text(f"'{folder.format(root=tmp_path)}/__0_0.distcp'")
    shardopt.save(parts(1.0), place)
    assert all(file.exists() for file in others)
    assert value_differences(values(parts(1.0)), loaded(place)) == []
