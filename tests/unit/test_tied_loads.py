"""Loads between models whose parameters are tied otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.support.rules import state
from tests.unit.test_load_options import Made, model_of, refused, saved, wrapped

# Saved without a process group, by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tied(*names: str, also: tuple[str, str] | None = None, steps: int = 0) -> Made:
    """Layers of which the second of ``also`` has the first one's weight."""
    model = model_of("".join(names))
    if also:
        model[also[1]].weight = model[also[0]].weight
    return wrapped(model, steps=steps)


def test_of_saved_states_the_first_live_name_counts_also_where_it_was_an_alias(tmp_path: Path) -> None:
    source = saved(tmp_path, tied("x", "y", "z", also=("x", "y"), steps=2))
    want = state(*source)
    live = tied("x", "y", "z", also=("y", "z"))
    loaded = live[0].prepare_load(tmp_path)
    assert any(note.startswith("z.weight: it is tied to y.weight now") for note in loaded.report.notes)
    loaded.commit()
    assert state(*live) == {"x.weight": want["x.weight"], "y.weight": want["x.weight"]}
    # Without x, y still is what x was.
    alone = tied("y", "z", also=("y", "z"))
    alone[0].prepare_load(tmp_path).commit()
    assert state(*alone) == {"y.weight": want["x.weight"]}


def test_fresh_knows_every_name_of_a_tied_parameter(tmp_path: Path) -> None:
    saved(tmp_path, tied("x", "y", "z", also=("x", "y"), steps=2))
    live = tied("x", "y", "z", also=("x", "y"), steps=1)
    loaded = live[0].prepare_load(tmp_path, fresh=["y.*"])
    assert loaded.report.fresh == ["x.weight"]
    loaded.commit()
    assert list(state(*live)) == ["z.weight"]


def test_torchs_checkpoint_of_untied_parameters_loads_into_tied_ones(tmp_path: Path) -> None:
    model = model_of("xyz")
    plain = torch.optim.AdamW(model.parameters(), lr=0.125)
    for index, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 1.0 + index)
    plain.step()
    want = {name: plain.state[param]["exp_avg"].tolist() for name, param in model.named_parameters()}
    dcp.save({"optim": get_optimizer_state_dict(model, plain)}, checkpoint_id=tmp_path)
    live = tied("x", "y", "z", also=("y", "z"))
    loaded = live[0].prepare_load(tmp_path)
    assert any(note.startswith("z.weight: it is tied to y.weight now") for note in loaded.report.notes)
    loaded.commit()
    for name in ("x", "y"):
        assert live[0].state[live[1][name].weight]["exp_avg"].tolist() == want[f"{name}.weight"]
    refused(tied("w", "x", "y", "z", also=("y", "z")), tmp_path, "w.weight: this optimizer updates it")
    # Where only a later name of a tied parameter was saved, it counts.
    other = tied("x", "w", "z", also=("w", "z"))
    other[0].prepare_load(tmp_path, strict=False).commit()
    assert other[0].state[other[1]["w"].weight]["exp_avg"].tolist() == want["z.weight"]


def test_an_alias_of_the_saved_state_that_is_not_taken_is_no_lost_name(tmp_path: Path) -> None:
    source = saved(tmp_path, tied("a", "b", "c", also=("a", "c"), steps=2))
    want = state(*source)
    live = tied("b", "c", also=("b", "c"))
    loaded = live[0].prepare_load(tmp_path)
    assert any(note.startswith("a.weight: it is tied to b.weight now") for note in loaded.report.notes)
    loaded.commit()
    assert state(*live) == {"b.weight": want["b.weight"]}
