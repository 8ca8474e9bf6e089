"""The keys of the portable state, the same on every rank and for every history."""

from __future__ import annotations

__all__ = ["MANIFEST_KEY", "blob_key", "rank_keys", "scale_key", "state_key"]

MANIFEST_KEY = "manifest"


def state_key(fqn: str, entry: str) -> str:
    """Key of an element-wise entry."""
    return f"state.{fqn}.{entry}"


def scale_key(fqn: str, entry: str) -> str:
    """Key of the scales of a quantised entry."""
    return f"state.{fqn}.{entry}.scale"


def blob_key(fqn: str) -> str:
    """Key of a parameter's whole values."""
    return f"blob.{fqn}"


def rank_keys(index: int, fqn: str) -> tuple[str, str]:
    """Keys of the layout and the bytes of one rank's own state; ``index`` is its place among the optimizer's ranks."""
    return f"rank.{index}.layout.{fqn}", f"rank.{index}.blob.{fqn}"
