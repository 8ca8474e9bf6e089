"""The keys of the portable state, the same on every rank and for every history."""

from __future__ import annotations

__all__ = ["MANIFEST_KEY", "blob_key", "state_key"]

MANIFEST_KEY = "manifest"


def state_key(fqn: str, entry: str) -> str:
    """Key of an element-wise entry."""
    return f"state.{fqn}.{entry}"


def blob_key(fqn: str) -> str:
    """Key of a parameter's whole values."""
    return f"blob.{fqn}"
