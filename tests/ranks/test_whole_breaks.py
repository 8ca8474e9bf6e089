"""Attempts at breaking ``owner`` and ``replicated``: what scripts do between steps, and rules written in odd ways.

Every one runs unsharded too, and has to end with the same bits, or to be refused.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import ShardedStateOptimizer
from tests.ranks.break_checkpoints import load_job, own_coupled_job, save_job
from tests.ranks.topologies import TOPOLOGIES
from tests.ranks.trajectories import Whole, assemble
from tests.ranks.whole_breaks import SCRIPTS, script_job
from tests.ranks.whole_runs import unequal
from tests.support.ranks import RankPool

# What these are told. They could be shown nothing that would do.
REFUSED = {
    "KeepsList": "KeepsList holds its parameters in self.noted too",
    "SharesState": "is the same tensor as",
    "sharing_between_ranks": "is the same tensor as",
}
# Those that couple parameters are refused.
NOT_OWNED = {"coupled", "CoupledChangesForm"}


# Where auto has to find out something.
AUTO = {
    "LargeOnes",
    "ChangesForm",
    "CoupledChangesForm",
    "coupled",
    "ReadsAttribute",
    "LooksAtRequiresGrad",
    "clearing",
}


def cases() -> list[Any]:
    """Each script on one layout for each presentation; the three have uneven, replicated and plain parameters."""
    found: list[Any] = []
    for script in (name for name in SCRIPTS if name not in REFUSED):
        for compute, topology in (("owner", "fsdp3"), ("auto", "hsdp2x2"), ("replicated", "fsdp2+plain")):
            if compute != "owner" or script not in NOT_OWNED:
                # auto takes one of the other two, most often.
                marks = [pytest.mark.slow] if compute == "auto" and script not in AUTO else []
                found.append(pytest.param(script, compute, topology, marks=marks))
    return found


@functools.cache
def wanted(script: str) -> Whole:
    return assemble([script_job(None, script, "")])


@pytest.mark.parametrize(("script", "compute", "topology"), cases())
def test_a_script_ends_as_it_does_unsharded(ranks: RankPool, script: str, compute: str, topology: str) -> None:
    held = ranks.run(TOPOLOGIES[topology].world_size, script_job, topology, script, compute)
    assert unequal(assemble(held), wanted(script)) == []


@pytest.mark.parametrize("script", REFUSED)
def test_a_rule_that_cannot_be_shown_parts_is_refused(ranks: RankPool, script: str) -> None:
    for outcome in ranks.outcomes(2, script_job, "fsdp2", script, "replicated"):
        assert REFUSED[script] in outcome.error


@pytest.mark.parametrize("how", ["dcp", "shardopt"])
@pytest.mark.parametrize(
    "name",
    [
        "three",
        "ChangesForm",
        "CoupledChangesForm",
        "CountsInAttribute",
    ],
)
def test_a_checkpoint_goes_on_elsewhere(ranks: RankPool, tmp_path: Path, name: str, how: str) -> None:
    middle, end = (assemble([held]) for held in save_job(None, name, how, "")[:2])
    saved = ranks.run(3, save_job, "fsdp3", name, how, str(tmp_path / "saved"))
    assert unequal(assemble([held[1] for held in saved]), end) == []
    assert all(same for _, _, same in saved)
    for topology in ("fsdp2", "hsdp2x2"):
        size = TOPOLOGIES[topology].world_size
        held = ranks.run(size, load_job, topology, name, how, str(tmp_path / "saved"), middle.arrays)
        assert unequal(assemble(held), end) == []


def test_a_coupled_rule_over_parameters_that_are_each_ranks_own_is_refused(ranks: RankPool) -> None:
    assert all("per_rank" in said for said in ranks.run(2, own_coupled_job))


def _class(whole: bool) -> type[torch.optim.Optimizer]:
    """A new class, as running a notebook's cell again makes one."""

    class Edited(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.125})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.add_(param.grad / param.grad.norm() if whole else param.grad, alpha=-0.125)

    return Edited


def test_what_was_found_of_a_class_that_is_gone_is_not_said_of_another() -> None:
    model = nn.Linear(4, 4, bias=False)
    # Memory is given out again soon, if not at once.
    for _ in range(3):
        for whole in (False, True):
            optimizer = ShardedStateOptimizer(_class(whole)(model.parameters()), model)
            assert f"compute={'owner' if whole else 'local'!r}" in optimizer.explain()
            del optimizer
            gc.collect()
