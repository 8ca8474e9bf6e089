"""Kinds of state that a rule may keep beside sharded parameters: back bit for bit on other ranks, or refused by all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.lifecycle_kinds import OK, REFUSED, load_kinds, refuse_kinds, save_kinds
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout(300)

TARGETS = {"2 ranks": (2, True), "4 ranks": (4, True), "1 rank": (1, True), "one process": (1, False)}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32 model", "bfloat16 model"])
def saved(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, dict[str, Any]], torch.dtype]:
    """Where two ranks have saved every kind, and what."""
    root = str(tmp_path_factory.mktemp("kinds"))
    return root, ranks.run(2, save_kinds, root, request.param, deadline_s=120)[0], request.param


@pytest.mark.parametrize("target", TARGETS)
def test_lifecycle_1c_comes_back_exactly(saved: Any, ranks: RankPool, target: str) -> None:
    root, states, dtype = saved
    world_size, sharded = TARGETS[target]
    assert states["strided"]["deep.kept"].shape == (3, 2, 1, 2, 3, 2)
    for found in ranks.run(world_size, load_kinds, root, states, sharded, dtype, deadline_s=120, process_group=sharded):
        assert found == {kind: [] for kind in OK}


@pytest.fixture(scope="module")
def refusals(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("refused")
    return root, ranks.run(2, refuse_kinds, str(root), deadline_s=120)


@pytest.mark.parametrize("kind", REFUSED)
def test_lifecycle_1c_is_refused_on_every_rank_by_name_and_nothing_changes(refusals: Any, kind: str) -> None:
    root, per_rank = refusals
    for rank in per_rank:
        error_type, text, changes = rank[kind]
        assert error_type == "RankFailureError", text
        assert "uneven" in text
        assert "kept" in text
        assert changes == []
    assert not (root / kind).exists()
