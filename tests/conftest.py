"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four worker processes that serve every world size from 1 to 4; see `RankPool`."""
    with RankPool(4) as pool:
        yield pool
