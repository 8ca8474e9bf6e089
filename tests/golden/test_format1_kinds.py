"""The second frozen checkpoint of format 1: whole, quantised and each rank's own state, and every typed value."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import LoadError
from shardopt.portable.manifest_reader import read_manifest
from tests.golden.frozen import spell
from tests.golden.frozen_kinds import FOLDER, SHAPES, make, told
from tests.golden.kinds import numbers
from tests.support.ranks import RankPool
from tests.support.tamper import read_tensors

# Of each rank's own state there is none for other ranks.
ANYWHERE = ["whole", "drawn", "coded"]
LAYOUTS = {"elementwise", "absent", "value", "whole", "per_rank", "blockwise"}
TAGS = [
    *("int", "float", "complex", "str", "bytes", "tuple", "size", "set", "frozenset", "deque", "dict"),
    *("dtype", "device", "tensor", "numpy", "object", "leaf"),
]
# Codes, how many of them are in a byte, and whether shards have blocks of their own.
FORMS = {
    ("int8", 1, False),
    ("uint8", 2, False),
    (None, 1, False),
    ("int8", 1, True),
    ("uint8", 1, True),
}
EXPECTED_SHA256: dict[str, str] = {
    "whole": "ee2450e335b03d30afb9a2bfd2b1c9daae69d0590e7117e2adb8cf5b4060b605",
    "drawn": "65b81600596ac81a2c152396c2ca3a956812f4ca7e3030770f7080c0a103c333",
    "coded": "0e7a5fcebb281632dab3fc209e778a2cc6bd60ed65fc0e23d3455d69125b8ea2",
    "own": "8908512ceaf89e7b959bad71a0db72d6cb678c0bf96f3f8cc86575da7c5e0f2b",
}
KEYS_SHA256 = "9738bec163715e00692f09f491144ba5d0977caa2c88df196323fcedc087ec55"
MANIFEST_SHA256: dict[str, str] = {
    "whole": "09897ae13780ab949d22a06dcbba98db636159063c2eba4c5426bb74e5ce1c34",
    "drawn": "9ca7e21032182f3fbc53ad5e6f5f5a3d07d8f9d67bcedb19b026bd3e93c93d45",
    "coded": "5c274a92ab9a2d3072d68f67fbf4a16edb8dea208b60f1fdaa38e831964f8d07",
    "own": "dd7eb755917aca0572fa5790e31bebd45f581b9147b357b326db5727caf14708",
}


def load(key: str, how: str, warm: bool) -> str:
    """All that the ranks hold after a load."""
    optimizer, model = make(key, filled=warm)
    if how == "stock":
        dcp.load({key: optimizer}, checkpoint_id=FOLDER)
    else:
        optimizer.prepare_load(FOLDER, prefix=key, finite="report").commit()
    return told(optimizer, model, key)


def expected(key: str) -> str:
    return (FOLDER / f"{key}.json").read_text()


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("how", ["stock", "path"])
@pytest.mark.parametrize("key", ANYWHERE)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_of_format_1_loads_on_any_number_of_ranks_J5(
    world_size: int, key: str, how: str, warm: bool, ranks: RankPool
) -> None:
    assert ranks.run(world_size, load, key, how, warm) == [expected(key)] * world_size


@pytest.mark.parametrize("key", ANYWHERE)
def test_every_layout_of_format_1_loads_without_a_process_group(key: str) -> None:
    assert load(key, "path", False) == expected(key)


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("how", ["stock", "path"])
def test_what_is_each_ranks_own_in_format_1_loads_on_the_same_ranks(how: str, warm: bool, ranks: RankPool) -> None:
    assert ranks.run(2, load, "own", how, warm) == [expected("own")] * 2


def refused() -> str:
    with pytest.raises(LoadError) as caught:
        load("own", "path", False)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_is_each_ranks_own_in_format_1_is_refused_on_others(world_size: int, ranks: RankPool) -> None:
    for said in ranks.run(world_size, refused):
        assert "written by ranks 0 to 1 for their shards" in said


def test_what_is_expected_of_every_layout_was_not_edited() -> None:
    found = {key: hashlib.sha256(expected(key).encode()).hexdigest() for key in SHAPES}
    assert found == EXPECTED_SHA256
    values: dict[str, Any] = json.loads(expected("coded"))
    assert values["state.cut"]["values"][:4] == [-127.0, -90.0, -53.0, -16.0]
    assert values["state.cut_pairs"]["values"][:4] == [-7.0, 0.0, 7.0, -1.0]
    assert "state.idle" not in values


def test_the_checkpoint_has_every_layout_tag_and_form_of_format_1() -> None:
    manifests = [json.loads(raw.decode()) for raw in _manifests(read_tensors(FOLDER)).values()]
    entries = [
        entry for one in manifests for param in one["parameters"].values() for entry in param["entries"].values()
    ]
    assert {entry["layout"] for entry in entries} == LAYOUTS
    text = json.dumps(manifests)
    assert [tag for tag in TAGS if f'"!": "{tag}"' not in text] == []
    blockwise = [entry for entry in entries if entry["layout"] == "blockwise"]
    assert {(one["codes"], one["per_byte"], bool(one["segments"])) for one in blockwise} == FORMS
    assert {key for one in manifests for key in one["extra"]} == {"beside", "draws", "mark", "tables"}


def test_every_key_and_manifest_of_the_checkpoint_is_known() -> None:
    tensors = read_tensors(FOLDER)
    keys = {key: f"{tensor.dtype} {tuple(tensor.shape)}" for key, tensor in sorted(tensors.items())}
    assert hashlib.sha256(json.dumps(keys).encode()).hexdigest() == KEYS_SHA256
    for key, raw in _manifests(tensors).items():
        assert hashlib.sha256(raw).hexdigest() == MANIFEST_SHA256[key]
        assert read_manifest(raw).to_bytes() == raw


def _manifests(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {key: tensors[f"{key}.manifest"].numpy().tobytes() for key in SHAPES}


def test_between_values_of_a_blob_there_are_zeros_up_to_a_multiple_of_64() -> None:
    blob = read_tensors(FOLDER)["whole.blob.other"]
    assert blob[: 7 * 4].view(torch.float32).tolist() == numbers((3, 7), 9).sum(0).tolist()
    assert not blob[7 * 4 : 64].any()
    assert blob[64:].view(torch.float32).tolist() == numbers((3, 7), 9).sum(1).tolist()


def resaved(path: str, how: str) -> None:
    """Made again from the start, or loaded and saved; all in one checkpoint."""
    made = {key: make(key, filled=how == "made")[0] for key in SHAPES}
    if how == "loaded":
        dcp.load(dict(made), checkpoint_id=FOLDER)
    dcp.save(dict(made), checkpoint_id=path)


@pytest.mark.parametrize("how", ["made", "loaded"])
def test_every_layout_of_format_1_is_still_what_is_written(how: str, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, resaved, str(tmp_path / "again"), how)
    before, after = read_tensors(FOLDER), read_tensors(tmp_path / "again")
    assert sorted(before) == sorted(after)
    for key in SHAPES:
        manifests = [json.loads(one.pop(f"{key}.manifest").numpy().tobytes()) for one in (before, after)]
        for manifest in manifests:
            del manifest["writer"]
            assert len(manifest["extra"].pop("mark")) == 16
        # As text: the order of what a dict of the state holds is part of it.
        assert json.dumps(manifests[0]) == json.dumps(manifests[1])
    different = [key for key in before if spell({key: before[key]}) != spell({key: after[key]})]
    assert different == []
