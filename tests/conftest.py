"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.ranks import RankPool

# FSDP2 of torch 2.11 keeps every process group that it has seen alive, with three threads each; after some hundred jobs
# the machine does little else.
_KEEPS_GROUPS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
_MOST_JOBS = 40


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four worker processes that serve every world size from 1 to 4; see `RankPool`."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _new_workers(request: pytest.FixtureRequest) -> None:
    if _KEEPS_GROUPS and "ranks" in request.fixturenames:
        pool = request.getfixturevalue("ranks")
        if pool.num_jobs >= _MOST_JOBS:
            pool.renew()
