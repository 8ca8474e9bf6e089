"""Resident memory of this process: how much there is, and how much there was at most since a moment."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Footprint", "measure"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# clear_refs(5): "reset the peak resident set size to the current" (proc(5)).
_RESET_PEAK = "5"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resident bytes around an operation. The page cache is no part of it: only mapped pages count.

    Attributes:
        before: when it began, garbage and free memory given back.
        peak: the most there was before it ended.
        after: when it had ended, likewise.
    """

    before: int
    peak: int
    after: int


def measure(operation: Callable[[], Any]) -> Footprint:
    """Runs ``operation`` and tells what it did to resident memory."""
    # Garbage of whatever came before would be freed in between and hide what the operation takes.
    _give_back()
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    before, _ = _resident()
    operation()
    _, peak = _resident()
    _give_back()
    after, _ = _resident()
    return Footprint(before=before, peak=peak, after=after)


def _give_back() -> None:
    gc.collect()
    # What is free, and the allocator has kept for later, is nobody's: it comes to most of the state at times.
    ctypes.CDLL(None).malloc_trim(0)


def _resident() -> tuple[int, int]:
    """Resident bytes now, and at most since the last reset."""
    fields = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
    now, peak = (int(fields[name].removesuffix("kB")) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak
