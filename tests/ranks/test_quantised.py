"""Optimizers with quantised state: saved on some ranks and resumed on others, exactly where that is possible."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.quantised_runs import (
    LAYOUTS,
    Seen,
    async_job,
    explained_job,
    granularity_job,
    meant,
    resume_job,
    train_job,
    twice_job,
    whole,
)
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.timeout(300)]

KINDS = ["bnb-AdamW8bit", "bnb-Lion8bit", "ao-AdamW8bit", "ao-AdamW4bit", "ao-AdamWFp8"]
# In make test-all: those whose state is kept like another's.
MOST = ["bnb-AdamW8bit", "ao-AdamW4bit"]
SLOWLY = [kind if kind in MOST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


def trained(ranks: RankPool, layout: str, kind: str, compute: str, root: Path | None) -> tuple[list[Seen], list[Seen]]:
    held = ranks.run(LAYOUTS[layout][0], train_job, layout, kind, compute, None if root is None else str(root))
    return [middle for middle, _ in held], [end for _, end in held]


def resumed(
    ranks: RankPool,
    layout: str,
    kind: str,
    compute: str,
    root: Path,
    weights: Any,
    again: Path | None = None,
    by_path: bool = False,
) -> tuple[list[Seen], list[Seen]]:
    held = ranks.run(
        LAYOUTS[layout][0], resume_job, layout, kind, compute, str(root), weights, again and str(again), by_path
    )
    return [loaded for loaded, _ in held], [end for _, end in held]


def again(root: Path, number: int) -> dict[str, Any]:
    """Loads by path, and saves under the next number."""
    return {"root": root / str(number), "again": root / str(number + 1), "by_path": True}


def same_state(one: list[Seen], other: list[Seen]) -> list[str]:
    """Keys of entries whose codes or scales differ, rank by rank."""
    differ: list[str] = []
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine.state.keys() == theirs.state.keys()
        for key, kept in mine.state.items():
            match = theirs.state[key]
            codes = [b"" if part.codes is None else part.codes.tobytes() for part in (kept, match)]
            if kept.box != match.box or codes[0] != codes[1] or kept.scales.tobytes() != match.scales.tobytes():
                differ.append(f"rank {rank}: {key}")
    return differ


def same_weights(one: list[Seen], other: list[Seen]) -> list[str]:
    mine, theirs = whole(one), whole(other)
    return [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()]


@pytest.mark.parametrize("compute", ["local", "owner"])
@pytest.mark.parametrize("kind", SLOWLY)
def test_the_same_ranks_get_their_bits_back_flashoptim3(
    ranks: RankPool, tmp_path: Path, kind: str, compute: str
) -> None:
    middle, end = trained(ranks, "2", kind, compute, tmp_path)
    quantised = {key for seen in middle for key, kept in seen.state.items() if kept.codes is not None}
    assert {"aligned", "column.weight"} <= {key.partition("/")[0] for key in quantised}
    loaded, resumed_end = resumed(ranks, "2", kind, compute, tmp_path, whole(middle))
    assert same_state(middle, loaded) == []
    assert same_state(end, resumed_end) == []
    assert same_weights(end, resumed_end) == []


@pytest.mark.parametrize("kind", SLOWLY)
def test_owner_equals_the_unsharded_run_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    ((oracle_middle, oracle_end),) = ranks.run(1, train_job, None, kind, "", None)
    middle, end = trained(ranks, "2", kind, "owner", tmp_path / "0")
    assert same_weights([oracle_middle], middle) == []
    assert same_weights([oracle_end], end) == []
    for number, layout in enumerate(["4", "1", "2"]):
        loaded, end = resumed(ranks, layout, kind, "owner", weights=whole(middle), **again(tmp_path, number))
        assert same_weights([oracle_end], end) == []
        assert all(seen.requantised == [] for seen in loaded)
    assert same_state(middle, loaded) == []


@pytest.mark.parametrize("kind", ["bnb-AdamW", pytest.param("bnb-Lion", marks=pytest.mark.slow)])
def test_what_is_never_quantised_is_stepped_shard_by_shard_as_unsharded(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    ((_, oracle_end),) = ranks.run(1, train_job, None, kind, "", None)
    said = ranks.run(2, explained_job, "2", kind, "auto")[0]
    assert "compute='local' because" in said
    assert "quantised" not in said
    middle, end = trained(ranks, "2", kind, "auto", tmp_path)
    assert same_weights([oracle_end], end) == []
    _, end = resumed(ranks, "3", kind, "auto", tmp_path, whole(middle))
    assert same_weights([oracle_end], end) == []


@pytest.mark.parametrize("kind", SLOWLY)
def test_aligned_blocks_keep_their_bits_over_any_number_of_ranks_B12(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    middle, _ = trained(ranks, "2", kind, "local", tmp_path / "0")
    aligned = [key for key in middle[0].state if key.startswith(("aligned/", "column.weight/"))]
    assert aligned
    for number, layout in enumerate(["4", "hsdp", "dim1", "tp", "1", "2"]):
        loaded, _ = resumed(ranks, layout, kind, "local", weights=whole(middle), **again(tmp_path, number))
        assert not {name for seen in loaded for name in seen.requantised} & {"aligned", "column.weight"}
        for key in aligned:
            assert meant(middle, key).tobytes() == meant(loaded, key).tobytes(), (layout, key)
    for before, after in zip(middle, loaded, strict=True):
        for key in aligned:
            assert before.state[key].codes is not None
            assert np.array_equal(before.state[key].codes, after.state[key].codes)  # type: ignore[arg-type]
            assert np.array_equal(before.state[key].scales, after.state[key].scales)


@pytest.mark.parametrize("kind", ["bnb-AdamW8bit", pytest.param("bnb-Lion8bit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["1", "2", "3", "4", "dim1", "hsdp", "tp"])
def test_values_are_exact_wherever_blocks_lie(ranks: RankPool, tmp_path: Path, kind: str, layout: str) -> None:
    source = "3" if layout == "2" else "2"
    middle, _ = trained(ranks, source, kind, "local", tmp_path)
    loaded, _ = resumed(ranks, layout, f"{kind}-dense", "local", tmp_path, whole(middle))
    for key in middle[0].state:
        assert meant(middle, key).tobytes() == meant(loaded, key).tobytes(), key


@pytest.mark.parametrize("kind", SLOWLY)
@pytest.mark.parametrize(("source", "layout"), [("2", "4"), ("4", "2"), ("2", "3"), ("3", "1"), ("2", "dim1")])
def test_blocks_that_lie_otherwise_are_quantised_anew_and_named(
    ranks: RankPool, tmp_path: Path, kind: str, source: str, layout: str
) -> None:
    middle, _ = trained(ranks, source, kind, "local", tmp_path)
    loaded, _ = resumed(ranks, layout, kind, "local", tmp_path, whole(middle), by_path=True)
    named = {name for seen in loaded for name in seen.requantised}
    for key in middle[0].state:
        before, after = meant(middle, key), meant(loaded, key)
        name = key.partition("/")[0]
        if name in named:
            # The largest of a block sets its scale, which fp32 rounds.
            assert (np.abs(before - after) <= meant(loaded, key, steps=True) * (1 + 1e-5)).all(), key
        else:
            assert before.tobytes() == after.tobytes(), key
    assert "aligned" not in named
    assert "small" not in named


@pytest.mark.parametrize("kind", ["bnb-AdamW8bit", "ao-AdamW4bit"])
@pytest.mark.parametrize("compute", ["local", "owner"])
def test_a_save_in_a_thread_has_what_was_there_when_it_began_H1(
    ranks: RankPool, tmp_path: Path, kind: str, compute: str
) -> None:
    held = ranks.run(2, async_job, kind, compute, str(tmp_path))
    assert same_state([middle for middle, _ in held], [loaded for _, loaded in held]) == []


def test_how_layers_are_wrapped_does_not_say_what_is_quantised_B15(ranks: RankPool) -> None:
    by_layers, at_once = (ranks.run(2, granularity_job, layers) for layers in (True, False))
    assert sorted(chain(*by_layers)) == sorted(chain(*at_once))


@pytest.mark.parametrize("kind", ["bnb-AdamW8bit", "ao-AdamW8bit"])
def test_a_load_fills_live_codes_and_scales(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for kept_identity, errors in ranks.run(2, twice_job, kind, str(tmp_path)):
        assert kept_identity
        assert len(errors) == 1
        assert "has stepped, loaded or got a parameter group" in errors[0]


def test_explain_tells_the_trade_in_numbers(ranks: RankPool) -> None:
    said = ranks.run(2, explained_job, "2", "bnb-AdamW8bit", "auto")[0]
    assert "compute='owner' because" in said
    assert "owner moves 388.8 KiB" in said, said
    assert "quantise otherwise than unsharded: 2 of 7 parameters (odd, vector)" in said
    said = ranks.run(2, explained_job, "2", "bnb-AdamW8bit", "local")[1]
    assert "too small: 3 of 7 parameters (odd, uneven, vector)" in said
