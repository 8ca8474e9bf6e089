"""The keys of the portable state, the same on every rank and for every history."""

from __future__ import annotations

__all__ = ["MANIFEST_KEY", "blob_key", "rank_keys", "state_key"]

MANIFEST_KEY = "manifest"


def state_key(fqn: str, entry: str) -> str:
    """Key of an element-wise entry."""
    return f"state.{fqn}.{entry}"


def blob_key(fqn: str) -> str:
    """Key of a parameter's whole values."""
    return f"blob.{fqn}"


def rank_keys(index: int, fqn: str) -> tuple[str, str]:
    """Keys of the layout and the bytes of one rank's own state; ``index`` is its place among the optimizer's ranks."""
    return f"rank.{index}.layout.{fqn}", f"rank.{index}.blob.{fqn}"
