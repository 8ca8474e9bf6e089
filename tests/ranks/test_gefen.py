"""Gefen-X, whose ranks learn from all of their parameters what codes mean: saved on some ranks, resumed on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.gefen_runs import SHAPES, Learnt, Small, back_job, refused_job, resume_job, train_job
from tests.ranks.quantised_runs import LAYOUTS, Array, meant
from tests.ranks.quantised_runs import whole as assembled
from tests.ranks.test_quantised import same_state
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.timeout(300)]

BLOCKS, FACTORED = "gefen-blocks", "gefen-factored"


def trained(ranks: RankPool, layout: str, kind: str, compute: str, root: Path) -> tuple[list[Learnt], list[Learnt]]:
    held = ranks.run(LAYOUTS[layout][0], train_job, layout, kind, compute, str(root))
    return [middle for middle, _ in held], [end for _, end in held]


def resumed(
    ranks: RankPool,
    layout: str,
    kind: str,
    compute: str,
    root: Path,
    weights: dict[str, Array],
    *,
    again: Path | None = None,
    by_path: bool = True,
) -> tuple[list[Learnt], list[Learnt]]:
    job: Any = (layout, kind, compute, str(root), weights, again and str(again), by_path)
    held = ranks.run(LAYOUTS[layout][0], resume_job, *job)
    return [loaded for loaded, _ in held], [end for _, end in held]


def differing(one: list[Learnt], other: list[Learnt], *, weights: bool = True) -> list[str]:
    """What two runs on the same ranks do not have alike, to the bit."""
    found = same_state([mine.seen for mine in one], [theirs.seen for theirs in other])
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        found += [f"rank {rank}: table"] * (mine.table != theirs.table)
        found += [f"rank {rank}: counters"] * (mine.counters != theirs.counters)
        for name, (_, part) in mine.seen.weights.items() if weights else ():
            found += [f"rank {rank}: {name}"] * (part.tobytes() != theirs.seen.weights[name][1].tobytes())
    return found


def whole(some: list[Learnt]) -> dict[str, Array]:
    return assembled([one.seen for one in some], Small)


def meaning(some: list[Learnt], key: str, *, steps: bool = False) -> Array:
    return meant([one.seen for one in some], key, steps=steps, net=Small)


def exactly(loaded: list[Learnt], key: str) -> Array:
    """What a load brought of an entry, before it was quantised anew."""
    result = meaning(loaded, key)
    for one in loaded:
        if key in one.exact:
            box, values = one.exact[key]
            result[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))] = values
    return result


def check_moved(before: list[Learnt], loaded: list[Learnt]) -> None:
    """Nothing is lost before state is quantised anew; then a step of the codes at most; who it is, is said."""
    keys = {key for one in before for key in one.seen.state}
    assert keys == {f"{name}/{entry}" for name in SHAPES for entry in ("m_codebook", "vmean")}
    for rank, one in enumerate(loaded):
        assert {key.partition("/")[0] for key in one.exact} == set(one.named), rank
        counted = {name: value for name, value in one.counters.items() if name != "global"}
        assert one.counters["global"] == 3
        assert {value for name, value in counted.items() if name.endswith("step")} == {3}
    for key in sorted(keys):
        was, now = meaning(before, key), meaning(loaded, key)
        assert exactly(loaded, key).tobytes() == was.tobytes(), key
        if key.endswith("/m_codebook"):
            assert (np.abs(now - was) <= meaning(loaded, key, steps=True) * (1 + 1e-5)).all(), key
        for one in loaded:
            kept = one.seen.state.get(key)
            if kept is not None and kept.values.size >= 8 and not key.startswith("few/"):
                # Under 8 elements a scale is as large as what it scales.
                assert kept.values.size // kept.scales.size >= 8, key
            if key in one.exact and key.endswith("/vmean") and one.exact[key][1].size:
                values, kept = one.exact[key][1].reshape(-1), one.seen.state[key]
                blocks = values.reshape(len(kept.scales), -1).astype(np.float64)
                np.testing.assert_allclose(kept.scales, blocks.mean(axis=1), rtol=1e-6)


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize(
    ("layout", "kind", "compute"),
    [
        ("2", BLOCKS, "local"),
        ("dim1", BLOCKS, "local"),
        pytest.param("hsdp", BLOCKS, "local", marks=pytest.mark.slow),
        ("4", BLOCKS, "local"),
        ("2", FACTORED, "auto"),
        pytest.param("2", BLOCKS, "replicated", marks=pytest.mark.slow),
    ],
)
def test_the_same_ranks_get_their_bits_back(
    ranks: RankPool, tmp_path: Path, layout: str, kind: str, compute: str, by_path: bool
) -> None:
    middle, end = trained(ranks, layout, kind, compute, tmp_path)
    loaded, resumed_end = resumed(ranks, layout, kind, compute, tmp_path, whole(middle), by_path=by_path)
    assert not any(one.exact or "note:" in one.said for one in loaded)
    assert differing(middle, loaded, weights=False) == []
    assert differing(end, resumed_end) == []
    if compute == "local":
        assert len({one.table for one in middle if one.table}) == (2 if layout == "hsdp" else len(middle))


def test_replicated_equals_the_unsharded_run_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ((oracle_middle, oracle_end),) = ranks.run(1, train_job, None, FACTORED, "", None)
    middle, end = trained(ranks, "2", FACTORED, "auto", tmp_path / "0")
    assert {one.table for one in (*middle, *end)} == {oracle_middle.table}
    for some, oracle in ((middle, oracle_middle), (end, oracle_end)):
        for name, part in whole([oracle]).items():
            assert whole(some)[name].tobytes() == part.tobytes(), name
    for number, layout in enumerate(["4", "1", "2"]):
        loaded, end = resumed(
            ranks,
            layout,
            FACTORED,
            "replicated",
            tmp_path / str(number),
            whole(middle),
            again=tmp_path / str(number + 1),
        )
        assert {one.table for one in loaded} == {oracle_middle.table}
        assert not any(one.exact or one.named for one in loaded)
        for name, part in whole([oracle_end]).items():
            assert whole(end)[name].tobytes() == part.tobytes(), (layout, name)
    assert same_state([one.seen for one in middle], [one.seen for one in loaded]) == []


def test_values_are_exact_on_other_ranks_and_quantised_once_B12(ranks: RankPool, tmp_path: Path) -> None:
    before, _ = trained(ranks, "2", BLOCKS, "local", tmp_path / "0")
    weights = whole(before)
    for number, layout in enumerate(["4", "1", "dim1", "2"]):
        root = tmp_path / str(number)
        loaded, end = resumed(ranks, layout, BLOCKS, "local", root, weights, again=tmp_path / str(number + 1))
        check_moved(before, loaded)
        assert all(np.isfinite(part).all() for part in whole(end).values())
        if layout == "4":
            # Each of the four has half of one of the two, and its codebook: the codes need not change.
            assert not any(
                {"aligned", "odd"} & {*one.named} for one in loaded if one.seen.state["odd/vmean"].scales.size > 1
            )
            assert meaning(before, "aligned/m_codebook").tobytes() == meaning(loaded, "aligned/m_codebook").tobytes()
        if layout == "1":
            assert any("'m_codebook' had blocks of its own on each rank" in one.said for one in loaded)
        before = loaded


@pytest.mark.parametrize("layout", ["1", "2", "3", "4"])
def test_ranks_without_elements_load_everywhere(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    before, _ = trained(ranks, "4", BLOCKS, "local", tmp_path)
    loaded, _ = resumed(ranks, layout, BLOCKS, "local", tmp_path, whole(before), by_path=layout != "3")
    if layout != "3":
        check_moved(before, loaded)
    for key in ("lone/m_codebook", "few/vmean"):
        assert exactly(loaded, key).tobytes() == meaning(before, key).tobytes()


def test_a_load_brings_the_codebook_too_and_not_beside_codes_that_stay(ranks: RankPool, tmp_path: Path) -> None:
    held = ranks.run(2, back_job, str(tmp_path / "all"))
    assert differing([end for _, end, _, _ in held], [again for _, _, again, _ in held]) == []
    for _, _, _, refused in held:
        assert (
            "odd: not in the checkpoint, so that their state stays, and what its codes mean would be changed" in refused
        )


def test_what_would_be_wrong_is_refused_and_the_trade_is_told(ranks: RankPool) -> None:
    said, _ = ranks.run(2, refused_job)
    for compute in ("owner", "dtensor"):
        assert f"compute={compute!r} would differ from the unsharded run" in said[compute]
        assert "learns from all parameters that it sees what the codes of each of them mean" in said[compute]
    assert "pass factored_v_2d=False" in said["factored"]
    for which in ("mixed", "copies"):
        assert "copies would drift apart" in said[which], which
    assert "capturable=True" in said["capturable"]
    assert "period_one_substrings" in said["substrings"]
    assert "what codes mean is learnt from each rank's shards alone" in said["local"]
    assert "Gefen: compute='replicated' because" in said["auto"]
    assert "replicated brings 5.3 KiB of gradients and parameters" in said["auto"]
    assert not any(text.startswith("refused") for text in (said["local"], said["auto"]))
