"""The norm of sharded gradients is that of the whole ones, the same bits on every rank, whatever ranks lack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ranks import clipping as jobs
from tests.ranks import clipping_refusals as refusals
from tests.ranks.topologies import TOPOLOGIES
from tests.support.ranks import RankPool
from tests.support.raw_values import raw_bytes

INF = math.inf
ORDERS = [2.0, INF, 1.0, 3.0]
SMALL = [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp_tp", 2), ("fsdp_tp", 4)]
IDS = [f"{name}{size}" for name, size in SMALL]


def check(norm: Any, expected: Any, order: float, rtol: float = 1e-6) -> None:
    """The largest element is exact; sums are rounded in another order."""
    if order == INF:
        assert float(norm) == float(expected)
    else:
        assert float(norm) == pytest.approx(float(expected), rel=rtol)


def check_all(outcomes: list[dict[str, Any]], order: float, rtol: float) -> None:
    assert len({raw_bytes(one["norm"]) for one in outcomes}) == 1
    for one in outcomes:
        check(one["norm"], one["expected"], order, rtol)
        assert one["facts"]
        # Bits of a float32 or float64 gradient follow from those of the norm.
        assert one["worst"] <= (0 if order == INF and rtol < 1e-5 else rtol)


@pytest.mark.parametrize("max_norm", [0.5, 1e4], ids=["clips", "does not"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("topology", "size"), SMALL, ids=IDS)
def test_mixed_meshes_and_plain_parameters_give_the_norm_of_the_unsharded_D4_D5_D6_D8_T9(
    ranks: RankPool, topology: str, size: int, order: float, max_norm: float
) -> None:
    check_all(ranks.run(size, jobs.small_job, topology, torch.float32, max_norm, order), order, 1e-6)


@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    # Of the two narrow ones torch rounds the norm itself, and then the factor.
    [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)],
    ids=["float64", "float16", "bfloat16"],
)
def test_other_dtypes(ranks: RankPool, dtype: torch.dtype, rtol: float, order: float) -> None:
    outcomes = ranks.run(4, jobs.small_job, "hsdp", dtype, 0.5, order)
    check_all(outcomes, order, rtol)
    assert outcomes[0]["norm"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topologies_of_training_runs_D4_D5(ranks: RankPool, name: str, order: float) -> None:
    check_all(ranks.run(TOPOLOGIES[name].world_size, jobs.topology_job, name, 0.5, order), order, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize(
    ("topology", "size", "count"), [("fsdp", 2, 1), ("fsdp", 4, 1), ("hsdp", 4, 2), ("fsdp_tp", 4, 2)]
)
def test_whatever_gradients_ranks_lack_collectives_are_the_same_D9_D10_K8(
    ranks: RankPool, topology: str, size: int, count: int, order: float
) -> None:
    outcomes = ranks.run(size, jobs.missing_job, topology, 50, order)
    assert outcomes[1:] == [outcomes[0]] * (size - 1)
    assert {number for *_, number in outcomes[0]} == {count}
    assert len({expected for _, expected, _ in outcomes[0]}) > 20  # the patterns did differ
    for norm, expected, _ in outcomes[0]:
        check(norm, expected, order)


ODD = ["replicate", "shard of replicated", "partial", "partial of sharded", "average", "nobody"]


@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_that_are_not_placed_like_their_parameter_D6(
    ranks: RankPool, size: int, case: str, order: float
) -> None:
    outcomes = ranks.run(size, jobs.odd_job, case, order)
    assert len({raw_bytes(norm) for norm, *_ in outcomes}) == 1
    for norm, expected, is_in_place in outcomes:
        check(norm, expected, order)
        assert is_in_place


@pytest.mark.parametrize("order", [2.0, INF])
def test_partial_along_one_axis_and_missing_along_the_other(ranks: RankPool, order: float) -> None:
    for norm, expected in ranks.run(4, jobs.two_axes_job, order):
        check(norm, expected, order)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 4])
def test_the_norm_of_half_gradients_does_not_overflow(ranks: RankPool, size: int, dtype: torch.dtype) -> None:
    for norm, clipped in ranks.run(size, jobs.half_job, dtype):
        assert norm == 4 * 49152.0
        assert torch.equal(clipped, torch.ones(8, 2, dtype=dtype))


@pytest.mark.parametrize("raises", [False, True], ids=["", "error_if_nonfinite"])
@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 1)])
def test_what_is_not_finite_on_one_rank_is_so_on_all_D1(
    ranks: RankPool, size: int, rank: int, value: float, order: float, raises: bool
) -> None:
    for norm, expected in ranks.run(size, jobs.nonfinite_job, value, order, rank, raises):
        assert torch.equal(norm.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("sparse", "parameter 2 of shape (5, 2): its gradient is sparse"),
        ("max", "only sums and averages"),
        ("mesh", "redistribute it"),
        ("usual here, partial there", "place it alike on all ranks"),
        ("sharded here, partial there", "place it alike on all ranks"),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_gradient_that_cannot_be_counted_is_refused_on_every_rank(
    ranks: RankPool, size: int, case: str, says: str
) -> None:
    outcomes = ranks.run(size, refusals.gradient_job, case)
    assert outcomes == [outcomes[0]] * size
    kind, message, is_unchanged = outcomes[0]
    assert kind == "RankFailureError"
    assert says in message
    assert is_unchanged
    if case in ("sparse", "max", "mesh"):
        assert message.count("rank ") == 1
        assert f"rank {size - 1}: " in message


def test_crossing_meshes_are_refused_before_anything_is_sent(ranks: RankPool) -> None:
    for kind, message, count in ranks.run(4, refusals.crossing_job, "pairs"):
        assert (kind, count) == ("ScopeError", 0)
        assert "clip each part on its own" in message


@pytest.mark.parametrize("dense", ["all", "namesakes"])
def test_parameters_on_pairs_that_are_no_slices_are_refused(ranks: RankPool, dense: str) -> None:
    for kind, message, _ in ranks.run(4, refusals.crossing_job, dense):
        assert kind == "ScopeError"
        assert "rank 3: parameter 1 of shape (4, 2): its mesh" in message


def test_ranks_without_the_refused_parameter_are_told(ranks: RankPool) -> None:
    outcomes = ranks.run(4, refusals.slice_on_some_ranks_job)
    assert outcomes == [outcomes[0]] * 4
    assert "rank 1: parameter 1" in outcomes[0][1]


@pytest.mark.parametrize("order", ORDERS)
def test_many_meshes_need_one_exchange_D4_D5(ranks: RankPool, order: float) -> None:
    outcomes = ranks.run(4, refusals.several_meshes_job, order)
    assert len({raw_bytes(norm) for norm, *_ in outcomes}) == 1
    for norm, expected, count in outcomes:
        check(norm, expected, order)
        assert count == 1


def test_ranks_of_a_mesh_in_any_order(ranks: RankPool) -> None:
    for norm, expected in ranks.run(4, refusals.reversed_ranks_job):
        check(norm, expected, 2.0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_dtypes_and_empty_parameters_together_in_an_optimizer(ranks: RankPool, size: int) -> None:
    for norm, expected, empty in ranks.run(size, refusals.doubles_job):
        assert norm.dtype == torch.float64
        check(norm, expected, 2.0, 1e-7)
        assert empty == 0
