"""Runs that were resumed, beside runs that were not: where they differ, and where they may.

The equality rule: right after a load the state is the saved one bit for bit. The next steps equal the uninterrupted
sharded run and the unsharded run bit for bit too, except where ``fused`` (and any rule in bf16) meets a shard that is
not a multiple of 64 elements: torch's vector bodies and scalar tails round differently, so it shows where a shard ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tests.ranks.topologies import TOPOLOGIES
from tests.ranks.trajectories import Array, Run, Whole, assemble, resume_job, save_job, train_unsharded
from tests.support.ranks import RankPool
from tests.support.rules import Rule

# In units of fp32's spacing at the largest element of the array; twice the most that any of these runs shows.
MAX_ROUNDING = 4.0
# Of bf16 in the same units: it has 16 bits less. Twice the most, again.
MAX_ROUNDING_BF16 = 2.0 * 2**16
JOB_S = 500.0

Outcome = dict[int, tuple[Whole, Whole]]


def differences(got: Whole, want: Whole, *, may_round: Callable[[str], float]) -> list[str]:
    """Keys in which ``got`` differs from ``want`` by more than the equality rule allows.

    Args:
        got: one run.
        want: the other.
        may_round: by how many roundings a key's array may differ; 0 asks for the same bits.
    """
    found = [f"{key}: {got.values.get(key)} for {v}" for key, v in want.values.items() if got.values.get(key) != v]
    if got.values.keys() != want.values.keys() or got.arrays.keys() != want.arrays.keys():
        extra = (got.values.keys() ^ want.values.keys()) | (got.arrays.keys() ^ want.arrays.keys())
        found.append(f"only in one run: {sorted(extra)}")
    for key in want.arrays.keys() & got.arrays.keys():
        if got.arrays[key].tobytes() != want.arrays[key].tobytes():
            off = rounding(got.arrays[key], want.arrays[key])
            if not 0 < off <= may_round(key):
                found.append(f"{key}: off by {off:.3g} roundings of its largest element")
    return found


def rounding(got: Array, want: Array) -> float:
    """The largest difference, in units of fp32's spacing at the largest element; inf if they cannot be compared."""
    if got.shape != want.shape or got.dtype != want.dtype or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got.astype(np.float64) - want).max() / np.spacing(np.abs(want).max()))


def never(key: str) -> float:
    """Nothing may differ."""
    return 0.0


def where_shards_end(rule: Rule, dtype: torch.dtype, *runs: Whole) -> Callable[[str], float]:
    """The rounding that is allowed under the rule to a key that meets a scalar tail in one of the runs."""
    allowed = MAX_ROUNDING if rule.options.get("fused") else 0.0
    if dtype == torch.bfloat16:
        allowed = MAX_ROUNDING_BF16
    return lambda key: allowed if any(count % 64 for run in runs for count in run.elements[key]) else 0.0


def label(index: int, rule: Rule) -> str:
    """The name of a configuration in a message."""
    return f"{index} {rule}"


@dataclass(repr=False)  # pytest would spell out every array of a failure
class Saves:
    """Runs that saved, by topology, and runs that resumed them: made when first asked for, then kept."""

    pool: RankPool
    root: Path
    rules: Mapping[int, Rule]
    dtype: torch.dtype = torch.float32
    _made: dict[str, Outcome] = field(default_factory=dict)
    _unsharded: Outcome = field(default_factory=dict)
    _resumed: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def of(self, topology: str) -> Outcome:
        """By rule: what the run held at its save, and three steps later."""
        if topology not in self._made:
            args = (topology, self.rules, self._path(topology), self.dtype)
            ranks = self.pool.run(TOPOLOGIES[topology].world_size, save_job, *args, deadline_s=JOB_S)
            self._made[topology] = _whole(ranks)
        return self._made[topology]

    def unsharded(self) -> Outcome:
        """By rule: the same without sharding and interruption."""
        if not self._unsharded:
            self._unsharded = train_unsharded(self.rules, self.dtype)
        return self._unsharded

    def resume(self, source: str, target: str) -> Outcome:
        """By rule: what a run on ``target`` holds right after loading what ``source`` saved, and three steps later."""
        if (source, target) not in self._resumed:
            self._resumed[source, target] = self.resume_some(source, target, "fresh", self.rules)
        return self._resumed[source, target]

    def resume_some(self, source: str, target: str, how: str, rules: Mapping[int, Rule]) -> Outcome:
        """The same with some rules, loaded as `resume_job` says."""
        weights = {index: middle.arrays for index, (middle, _) in self.of(source).items() if index in rules}
        args = (target, rules, self._path(source), how, weights, self.dtype)
        return _whole(self.pool.run(TOPOLOGIES[target].world_size, resume_job, *args, deadline_s=JOB_S))

    def _path(self, topology: str) -> str:
        return str(self.root / topology)


def _whole(ranks: list[dict[int, Run]]) -> Outcome:
    return {i: (assemble([r[i].middle for r in ranks]), assemble([r[i].end for r in ranks])) for i in ranks[0]}


def compare_resumed(saves: Saves, source: str, target: str) -> tuple[int, list[str]]:
    """Saves on ``source``, resumes on ``target``, and holds the result against the equality rule.

    Returns:
        How many values were compared, and every one that differs: configuration, comparison and key.
    """
    saved, resumed, unsharded = saves.of(source), saves.resume(source, target), saves.unsharded()
    assert len(saved) == len(resumed) == len(unsharded) == len(saves.rules)
    cells = 0
    found: list[str] = []
    for index, rule in saves.rules.items():
        (at_save, uninterrupted), (loaded, end), (_, oracle) = saved[index], resumed[index], unsharded[index]
        where = where_shards_end(rule, saves.dtype, at_save, loaded, oracle)
        same_run = never if source == target else where
        comparisons = {
            "state after the load": differences(loaded, at_save, may_round=never),
            "against the uninterrupted run": differences(end, uninterrupted, may_round=same_run),
            "against the unsharded run": differences(end, oracle, may_round=where),
        }
        cells += len(comparisons) * (len(oracle.arrays) + len(oracle.values))
        found += [f"{label(index, rule)} {what}: {item}" for what, items in comparisons.items() for item in items]
    return cells, found
