"""SwapAdamW on 1, 2 and 4 ranks: the bits of one process, checkpoints that move, failures that all ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardopt.swap.host_kernel import available_isas
from tests.ranks import swap_jobs as jobs
from tests.ranks.swap_clips import spoilt_clip_job
from tests.ranks.swap_jobs import OPTIONS, unequal
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout(300)

LEVEL = available_isas()[-1]
LAYOUTS = [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp_tp", 4)]


def alone(ranks: RankPool, job: Any, *args: Any) -> Any:
    """What one process without ranks comes to."""
    (found,) = ranks.run(1, job, *args, process_group=False)
    return found


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_bits_on_every_layout_as_in_one_process_G21(ranks: RankPool, kind: str) -> None:
    wanted = alone(ranks, jobs.train_job, "plain", kind, False, LEVEL, 1)
    assert len(wanted) > 100
    for number, (topology, size) in enumerate(LAYOUTS):
        # Wrapped and alone, with one thread and several, in turn.
        for found in ranks.run(size, jobs.train_job, topology, kind, number % 2 == 0, LEVEL, number + 1):
            assert [key for key in unequal(wanted, found) if not key.endswith("param_names")] == [], (topology, size)


def test_the_same_bits_at_every_isa_level_on_ranks(ranks: RankPool) -> None:
    wanted = alone(ranks, jobs.train_job, "plain", "fp32 masters", False, "scalar", 1)
    for level in available_isas():
        for found in ranks.run(2, jobs.train_job, "fsdp", "fp32 masters", True, level, 2):
            assert unequal(wanted, found) == [], level


@pytest.mark.parametrize("reverse", [False, True], ids=["row-major", "reversed"])
def test_shards_of_any_dim_in_memory_of_any_order_draw_the_random_bits_of_their_elements(
    ranks: RankPool, reverse: bool
) -> None:
    dims = [0, 1, 2]
    (wanted,) = ranks.run(1, jobs.cut_job, dims, False)
    for size in (1, 2, 3, 4):
        for found in ranks.run(size, jobs.cut_job, dims, reverse):
            assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), size


def test_fsdps_own_gradients_give_the_bits_of_one_process(ranks: RankPool) -> None:
    wanted = alone(ranks, jobs.backward_job, "plain")
    for topology, size in (("fsdp", 2), ("fsdp", 4), ("hsdp", 4)):
        for found in ranks.run(size, jobs.backward_job, topology):
            assert unequal(wanted, found) == [], (topology, size)


@pytest.mark.parametrize("kind", OPTIONS)
def test_checkpoints_move_over_2_4_1_and_2_ranks_bit_for_bit_and_stay_in_their_slabs_G3_G12(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    wanted = ranks.run(2, jobs.save_job, "fsdp", kind, str(tmp_path), "swap")[0]
    source = str(tmp_path / "save 1")
    for number, (topology, size, how) in enumerate(
        [("fsdp", 4, "fresh"), ("fsdp", 1, "warm"), ("fsdp_tp", 4, "path"), ("fsdp", 2, "shardopt")]
    ):
        target = str(tmp_path / f"move {number}")
        for found in ranks.run(size, jobs.move_job, topology, kind, source, target, "swap", how):
            assert unequal(wanted, found) == [], (topology, size)
        source = target
    # And the run goes on as if it had never been moved.
    ends = [ranks.run(size, jobs.resume_job, "fsdp", kind, source, 2)[0] for size in (1, 4)]
    assert unequal(*ends) == []
    assert unequal(wanted, ends[0]) != []


@pytest.mark.parametrize("kind", ["plain", "amsgrad"])
@pytest.mark.parametrize(("saved", "loaded"), [("swap", "torch"), ("torch", "swap")])
def test_checkpoints_move_between_torchs_adamw_and_swapadamw_bit_for_bit(
    ranks: RankPool, tmp_path: Path, kind: str, saved: str, loaded: str
) -> None:
    wanted = ranks.run(2, jobs.save_job, "fsdp", kind, str(tmp_path), saved)[0]
    for how in ("fresh", "warm", "path", "shardopt"):
        target = str(tmp_path / how)
        for found in ranks.run(4, jobs.move_job, "hsdp", kind, str(tmp_path / "save 1"), target, loaded, how):
            # Keys of groups that say how torch computes are torch's own.
            assert [key for key in unequal(wanted, found) if key in wanted and key in found] == []
            assert {key for key in wanted if not key.startswith("group.")} <= found.keys()


@pytest.mark.parametrize("kind", ["fp32 masters", "remainders", "bf16"])
def test_weights_that_are_loaded_alone_are_not_overwritten_by_masters_F12(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    ranks.run(2, jobs.save_job, "fsdp", kind, str(tmp_path), "swap")
    for found in ranks.run(2, jobs.model_only_job, kind, str(tmp_path / "save 0")):
        assert len(found) > 10
        assert [key for key, (value, loaded) in found.items() if not torch.equal(value, loaded)] == []


@pytest.mark.parametrize("how", ["alone", "wrapped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_parameters_that_fsdp_keeps_on_the_host_train_as_unsharded_ones_F7(
    ranks: RankPool, accumulate: int, how: str
) -> None:
    wanted = alone(ranks, jobs.offload_job, accumulate, how)
    for found in ranks.run(2, jobs.offload_job, accumulate, how):
        assert torch.allclose(torch.tensor(wanted["norms"]), torch.tensor(found["norms"]), rtol=1e-6)
        for key, value in wanted.items():
            # Whole batches on both ranks: means of two equal numbers are exact.
            assert key == "norms" or torch.equal(value, found[key]) or how == "clipped", key
            assert key == "norms" or torch.allclose(value, found[key], rtol=1e-5), key


@pytest.mark.parametrize(("topology", "size"), LAYOUTS[1:])
def test_a_folded_clip_is_the_clip_of_the_whole_model(ranks: RankPool, topology: str, size: int) -> None:
    norms, _, _ = alone(ranks, jobs.clip_job, "plain")
    held = ranks.run(size, jobs.clip_job, topology)
    assert all(found[0] == held[0][0] for found in held)
    assert torch.allclose(torch.tensor(held[0][0]), torch.tensor(norms), rtol=1e-6)
    assert min(norms) > 0.5
    for _, ours, other in held:
        for key, value in ours.items():
            assert not isinstance(value, torch.Tensor) or torch.allclose(value, other[key], rtol=1e-4, atol=1e-7), key


def test_a_clip_that_one_rank_cannot_take_part_in_fails_on_all_and_leaves_no_factor(ranks: RankPool) -> None:
    for text, waits in ranks.run(2, jobs.clip_refusal_job):
        assert "rank 1: parameter" in text
        assert "its gradient a plain tensor" in text
        assert not waits


def test_state_that_is_spoilt_on_one_rank_lets_nobody_wait_in_a_clip(ranks: RankPool) -> None:
    first, second = ranks.run(2, spoilt_clip_job, deadline_s=30.0)
    assert first[0] == "RankFailureError"
    assert "rank 1" in first[1]
    assert second[0] == "PlacementError"
    for _, text in (first, second):
        assert "state was replaced by what does not fit" in text


def test_a_gradient_that_one_rank_refuses_stops_all_before_anything_is_written(ranks: RankPool) -> None:
    first, second = ranks.run(2, jobs.bad_gradient_job)
    assert first[0] == "RankFailureError"
    assert "rank 1" in first[1]
    assert second[0] in ("PresentationError", "RankFailureError")
    for _, text, same, moved in (first, second):
        assert "scale: the gradient is bad" in text
        assert same
        assert moved


# What the kernel refuses is a ValueError, before it writes anything; but the other ranks have stepped.
@pytest.mark.parametrize("failure", [OSError, ValueError])
def test_a_kernel_that_fails_on_one_rank_poisons_until_a_good_load(
    ranks: RankPool, tmp_path: Path, failure: type[Exception]
) -> None:
    first, second = ranks.run(2, jobs.kernel_failure_job, str(tmp_path / "good"), failure)
    assert first[0] == ("nothing", "")
    assert second[0] == (failure.__name__, "half way")
    for _, again, save in (first, second):
        assert "half way" in again[1]
        assert save[0] != "nothing"


def test_a_step_dispatches_nothing_and_leaves_no_objects_behind_G14_G15(ranks: RankPool) -> None:
    for ops, grown in ranks.run(2, jobs.soak_job):
        assert ops == []
        assert grown < 50


def test_partial_gradients_are_summed_up_if_all_ranks_have_them_and_else_refused_by_all(ranks: RankPool) -> None:
    for text, moment in ranks.run(2, jobs.partial_job, -1):
        assert text == ""
        assert torch.allclose(torch.tensor(moment), 0.1 * torch.arange(5.0))
    for text, moment in ranks.run(2, jobs.partial_job, 1):
        assert "scale: its gradient, placed unlike the parameter" in text
        assert moment == [0.0] * 5


def test_ranks_that_differ_in_the_seed_are_told_so(ranks: RankPool) -> None:
    for text in ranks.run(2, jobs.seeds_job):
        assert "optimizer 0: seed: rank 0 / rank 1" in text
