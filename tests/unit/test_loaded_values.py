"""Values that a load must look into: containers, whole values, inference mode, incomplete state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import PlacementError, ShardedStateOptimizer
from tests.support.rules import state
from tests.unit.test_load_options import Made, model_of, refused, saved, wrapped

# Saved without a process group, by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Odd(torch.optim.Optimizer):
    """Keeps a row, which is stored whole, and values in containers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param] = {
                    "row": torch.ones(3, dtype=param.dtype),
                    "history": [torch.ones(2), {"deep": torch.ones(2)}],
                    "best": float("inf"),
                }


def odd(dtype: torch.dtype = torch.float32, steps: int = 0) -> Made:
    model = model_of("ab", dtype=dtype)
    optimizer = ShardedStateOptimizer(Odd(model.parameters()), model, compute="dtensor")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(steps):
        optimizer.step()
    return optimizer, model


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entries: entries["row"].fill_(float("inf")),
        lambda entries: entries["history"][0].fill_(float("nan")),
        lambda entries: entries["history"][1]["deep"].fill_(float("nan")),
    ],
    ids=["whole", "in a list", "in a dict in a list"],
)
def test_what_is_not_finite_is_found_in_containers_too_N4(spoil: Any, tmp_path: Path) -> None:
    optimizer, model = odd(steps=1)
    spoil(optimizer.state[model["b"].weight])
    saved(tmp_path, (optimizer, model))
    refused(odd(), tmp_path, "b.weight: state '", "holds", "on this rank; finite='report'")
    other = odd()
    loaded = other[0].prepare_load(tmp_path, finite="report")
    assert [note for note in loaded.report.notes if "holds" in note]
    loaded.commit()
    # A Python number that says "none yet" is no overflow.
    assert other[0].state[other[1]["a"].weight]["best"] == float("inf")


def test_whole_values_are_held_to_their_dtype(tmp_path: Path) -> None:
    saved(tmp_path, odd(steps=1))
    live = odd(torch.bfloat16)
    refused(live, tmp_path, "a.weight: state 'row' was saved as float32, this optimizer keeps bfloat16")
    live[0].prepare_load(tmp_path, dtype="live").commit()
    assert live[0].state[live[1]["a"].weight]["row"].dtype == torch.bfloat16


def test_a_load_in_inference_mode_leaves_state_that_can_be_stepped(tmp_path: Path) -> None:
    optimizer, model = saved(tmp_path, wrapped(model_of("ab"), steps=2))
    for stock in (True, False):
        other, live = wrapped(model_of("ab"))
        with torch.inference_mode():
            if stock:
                dcp.load({"optim": other}, checkpoint_id=tmp_path)
            else:
                other.prepare_load(tmp_path).commit()
        assert state(other, live) == state(optimizer, model)
        held = [value for entries in other.state.values() for value in entries.values()]
        assert not any(value.is_inference() for value in held)
        for param in live.parameters():
            param.grad = torch.ones_like(param)
        other.step()


def test_live_state_that_lacks_a_needed_entry_is_seen_beside_a_group_that_brings_it(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("a"), steps=1, cls=torch.optim.Adam, amsgrad=True))
    live = wrapped(model_of("ab"), steps=1, cls=torch.optim.Adam)
    # Of the second parameter something else is missing already, which is no reason to look away.
    del live[0].state[live[1]["b"].weight]["exp_avg"]
    refused(live, tmp_path, "b.weight: it keeps its live state, which lacks ['max_exp_avg_sq']", strict=False)


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda value: value.to_sparse(), "torch.sparse_coo"),
        (lambda value: value.to("meta"), "meta"),
    ],
    ids=["sparse", "meta"],
)
def test_state_whose_bytes_have_no_place_is_refused_at_the_save_by_name(spoil: Any, kind: str) -> None:
    optimizer, model = wrapped(model_of("a"), steps=1)
    entries = optimizer.state[model["a"].weight]
    entries["exp_avg"] = spoil(entries["exp_avg"])
    with pytest.raises(PlacementError, match=f"a.weight: state 'exp_avg' is a {kind} tensor of shape"):
        optimizer.state_dict()


def test_sparse_live_state_is_replaced_by_a_load(tmp_path: Path) -> None:
    optimizer, model = saved(tmp_path, wrapped(model_of("a"), steps=2))
    other, live = wrapped(model_of("a"), steps=1)
    entries = other.state[live["a"].weight]
    entries["exp_avg"] = entries["exp_avg"].to_sparse()
    other.prepare_load(tmp_path).commit()
    assert state(other, live) == state(optimizer, model)
