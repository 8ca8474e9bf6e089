"""Building thousands of small objects without the garbage collector looking at all others every few hundred."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["paused_collector"]


@contextmanager
def paused_collector() -> Generator[None]:
    """Pauses the collector inside. For work that makes objects and no garbage: none is freed until it ends.

    A model's tensors and modules are hundreds of thousands of objects, and every pass over them takes as long as
    describing the state of hundreds of parameters.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
