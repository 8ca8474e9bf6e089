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
def _pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def ranks(_pool: RankPool) -> RankPool:
    """Four worker processes that serve every world size from 1 to 4; see `RankPool`."""
    if _KEEPS_GROUPS and _pool.num_jobs >= _MOST_JOBS:
        _pool.renew()
    return _pool
