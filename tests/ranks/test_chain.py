"""A training run that changes its number of ranks again and again, by stock DCP alone, and ends as if it never had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ranks.trajectories import Array, Held, Track, Whole, assemble
from tests.support.ranks import RankPool
from tests.support.rules import Rule

LEGS = ("fsdp2", "fsdp4", "fsdp1", "fsdp2")
STEPS_PER_LEG = 3
# foreach: torch's kernels give the same bits however a tensor is cut. amsgrad: a third entry, which is a maximum of all
# that came before, so that what one leg loses shows in every later one.
ADAMW = Rule(torch.optim.AdamW, {"lr": 0.125, "amsgrad": True, "foreach": True, "weight_decay": 0.1})
MOMENTUM = Rule(torch.optim.SGD, {"lr": 0.125, "momentum": 0.9, "nesterov": True, "foreach": True})


def leg_job(leg: int, rule: Rule, weights: dict[str, Array], root: str) -> tuple[Held, Held]:
    """This rank's part right after the load, and at the end, where it is saved."""
    track = Track(LEGS[leg])
    optimizer = track.make(rule)
    if leg:
        dcp.load({"optim": optimizer}, checkpoint_id=os.path.join(root, str(leg - 1)))
        track.put_whole(weights)
    loaded = track.held(optimizer)
    track.train(optimizer, range(leg * STEPS_PER_LEG, (leg + 1) * STEPS_PER_LEG))
    trained = track.held(optimizer)
    dcp.save({"optim": optimizer}, checkpoint_id=os.path.join(root, str(leg)))
    return loaded, trained


def bits(whole: Whole) -> dict[str, Any]:
    return {**{key: value.tobytes() for key, value in whole.arrays.items()}, **whole.values}


def unsharded(rule: Rule) -> Whole:
    track = Track(None)
    optimizer = track.make(rule)
    track.train(optimizer, range(len(LEGS) * STEPS_PER_LEG))
    return assemble([track.held(optimizer)])


@pytest.mark.parametrize("rule", [ADAMW, MOMENTUM], ids=["amsgrad", "momentum"])
def test_2_4_1_and_2_ranks_equal_one_process_bit_for_bit(ranks: RankPool, tmp_path: Path, rule: Rule) -> None:
    weights: dict[str, Array] = {}
    before: dict[str, Any] = {}
    for leg, topology in enumerate(LEGS):
        parts = ranks.run(int(topology.removeprefix("fsdp")), leg_job, leg, rule, weights, str(tmp_path))
        loaded, trained = (assemble(held) for held in zip(*parts, strict=True))
        if leg:
            assert bits(loaded) == before, f"leg {leg}, on {topology}"
        before = bits(trained)
        weights = {key: value for key, value in trained.arrays.items() if "/" not in key}
    assert before == bits(unsharded(rule))
