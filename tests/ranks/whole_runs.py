"""Runs of rules that need whole parameters, on one topology and unsharded: train, save, load elsewhere, train on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_optimizer
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardopt import ShardedStateOptimizer
from tests.ranks.trajectories import SAVED_AFTER, STEPS, VOTE_TIMEOUT_S, Array, Held, Track, Whole, array, assemble


@dataclass(frozen=True)
class WholeRule:
    """One class by name, torch's or pytorch_optimizer's.

    Attributes:
        name: of the class.
        options: of its constructor.
        matrices_only: whether it takes parameters of two dimensions only.
        by_use: whether groups say with ``use_muon`` whether they are matrices.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    matrices_only: bool = False
    by_use: bool = False

    def build(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """A new optimizer."""
        torch.manual_seed(0)
        found = getattr(torch.optim, self.name, None) or pytorch_optimizer.load_optimizer(self.name)
        matrices = [param for param in params if param.dim() == 2]
        others = [param for param in params if param.dim() != 2]
        if self.by_use:
            groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
            return found(groups, **self.options)
        return found(matrices if self.matrices_only else list(params), **self.options)


def _make(track: Track, rule: WholeRule, compute: str) -> torch.optim.Optimizer:
    optimizer = rule.build(list(track.params.values()))
    if not track.sharded:
        return optimizer
    return ShardedStateOptimizer(optimizer, track.model, compute=compute, vote_timeout=VOTE_TIMEOUT_S)


def weights_of(track: Track) -> Held:
    """This rank's parts of the weights."""
    held = Held()
    for fqn, local in track.locals.items():
        held.parts[fqn] = (track.boxes[fqn], array(local))
        held.shapes[fqn] = tuple(track.params[fqn].shape)
    return held


def train_job(
    topology: str | None, rules: Sequence[WholeRule], compute: str, root: str | None, dtype: torch.dtype = torch.float32
) -> list[tuple[Held, Held]]:
    """Weights at the save and at the end, of each rule."""
    track = Track(topology, dtype)
    found: list[tuple[Held, Held]] = []
    for index, rule in enumerate(rules):
        track.put(track.start)
        optimizer = _make(track, rule, compute)
        track.train(optimizer, range(SAVED_AFTER))
        middle = weights_of(track)
        if root is not None:
            dcp.save({"optim": optimizer}, checkpoint_id=os.path.join(root, str(index)))
        track.train(optimizer, range(SAVED_AFTER, STEPS))
        found.append((middle, weights_of(track)))
    return found


def resume_job(
    topology: str, rules: Sequence[WholeRule], compute: str, root: str, weights: Sequence[Mapping[str, Array]]
) -> list[Held]:
    """Loads what ``train_job`` saved with stock ``dcp.load`` into a new optimizer, and trains on: weights at the end."""
    track = Track(topology)
    found: list[Held] = []
    for index, rule in enumerate(rules):
        optimizer = _make(track, rule, compute)
        dcp.load({"optim": optimizer}, checkpoint_id=os.path.join(root, str(index)))
        track.put_whole(weights[index])
        track.train(optimizer, range(SAVED_AFTER, STEPS))
        found.append(weights_of(track))
    return found


def unsharded(rules: Sequence[WholeRule], dtype: torch.dtype = torch.float32) -> list[tuple[Whole, Whole]]:
    """The same without shards: weights at the save, and at the end."""
    return [
        (assemble([middle]), assemble([end])) for middle, end in train_job(None, rules, "", None, dtype)
    ]


def unequal(got: Whole, want: Whole) -> list[str]:
    """Names of weights that are not the same bits."""
    return [key for key in want.arrays if got.arrays[key].tobytes() != want.arrays[key].tobytes()]
