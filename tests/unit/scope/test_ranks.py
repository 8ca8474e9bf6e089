"""Which ranks a set of meshes stands for. Meshes here are their ranks; tests/ranks has real ones."""

from __future__ import annotations

import pytest
import torch

from shardopt.scope.ranks import ranks_of, unite

GRID = (0, 1, 2, 3)


def test_plain_parameters_name_no_rank() -> None:
    assert ranks_of([torch.zeros(2), torch.nn.Parameter(torch.zeros(3))]) == ()


@pytest.mark.parametrize(
    ("meshes", "ranks"),
    [
        # one mesh, also when it is a slice of a larger one: a pipeline stage's ranks
        ({((2, 3), GRID)}, (2, 3)),
        # one mesh contains the other: parameters under FSDP + TP, and norms under FSDP alone
        ({((0, 2), GRID), (GRID, GRID)}, GRID),
        ({((0, 1), tuple(range(8))), (GRID, tuple(range(8)))}, GRID),
        # crossing meshes: this rank cannot see all of them
        ({((0, 1), GRID), ((0, 2), GRID)}, GRID),
        # nothing in common but this rank
        ({((0, 1), (0, 1)), ((0, 2), (0, 2))}, (0, 1, 2)),
        ({((0, 1), GRID), ((0, 2), (0, 2, 4))}, (0, 1, 2)),
    ],
)
def test_ranks_of_meshes(meshes: set[tuple[tuple[int, ...], tuple[int, ...]]], ranks: tuple[int, ...]) -> None:
    assert unite(meshes) == ranks


def test_every_rank_of_a_grid_comes_to_the_same_ranks() -> None:
    rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    seen = {unite({(row, GRID), (column, GRID)}) for row in rows for column in columns}
    assert seen == {GRID}
