"""The soak runs without a failure, and finds each fault that is put into shardopt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.soaking.comparing import Failure, assembled, differences
from benchmarks.soaking.driving import run_episode
from benchmarks.soaking.episode import Cell, Episode, Fault, Leg, draw
from benchmarks.soaking.leg import LegRun, Orders, Told, run_leg
from benchmarks.soaking.proving import LIMIT_S, Control, find
from benchmarks.soaking.sabotage import SABOTAGE
from tests.support.ranks import RankPool

_PATIENCE = 2.0
_NOTHING = "a load loads nothing"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, 1])
def test_an_episode_equals_the_run_without_shards(number: int, ranks: RankPool) -> None:
    # Element-wise, so that nothing but torch has to be imported.
    ran = run_episode(ranks, draw(1, number, rules=("AdamW", "SGD")), patience=_PATIENCE)
    assert ran.legs > 1
    assert ran.compared > 100


def leg(*faults: Fault, until: int, layout: str = "fsdp2") -> Leg:
    return Leg(
        layout=layout,
        compute="local",
        load="shardopt",
        warm=False,
        until=until,
        faults=faults,
        save="shardopt",
        overrun=0,
        kill="",
        victim=0,
    )


def episode(rule: str, *legs: Leg) -> Episode:
    cells = (Cell(name="cell0", shape=(7, 14)), Cell(name="cell1", shape=(1, 3)))
    return Episode(seed=0, number=0, rule=rule, dtype=torch.float32, cells=cells, legs=legs)


def resumed_without_a_load(orders: Orders) -> Told:
    run = LegRun(orders)
    run._load = lambda: None  # type: ignore[method-assign]
    run._resume()
    return run.told


@pytest.mark.timeout(120)
def test_a_load_that_mended_another_does_not_do_the_work_of_the_next(ranks: RankPool, tmp_path: Path) -> None:
    broken = Fault(operation="load", where="commit", kind="raises", rank=1)
    run = episode("AdamW", leg(until=2), leg(broken, until=3))
    target = str(tmp_path / "first")
    ranks.run(2, run_leg, Orders(episode=run, number=0, source="", target=target, patience=_PATIENCE, sabotage=""))
    orders = Orders(episode=run, number=1, source=target, target="", patience=_PATIENCE, sabotage="")
    told = ranks.run(2, resumed_without_a_load, orders)
    mended, left = (assembled([one.looks[index].held for one in told]) for index in (0, -1))
    found = {item.partition(":")[0] for item in differences(left, mended)}
    assert found >= set(mended.tensors)
    assert found >= {f"cell0.weight{key}" for key in ("/step", "[lr]", "[betas]", "[eps]", "[weight_decay]")}


@pytest.mark.timeout(120)
def test_a_load_that_loads_nothing_is_a_difference(ranks: RankPool) -> None:
    with pytest.raises(Failure, match="after a load by shardopt: at step -1") as caught:
        run_episode(ranks, episode("SGD", leg(until=2), leg(until=3)), patience=_PATIENCE, sabotage=_NOTHING)
    assert caught.value.kind == "difference"


@pytest.mark.timeout(120)
def test_rules_that_round_by_piece_are_compared_to_the_bit(ranks: RankPool) -> None:
    legs = (leg(until=2), leg(until=3, layout="fsdp1"), leg(until=5, layout="fsdp3"))
    cells = tuple(Cell(name=f"cell{index}", shape=shape) for index, shape in enumerate([(33, 5), (130,), (5, 7)]))
    run = replace(episode("AdamW fused", *legs), cells=cells)
    run_episode(ranks, run, patience=_PATIENCE)
    with pytest.raises(Failure, match="elements differ"):
        run_episode(ranks, run, patience=_PATIENCE, sabotage="small moments are lost")


@pytest.mark.slow  # bitsandbytes has to be imported
@pytest.mark.timeout(200)
def test_the_bytes_of_quantised_state_are_compared_on_the_same_ranks(ranks: RankPool) -> None:
    pytest.importorskip("bitsandbytes")
    cells = (Cell(name="cell0", shape=(64, 512)),)
    run = replace(episode("bnb AdamW8bit", leg(until=2), leg(until=3)), cells=cells)
    legs = tuple(replace(one, compute="owner") for one in run.legs)
    run = replace(run, legs=legs)
    run_episode(ranks, run, patience=_PATIENCE)
    with pytest.raises(Failure, match="against what was saved: cell0.weight/.* on rank"):
        run_episode(ranks, run, patience=_PATIENCE, sabotage="a stale step count")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", SABOTAGE)
def test_a_fault_in_shardopt_is_found(fault: str, ranks: RankPool) -> None:
    seconds, how = find(ranks, fault, _PATIENCE, Control())
    print(f"{fault}: after {seconds:.1f} s: {how[:500]}")  # pytest -rP shows it
    assert seconds < 2 * LIMIT_S
