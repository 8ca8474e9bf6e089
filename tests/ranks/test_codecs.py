"""State that a user's own codec takes apart: any shapes, blocks and meshes; and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.ranks.codec_runs import OWN, Case, failing_codec_job, load_job, rank_local_job, save_job, whole
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout(600)

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]

# Blocks that fit, that do not, and that are larger than the parameter; limits that some shards of it are under.
CASES = st.builds(
    Case,
    shape=st.lists(st.integers(1, 17), min_size=1, max_size=3).map(tuple),
    block=st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64]),
    smallest=st.sampled_from([1, 8, 30]),
    dims=st.lists(st.sampled_from([0, 0, 0, 1, 2, None]), min_size=2, max_size=2).map(tuple),
)
# So many go into one model: a job costs more than a parameter.
MANY = 20


def moved(
    ranks: RankPool, cases: list[Case], source: int, target: int, compute: str, root: Path, by_path: bool
) -> None:
    world = {index: int(np.prod(MESHES[index])) for index in (source, target)}
    saved = ranks.run(world[source], save_job, cases, MESHES[source], compute, str(root))
    dense = ranks.run(world[target], load_job, cases, MESHES[target], compute, str(root), True, True)
    loaded = ranks.run(world[target], load_job, cases, MESHES[target], compute, str(root), False, by_path)
    named = {name for _, names in loaded for name in names}
    for number, case in enumerate(cases):
        name = f"p{number}"
        meant = whole(saved, case, name)
        assert not np.isnan(meant).any()
        assert whole([one for one, _ in dense], case, name).tobytes() == meant.tobytes(), case
        after = whole([one for one, _ in loaded], case, name)
        if by_path and name not in named:
            assert after.tobytes() == meant.tobytes(), case
        # A step of int8 is 1/127 of the largest of a block.
        assert np.abs(after - meant).max() <= np.abs(meant).max() / 127, case
        if source == target or compute == "owner":
            assert name not in named
            assert after.tobytes() == meant.tobytes(), case


@pytest.mark.parametrize("compute", ["local", pytest.param("owner", marks=pytest.mark.slow)])
def test_values_survive_any_shapes_blocks_and_meshes(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, compute: str
) -> None:
    examples = 0

    # Not made smaller: each try costs seconds, and the 20 parameters of one say enough.
    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=[Phase.generate],
        database=None,
    )
    @given(st.lists(CASES, min_size=MANY, max_size=MANY), st.integers(0, 4), st.integers(0, 4), st.booleans())
    def many(cases: list[Case], source: int, target: int, by_path: bool) -> None:
        nonlocal examples
        examples += len(cases)
        moved(ranks, cases, source, target, compute, tmp_path_factory.mktemp("codec"), by_path)

    many()
    assert examples >= 500


@pytest.mark.parametrize("source", [4, 2])
def test_shards_without_elements_and_small_ones_load_on_any_number_of_ranks_ao4912(
    ranks: RankPool, tmp_path: Path, source: int
) -> None:
    # On 4 ranks: one row each of three, rows of two ranks, an uneven last one; too small to be quantised, or not.
    cases = [
        Case((3, 40), 8, 30, (0,)),
        Case((2, 64), 16, 128, (0,)),
        Case((7, 33), 16, 64, (0,)),
        Case((1,), 4, 1, (0,)),
    ]
    for target in (0, 1, 2, 3):
        moved(ranks, cases, source - 1, target, "local", tmp_path / str(target), by_path=target % 2 == 0)


@pytest.mark.parametrize("by_path", [True, False])
def test_state_of_each_rank_alone_comes_back_on_the_same_ranks(ranks: RankPool, tmp_path: Path, by_path: bool) -> None:
    saved = ranks.run(2, rank_local_job, 2, str(tmp_path), False, OWN, by_path)
    assert saved == [([2.0, 2.0], 0), ([3.0, 3.0, 3.0], 1)]
    assert ranks.run(2, rank_local_job, 2, str(tmp_path), True, OWN, by_path) == saved


@pytest.mark.parametrize("target", [1, 4])
def test_state_of_each_rank_alone_is_refused_on_others_B12(ranks: RankPool, tmp_path: Path, target: int) -> None:
    ranks.run(2, rank_local_job, 2, str(tmp_path), False, OWN, True)
    for said in ranks.run(target, rank_local_job, target, str(tmp_path), True, OWN, True):
        assert "weight: part of its state is declared 'rank_local', written by ranks 0 to 1 for their shards" in said
        assert f"shards of {target} ranks: resume on 2" in said
    undeclared = {"sketch": "same"}
    for said in ranks.run(2, rank_local_job, 2, str(tmp_path), True, undeclared, True):
        assert "this optimizer does not say so" in said


def test_state_that_nothing_is_said_of_is_refused_at_the_first_save_B13(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(2, rank_local_job, 2, str(tmp_path), False, None, True):
        assert "state 'sketch'" in said
        assert "rank_local" in said


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("scales", "p0: state 'momentum' has 256 codes and 7 scales of 32 elements"),
        ("dense", "p0: state 'momentum' is kept by some shards as by others it is not"),
        ("gone", "p0: state 'momentum' is kept by some shards as by others it is not"),
    ],
)
def test_shards_that_contradict_each_other_are_every_ranks_error(
    ranks: RankPool, tmp_path: Path, broken: str, said: str
) -> None:
    for text, works in ranks.run(2, failing_codec_job, str(tmp_path), broken):
        assert works
        if broken == "dense":
            assert text == ""
        else:
            assert said in text or "rank 1" in text
    assert broken == "dense" or not any(tmp_path.rglob(".metadata"))
