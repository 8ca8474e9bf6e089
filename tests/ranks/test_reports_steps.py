"""Steps of torch's own rules in the wrapper: they leave nothing, and zero gradients give what they give unsharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.reports_steps import RULES, what_steps_leave, zero_gradients
from tests.support.ranks import RankPool

FUSED = {"fused": True}
FOREACH = {"foreach": True}


@pytest.mark.parametrize("rule", [FUSED, FOREACH], ids=str)
def test_steps_of_torchs_adamw_keep_no_memory_and_see_no_dtensor_G14_G15(rule: dict[str, Any], ranks: RankPool) -> None:
    for found in ranks.run(2, what_steps_leave, rule, (2, 4, 30)):
        assert found["memory"] == {}
        assert found["tensors"] == 0
        # Of a leak there would be one for each of the parameters in each of the 50 steps.
        assert found["objects"] < 50
        assert found["sharded"] == 0
        # A global size would be 150: of the largest head there are 15 rows of 5 here.
        assert found["largest"] <= 75


@pytest.mark.parametrize("rule", [FUSED, FOREACH], ids=str)
def test_more_parameters_of_both_kinds_are_no_more_calls_of_torchs_kernels_F10(
    rule: dict[str, Any], ranks: RankPool
) -> None:
    few, many = (ranks.run(2, what_steps_leave, rule, rows) for rows in ((2,), (2,) * 12))
    for one, other in zip(few, many, strict=True):
        assert other["parameters"] > one["parameters"] + 20
        assert sum(other["calls"].values()) == sum(one["calls"].values()) > 0
        assert "fused" not in rule or one["calls"] == {"aten._fused_adamw_.default": 1, "aten._foreach_add_.Scalar": 1}


@pytest.mark.parametrize("name", RULES)
def test_zero_gradients_give_the_bits_of_the_unsharded_run_G17(name: str, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, zero_gradients, name, str(tmp_path)) == [[], []]
