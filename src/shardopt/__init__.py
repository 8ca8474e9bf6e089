"""Shard any torch optimizer with FSDP2: save on N ranks with torch's distributed checkpoint, resume on M."""

from shardopt.amp import GradScaler
from shardopt.checkpoint import load, save
from shardopt.clipping import clip_grad_norm_
from shardopt.errors import (
    FormatError,
    LoadError,
    NamingError,
    PlacementError,
    PresentationError,
    RankFailureError,
    ScopeError,
    ShardoptError,
    StaleLoadError,
)
from shardopt.layouts.codec import Blocks, Codec, Form, Subject, register_codec
from shardopt.layouts.declared import register_layouts
from shardopt.layouts.interchange import declare_interchangeable
from shardopt.layouts.objects import declare_saved
from shardopt.optimizer import ShardedStateOptimizer
from shardopt.staging.prepared import PreparedLoad
from shardopt.staging.report import Report
from shardopt.swap.swap_adamw import SwapAdamW
from shardopt.version import __version__

__all__ = [
    "Blocks",
    "Codec",
    "Form",
    "FormatError",
    "GradScaler",
    "LoadError",
    "NamingError",
    "PlacementError",
    "PreparedLoad",
    "PresentationError",
    "RankFailureError",
    "Report",
    "ScopeError",
    "ShardedStateOptimizer",
    "ShardoptError",
    "StaleLoadError",
    "Subject",
    "SwapAdamW",
    "__version__",
    "clip_grad_norm_",
    "declare_interchangeable",
    "declare_saved",
    "load",
    "register_codec",
    "register_layouts",
    "save",
]
