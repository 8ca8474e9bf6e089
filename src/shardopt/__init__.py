"""Shard any torch optimizer with FSDP2: save on N ranks with torch's distributed checkpoint, resume on M."""

__version__ = "0.1.0"

__all__ = ["__version__"]
