"""Rules that need whole parameters: wrapped, they equal the unsharded run bit for bit, on every layout."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.ranks.closures import lbfgs_job
from tests.ranks.topologies import TOPOLOGIES
from tests.ranks.trajectories import Whole, assemble
from tests.ranks.whole_runs import (
    WholeRule,
    alternating_job,
    differing_job,
    explained_job,
    failing_closure_job,
    failing_job,
    loss_job,
    memory_job,
    odd_state_job,
    one_sided_job,
    resume_job,
    some_ranks_job,
    train_job,
    unequal,
    unfreezing_job,
    unsharded,
    views_job,
)
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout(300)

# In make test-all: layouts much like the others.
MORE = {"fsdp1", "fsdp4", "tp2", "dim1", "dense4+experts2x2"}

OWNED = [
    WholeRule("Muon", {"lr": 0.02}, matrices_only=True),
    WholeRule("Adafactor", {"lr": 0.1}),
    WholeRule("lamb", {"lr": 0.1}),
    WholeRule("shampoo", {"lr": 0.1}),
    WholeRule("soap", {"lr": 0.1}),
    WholeRule("muon", {"lr": 0.02}, by_use=True),
    WholeRule("conda", {"lr": 0.1}),
    WholeRule("scalableshampoo", {"lr": 0.1}),
    WholeRule("emofact", {"lr": 0.1}),
    WholeRule("AdamW", {"lr": 0.1}),
]
COUPLED = [
    WholeRule("prodigy", {"lr": 1.0}),
    WholeRule("dadaptadam", {"lr": 1.0}),
    WholeRule("Muon", {"lr": 0.02}, matrices_only=True),
    WholeRule("AdamW", {"lr": 0.1}),
]
RULES = {"owner": OWNED, "replicated": COUPLED}


@functools.cache
def oracle(compute: str) -> list[tuple[Whole, Whole]]:
    torch.set_num_threads(1)
    return unsharded(RULES[compute])


def trained(ranks: RankPool, topology: str, compute: str, root: str | None) -> list[str]:
    """Trains with every rule; where that differs from the unsharded runs."""
    rules = RULES[compute]
    held = ranks.run(TOPOLOGIES[topology].world_size, train_job, topology, rules, compute, root)
    found: list[str] = []
    for index, rule in enumerate(rules):
        for moment, wanted in enumerate(oracle(compute)[index]):
            got = assemble([rank[index][moment] for rank in held])
            found += [f"{rule.name}, {('middle', 'end')[moment]}: {key}" for key in unequal(got, wanted)]
    return found


def resumed(ranks: RankPool, topology: str, rules: list[WholeRule], compute: str, root: str, like: str) -> list[str]:
    """Loads and trains on; where that differs from the unsharded runs."""
    weights = [middle.arrays for middle, _ in oracle(like)]
    size = TOPOLOGIES[topology].world_size
    held = ranks.run(size, resume_job, topology, rules, compute, root, weights)
    return [
        f"{rule.name} on {topology}: {key}"
        for index, rule in enumerate(rules)
        for key in unequal(assemble([rank[index] for rank in held]), oracle(like)[index][1])
    ]


@pytest.mark.parametrize("compute", ["owner", "replicated"])
@pytest.mark.parametrize(
    "topology", [pytest.param(name, marks=[pytest.mark.slow] if name in MORE else []) for name in TOPOLOGIES]
)
def test_a_run_equals_the_unsharded_one_and_resumes_elsewhere_A15_E2_G18_G19(
    ranks: RankPool, tmp_path: Path, topology: str, compute: str
) -> None:
    found = trained(ranks, topology, compute, str(tmp_path))
    for target in ("fsdp1", "fsdp2", "fsdp4" if topology != "fsdp4" else "fsdp3"):
        found += resumed(ranks, target, RULES[compute], compute, str(tmp_path), compute)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("saved", "loaded"), [("owner", "replicated"), ("replicated", "owner")])
def test_a_checkpoint_moves_between_presentations(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    rules = [rule for rule in OWNED if rule in COUPLED]
    assert {rule.name for rule in rules} == {"Muon", "AdamW"}
    root = str(tmp_path)
    ranks.run(2, train_job, "fsdp2", rules, saved, root)
    weights = [middle.arrays for rule, (middle, _) in zip(OWNED, oracle("owner"), strict=True) if rule in rules]
    ends = [end for rule, (_, end) in zip(OWNED, oracle("owner"), strict=True) if rule in rules]
    held = ranks.run(4, resume_job, "hsdp2x2", rules, loaded, root, weights)
    assert [unequal(assemble([rank[i] for rank in held]), ends[i]) for i in range(len(rules))] == [[], []]


@pytest.mark.parametrize(("saved", "loaded"), [("owner", "local"), ("local", "owner"), ("dtensor", "replicated")])
def test_element_wise_state_moves_between_all_presentations(
    ranks: RankPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    rule, index = OWNED[-1], len(OWNED) - 1
    ranks.run(3, train_job, "fsdp3", [rule], saved, str(tmp_path))
    middle, end = oracle("owner")[index]
    held = ranks.run(2, resume_job, "fsdp2", [rule], loaded, str(tmp_path), [middle.arrays])
    assert unequal(assemble([rank[0] for rank in held]), end) == []


def test_bf16_parameters_are_owned_bit_for_bit(ranks: RankPool) -> None:
    rules = [rule for rule in OWNED if rule.name in ("Adafactor", "Muon")]
    torch.set_num_threads(1)
    wanted = unsharded(rules, torch.bfloat16)
    held = ranks.run(3, train_job, "fsdp3", rules, "owner", None, torch.bfloat16)
    got = [assemble([rank[index][1] for rank in held]) for index in range(len(rules))]
    assert [unequal(one, end) for one, (_, end) in zip(got, wanted, strict=True)] == [[], []]


@pytest.mark.parametrize("topology", ["fsdp1", "fsdp2", "fsdp3", "hsdp2x2", "fsdp2+plain"])
def test_a_closure_that_is_called_often_equals_the_unsharded_run(ranks: RankPool, topology: str) -> None:
    torch.set_num_threads(1)
    weights, losses, calls = lbfgs_job(None)
    held = ranks.run(TOPOLOGIES[topology].world_size, lbfgs_job, topology)
    assert calls > 6
    assert [(one[1], one[2]) for one in held] == [(losses, calls)] * len(held)
    assert unequal(assemble([one[0] for one in held]), assemble([weights])) == []


def test_a_rule_that_draws_random_numbers_is_the_same_on_every_rank_and_resumes(
    ranks: RankPool, tmp_path: Path
) -> None:
    rules = [WholeRule("gravity", {"lr": 0.1})]
    held = ranks.run(3, train_job, "fsdp3", rules, "auto", str(tmp_path))
    middle, end = (assemble([rank[0][moment] for rank in held]) for moment in (0, 1))
    again = ranks.run(2, resume_job, "fsdp2", rules, "auto", str(tmp_path), [middle.arrays])
    assert unequal(assemble([rank[0] for rank in again]), end) == []


@pytest.mark.parametrize("topology", ["fsdp2", "fsdp4"])
def test_an_update_that_fails_on_its_owner_fails_on_every_rank(ranks: RankPool, tmp_path: Path, topology: str) -> None:
    held = ranks.run(TOPOLOGIES[topology].world_size, failing_job, topology, str(tmp_path))
    for errors, same, said, unmoved in held:
        assert len(errors) == 2
        assert "update failed on rank" in errors[0]
        assert "does not converge" in errors[0]
        assert "an earlier step failed after it had begun to write" in errors[1]
        assert same
        assert "an earlier step" in said
        assert set(unmoved) <= {"odd.idle"}


@pytest.mark.parametrize("compute", ["owner", "replicated"])
def test_a_gradient_that_one_rank_lacks_is_named_and_nothing_is_stepped(ranks: RankPool, compute: str) -> None:
    for said, same, moved in ranks.run(3, one_sided_job, "fsdp3", compute, "odd.row.weight", 1):
        assert said.startswith("RankFailureError: step: gradients differ between ranks")
        assert "odd.row.weight: no gradient" in said
        assert same
        assert moved


@pytest.mark.parametrize("compute", ["owner", "replicated"])
def test_nothing_whole_is_kept_between_steps_and_state_only_once(ranks: RankPool, compute: str) -> None:
    held = ranks.run(2, memory_job, "fsdp2", WholeRule("AdamW", {"lr": 0.1}), compute, 2)
    assert all(shape == (0,) for leaves, _ in held for shape in leaves)
    assert sum(count for _, (count,) in held) == 6
    assert all(count for _, (count,) in held)


def test_ranks_that_compute_different_updates_are_told_and_nothing_is_changed(ranks: RankPool) -> None:
    for said, same in ranks.run(2, differing_job, "fsdp2"):
        assert said.startswith("RankFailureError: update: ByRank has made different parameters of the same numbers")
        assert same


def test_a_rule_sees_the_mean_of_the_losses_of_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(3, loss_job, "fsdp3") == [(3.0, 3.0)] * 3


@pytest.mark.parametrize(("compute", "at"), [("replicated", 1), ("replicated", 2), ("dtensor", 1)])
def test_a_closure_that_fails_on_one_rank_fails_on_all_and_the_group_works_on(
    ranks: RankPool, compute: str, at: int
) -> None:
    for said, works, later in ranks.run(3, failing_closure_job, "fsdp3", 1, at, compute):
        assert said == "RankFailureError: closure failed on rank 1: ValueError: no more data"
        assert works
        # Before the first one has returned nothing is written, and the next step can be taken.
        assert (later == "") == (at == 1)


def test_explain_says_who_owns_what_where_results_round_and_what_a_checkpoint_is_good_for(ranks: RankPool) -> None:
    for muon, fused, odd in ranks.run(2, explained_job, "fsdp2"):
        assert "whole: rank 0: 1 (1536 elements), rank 1: 4 (100 elements)" in muon
        assert muon.splitlines()[-1] == "checkpoint: resumes on any number of ranks"
        (rounded,) = [line for line in fused.splitlines() if "to rounding only" in line]
        assert "odd.row.weight" in rounded
        assert "even.column.weight" not in rounded
        assert "checkpoint: refused. SGD.scales holds a tensor of shape (3,)" in odd


def test_state_that_is_a_view_of_the_parameter_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(2, views_job, "fsdp2"):
        assert "state 'old' is the parameter itself or a view of it" in said


@pytest.mark.parametrize("compute", ["owner", "replicated"])
def test_parameters_may_be_unfrozen(ranks: RankPool, compute: str) -> None:
    torch.set_num_threads(1)
    wanted = assemble([unfreezing_job(None, compute)])
    assert unequal(assemble(ranks.run(3, unfreezing_job, "fsdp3", compute)), wanted) == []


@pytest.mark.parametrize("compute", ["owner", "replicated"])
def test_an_optimizer_may_live_on_some_ranks_of_the_world(ranks: RankPool, compute: str) -> None:
    outcomes = ranks.run(4, some_ranks_job, [1, 3], compute)
    assert [total for _, total in outcomes] == [4.0] * 4
    assert outcomes[0][0] is None
    assert all((one == other).all() for one, other in zip(outcomes[1][0], outcomes[3][0], strict=True))


@pytest.mark.parametrize("compute", ["owner", "replicated"])
@pytest.mark.parametrize("rank", [0, 2])
def test_state_of_one_owner_that_cannot_be_saved_fails_on_every_rank(ranks: RankPool, compute: str, rank: int) -> None:
    outcomes = ranks.run(3, odd_state_job, "fsdp3", compute, rank)
    for place, (said, cause, works, keys) in enumerate(outcomes):
        assert said.startswith(f"RankFailureError: state_dict failed on rank {rank}: PlacementError")
        assert ("builtins.object" in cause) == (place == rank)
        assert works
        assert keys == outcomes[0][3]
        assert "state.odd.row.weight.exp_avg" in keys


@pytest.mark.parametrize("compute", ["owner", "replicated"])
def test_state_stays_when_other_parameters_have_gradients_A16(ranks: RankPool, compute: str) -> None:
    torch.set_num_threads(1)
    rule = WholeRule("Muon", {"lr": 0.02}, matrices_only=True)
    wanted = assemble([alternating_job(None, rule, compute)])
    assert unequal(assemble(ranks.run(4, alternating_job, "fsdp4", rule, compute)), wanted) == []
