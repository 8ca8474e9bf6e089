"""The garbage collector is paused inside, and afterwards as it was before."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from shardopt.collector import paused_collector


@pytest.fixture(autouse=True)
def collector_on() -> Generator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_paused_inside_and_runs_afterwards() -> None:
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_runs_again_after_an_error() -> None:
    with pytest.raises(KeyError), paused_collector():
        raise KeyError
    assert gc.isenabled()


def test_who_had_switched_it_off_finds_it_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


def test_pauses_within_pauses() -> None:
    with paused_collector():
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
