"""The soak runs without a failure, and finds each fault that is put into shardopt."""

from __future__ import annotations

import pytest

from benchmarks.soaking.driving import run_episode
from benchmarks.soaking.episode import draw
from benchmarks.soaking.proving import LIMIT_S, find
from benchmarks.soaking.sabotage import SABOTAGE
from tests.support.ranks import RankPool

_PATIENCE = 2.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, 1])
def test_an_episode_equals_the_run_without_shards(number: int, ranks: RankPool) -> None:
    # Element-wise, so that nothing but torch has to be imported.
    ran = run_episode(ranks, draw(1, number, rules=("AdamW", "SGD")), patience=_PATIENCE)
    assert ran.legs > 1
    assert ran.compared > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", SABOTAGE)
def test_a_fault_in_shardopt_is_found(fault: str, ranks: RankPool) -> None:
    seconds, how = find(ranks, fault, _PATIENCE)
    print(f"{fault}: after {seconds:.1f} s: {how[:500]}")  # pytest -rP shows it
    assert seconds < 2 * LIMIT_S
