"""Shard any torch optimizer with FSDP2: save on N ranks with torch's distributed checkpoint, resume on M."""

from shardopt.version import __version__

__all__ = ["__version__"]
