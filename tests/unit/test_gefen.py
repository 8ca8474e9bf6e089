"""Gefen-X in one process: what its adapter refuses, and loads that change what it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardopt import LoadError, PlacementError, PresentationError, ShardedStateOptimizer
from shardopt.layouts.codec import codec_of
from shardopt.portable.handles import BytesHandle
from tests.ranks.quantised_runs import drawn, make

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

SHAPES = {"a": (8, 12), "b": (40,)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(drawn(name, shape, 0)))


def wrapped(steps: int, kind: str = "gefen-blocks") -> tuple[Net, ShardedStateOptimizer]:
    model = Net()
    optimizer = ShardedStateOptimizer(make(kind, model.parameters()), model)
    for number in range(steps):
        step(model, optimizer, number + 1)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for name, param in model.named_parameters():
        param.grad = drawn(name, param.shape, number)
    optimizer.step()


@pytest.mark.parametrize("kind", ["gefen-blocks", "gefen-factored"])
@pytest.mark.parametrize("saved_after", [0, 2])
def test_a_load_brings_back_what_was_there(tmp_path: Path, kind: str, saved_after: int) -> None:
    model, optimizer = wrapped(saved_after, kind)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    step(model, optimizer, 7)
    # Another codebook, which goes; of a save before the first step there is none, and one is learnt.
    other, target = wrapped(1, kind)
    dcp.load({"optim": target}, checkpoint_id=tmp_path)
    other.load_state_dict(weights)
    step(other, target, 7)
    inner: Any = target.optimizers[0]
    assert inner._gefen_global_step == saved_after + 1
    assert torch.equal(inner._gefen_codebook, optimizer.optimizers[0]._gefen_codebook)  # pyrefly: ignore
    for name, param in model.named_parameters():
        assert torch.equal(param, other.get_parameter(name)), name


def test_parameters_that_start_anew_get_the_codebook_of_the_others(tmp_path: Path) -> None:
    _, optimizer = wrapped(2)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    model, target = wrapped(1)
    target.prepare_load(tmp_path, fresh=["b"]).commit()
    inner: Any = target.optimizers[0]
    assert torch.equal(inner._gefen_codebook, optimizer.optimizers[0]._gefen_codebook)  # pyrefly: ignore
    assert not inner.state[model.b]
    step(model, target, 5)
    assert inner.state[model.b]["step"] == 1


@pytest.mark.parametrize(
    ("saved", "live", "said"),
    [
        ("gefen-factored", "gefen-blocks", "state 'vmean' is not in the checkpoint, which has ['m_codebook']"),
        (
            "gefen-blocks",
            "gefen-factored",
            "state 'vmean' was quantised by 'gefen-x-blockwise', and this optimizer keeps",
        ),
    ],
)
def test_second_moments_of_another_kind_are_refused(tmp_path: Path, saved: str, live: str, said: str) -> None:
    _, optimizer = wrapped(2, saved)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    _, target = wrapped(0, live)
    with pytest.raises(LoadError) as raised:
        target.prepare_load(tmp_path)
    assert f"a: {said}" in str(raised.value)


@pytest.mark.parametrize("part", ["m_magnitude", "automatic_period", "codebook"])
def test_state_that_lacks_a_part_is_refused(tmp_path: Path, part: str) -> None:
    model, optimizer = wrapped(1)
    inner: Any = optimizer.optimizers[0]
    if part == "codebook":
        inner._gefen_codebook = None
    else:
        del inner.state[model.a][part]
    with pytest.raises(PlacementError, match=rf"state 'm_codebook' has no \['.*{part}'\] beside it"):
        dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)


def test_a_checkpoint_without_its_codebook_is_refused() -> None:
    _, source = wrapped(2)
    state = dict(source.state_dict())
    manifest = json.loads(state["manifest"].contents().numpy().tobytes())
    manifest["extra"]["tables"] = {}
    state["manifest"] = BytesHandle.of(json.dumps(manifest).encode())
    _, target = wrapped(0)
    with pytest.raises(LoadError, match="Gefen: the table .* is lacking or changed") as raised:
        target.prepare_load(state)
    assert len(raised.value.problems) == 3


def test_what_is_made_of_gefen_is_refused() -> None:
    from gefen import Gefen, GefenMuon

    model = Net()
    muon = GefenMuon([model.a], lr=1e-3, fused=False)
    assert codec_of(muon) is None
    with pytest.raises(PresentationError, match="GefenMuon holds its parameters in self._param_names"):
        ShardedStateOptimizer(muon, model)
    # The package without the X has a class of this name in the same place.
    older = Gefen(model.parameters(), fused=False)
    del older._factored_v_2d
    assert codec_of(older) is None
