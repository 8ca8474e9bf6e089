"""Processes that more than one file of tests needs, each started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shardopt.swap.device_rows import Kind
from tests.support.device_chunks import Chunk
from tests.support.triton_worker import Step, interpreter


@pytest.fixture(scope="session")
def interpret() -> Iterator[Callable[[Step], tuple[Chunk, Kind]]]:
    """Runs one launch of the Triton kernel in triton's interpreter, on this machine's CPU."""
    with interpreter() as step:
        yield step
