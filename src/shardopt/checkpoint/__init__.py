"""Whole checkpoints, model and optimizer and the rest: every phase is voted on, and no rank waits for ever."""

from shardopt.checkpoint.loading import load
from shardopt.checkpoint.saving import save

__all__ = ["load", "save"]
