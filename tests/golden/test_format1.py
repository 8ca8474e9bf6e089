"""The frozen checkpoint of format 1 loads with the values it was saved with, and nothing in it has moved."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardopt.portable.manifest_reader import read_manifest
from tests.golden.frozen import FORMAT1, STEPS, build, spell, train
from tests.support.gather import gathered
from tests.support.ranks import RankPool
from tests.support.tamper import read_tensors

EXPECTED = (FORMAT1 / "expected.json").read_text()

# Key -> dtype and global shape.
KEYS = {
    "optim.manifest": "torch.uint8 (2161,)",
    "optim.state.idle.exp_avg": "torch.uint8 (0,)",
    "optim.state.idle.exp_avg_sq": "torch.uint8 (0,)",
    "optim.state.idle.max_exp_avg_sq": "torch.uint8 (0,)",
    "optim.state.layer.bias.exp_avg": "torch.float32 (5,)",
    "optim.state.layer.bias.exp_avg_sq": "torch.float32 (5,)",
    "optim.state.layer.bias.max_exp_avg_sq": "torch.float32 (5,)",
    "optim.state.layer.weight.exp_avg": "torch.float32 (5, 3)",
    "optim.state.layer.weight.exp_avg_sq": "torch.float32 (5, 3)",
    "optim.state.layer.weight.max_exp_avg_sq": "torch.float32 (5, 3)",
    "optim.state.one.exp_avg": "torch.float32 (1, 2)",
    "optim.state.one.exp_avg_sq": "torch.float32 (1, 2)",
    "optim.state.one.max_exp_avg_sq": "torch.float32 (1, 2)",
}
MANIFEST_SHA256 = "ba3bdcdc007f324cd438f948c40d7a8097ce40b84ba3b5616a38b19cf4c1ba83"
EXPECTED_SHA256 = "fde16e2356c8128893a4feb2fbd55e3abc4dbac605e8dfe0a18dbd1a06f39161"


def load(how: str, warm: bool) -> str:
    """All state of the optimizer after a load, spelled."""
    optimizer, model = build(dist.get_world_size() if dist.is_initialized() else 0)
    if warm:
        train(optimizer, model)
        train(optimizer, model)
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=FORMAT1)
    else:
        optimizer.prepare_load(FORMAT1).commit()
    assert model.idle not in optimizer.state
    assert optimizer.state[model.one]["step"] == STEPS
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    return spell(gathered(optimizer, model))


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("how", ["stock", "path"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_format_1_loads_on_any_number_of_ranks_J5(world_size: int, how: str, warm: bool, ranks: RankPool) -> None:
    assert ranks.run(world_size, load, how, warm) == [EXPECTED] * world_size


def test_format_1_loads_without_a_process_group() -> None:
    assert load("path", False) == load("path", True) == EXPECTED


def test_what_is_expected_of_format_1_was_not_edited() -> None:
    assert hashlib.sha256(EXPECTED.encode()).hexdigest() == EXPECTED_SHA256
    values: dict[str, Any] = json.loads(EXPECTED)
    assert values["state.layer.weight.step"]["bytes"] == "00000040"  # 2.0
    assert values["group.layer.weight.lr"] == {"bytes": "0000803d", "dtype": "torch.float32", "shape": []}  # 1/16
    assert values["group.layer.bias.lr"] == 0.03125
    assert not any(key.startswith("state.idle") for key in values)


def test_format_1_has_these_keys_and_this_manifest() -> None:
    tensors = read_tensors(FORMAT1)
    assert {key: f"{tensor.dtype} {tuple(tensor.shape)}" for key, tensor in sorted(tensors.items())} == KEYS
    manifest = tensors["optim.manifest"].numpy().tobytes()
    assert hashlib.sha256(manifest).hexdigest() == MANIFEST_SHA256
    # What is read and written again is the same bytes: nothing in them is lost on the way.
    assert read_manifest(manifest).to_bytes() == manifest


def resaved(path: str) -> None:
    optimizer, _ = build(dist.get_world_size())
    dcp.load({"optim": optimizer}, checkpoint_id=FORMAT1)
    dcp.save({"optim": optimizer}, checkpoint_id=path)


def test_format_1_is_still_what_is_written(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(2, resaved, str(tmp_path / "again"))
    before, after = read_tensors(FORMAT1), read_tensors(tmp_path / "again")
    manifests = [json.loads(one.pop("optim.manifest").numpy().tobytes()) for one in (before, after)]
    for manifest in manifests:
        del manifest["writer"]
    # Every save has a number of its own, which readers of this format carry along.
    assert len(manifests[1]["extra"].pop("mark")) == 16
    assert manifests[0] == manifests[1]
    assert spell(before) == spell(after)
