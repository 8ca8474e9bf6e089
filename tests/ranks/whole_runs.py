"""Runs of rules that need whole parameters, on one topology and unsharded: train, save, load elsewhere, train on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_optimizer
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

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
    """Loads what ``train_job`` saved into new optimizers, with stock ``dcp.load``, and trains on: last weights."""
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
    return [(assemble([middle]), assemble([end])) for middle, end in train_job(None, rules, "", None, dtype)]


def unequal(got: Whole, want: Whole) -> list[str]:
    """Names of weights that are not the same bits."""
    return [key for key in want.arrays if got.arrays[key].tobytes() != want.arrays[key].tobytes()]


class FailsOnce(torch.optim.SGD):
    """Raises in the middle of its second update, where it has a parameter of one row."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        # Neither a number nor a list, which would be part of the state, and count again after a load.
        self.calls = itertools.count(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = next(self.calls)
        super().step()
        if number == 2 and any(param.shape == (1, 3) for group in self.param_groups for param in group["params"]):
            raise ValueError("does not converge")


def failing_job(topology: str, root: str) -> tuple[list[str], bool, str, list[str]]:
    """A rule that fails on one rank alone: errors, whether weights changed, what a save says, and after a load."""
    track = Track(topology)
    params = list(track.params.values())
    optimizer = ShardedStateOptimizer(
        FailsOnce(params, lr=0.125, momentum=0.9), track.model, compute="owner", vote_timeout=VOTE_TIMEOUT_S
    )
    errors: list[str] = []
    track.train(optimizer, [0])
    dcp.save({"optim": optimizer}, checkpoint_id=root)
    before = {fqn: local.clone() for fqn, local in track.locals.items()}
    for step in (1, 2):
        track.give_gradients(step)
        try:
            optimizer.step()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    same = all(torch.equal(before[fqn], local) for fqn, local in track.locals.items())
    try:
        dcp.save({"optim": optimizer}, checkpoint_id=os.path.join(root, "again"))
        said = ""
    except BaseException as error:
        said = str(error)
    dcp.load({"optim": optimizer}, checkpoint_id=root)
    track.train(optimizer, [1])
    return (
        errors,
        same,
        said,
        [fqn for fqn, old in before.items() if old.numel() and torch.equal(old, track.locals[fqn])],
    )


def one_sided_job(topology: str, compute: str, fqn: str, rank: int) -> tuple[str, bool, bool]:
    """A gradient that is missing on one rank alone: the error, whether weights changed, whether the next step works."""
    track = Track(topology)
    rule = WholeRule("AdamW", {"lr": 0.125})
    optimizer = _make(track, rule, compute)
    track.give_gradients(0)
    if torch.distributed.get_rank() == rank:
        track.params[fqn].grad = None
    before = {name: local.clone() for name, local in track.locals.items()}
    said = ""
    try:
        optimizer.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    same = all(torch.equal(before[name], local) for name, local in track.locals.items())
    track.train(optimizer, [1])
    moved = not all(torch.equal(before[name], local) for name, local in track.locals.items())
    return said, same, moved


def memory_job(topology: str, rule: WholeRule, compute: str, steps: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Shapes of the leaves between steps, and the rank's number of state tensors: nothing whole is kept but state."""
    track = Track(topology)
    optimizer: Any = _make(track, rule, compute)
    track.train(optimizer, range(steps))
    leaves = [tuple(shown.leaf.shape) for part in optimizer._inventory.parts for shown in part.presentation._shown]
    return leaves, [len(optimizer.state)]


class ByRank(torch.optim.SGD):
    """Updates by the rank's number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(torch.distributed.get_rank() + 1.0)


def differing_job(topology: str) -> tuple[str, bool]:
    """A rule that gives other results on other ranks: the error, and whether weights are as they were."""
    track = Track(topology)
    optimizer = ShardedStateOptimizer(
        ByRank(list(track.params.values()), lr=0.125), track.model, compute="replicated", vote_timeout=VOTE_TIMEOUT_S
    )
    before = {name: local.clone() for name, local in track.locals.items()}
    said = ""
    try:
        track.train(optimizer, [0])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, all(torch.equal(before[name], local) for name, local in track.locals.items())


class SeesLoss(torch.optim.SGD):
    """Keeps the loss that its closure returns."""

    seen = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.seen = float(closure())
        return self.seen


def loss_job(topology: str) -> tuple[float, float]:
    """Ranks whose closures return different losses: what the rule has seen, and what the step returns."""
    track = Track(topology)
    inner = SeesLoss(list(track.params.values()), lr=0.125)
    optimizer: Any = ShardedStateOptimizer(inner, track.model, compute="replicated", vote_timeout=VOTE_TIMEOUT_S)

    def closure() -> Tensor:
        track.give_gradients(0)
        return torch.tensor(2.0 + torch.distributed.get_rank())

    return float(optimizer.step(closure)), inner.seen


def failing_closure_job(topology: str, rank: int, at: int, compute: str) -> tuple[str, bool, str]:
    """A closure that fails on one rank: the error, whether the group works on, and what the next step says."""
    track = Track(topology)
    params = [param for fqn, param in track.params.items() if fqn != "odd.idle"]
    inner: torch.optim.Optimizer = torch.optim.SGD(params, momentum=0.5)
    if compute == "replicated":
        inner = torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe")
    optimizer: Any = ShardedStateOptimizer(inner, track.model, compute=compute, vote_timeout=VOTE_TIMEOUT_S)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        if calls == at and torch.distributed.get_rank() == rank:
            raise ValueError("no more data")
        track.give_gradients(calls)
        return 1.0

    said: list[str] = []
    for _ in range(2):
        optimizer.zero_grad()
        try:
            optimizer.step(closure)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    number = torch.ones(())
    torch.distributed.all_reduce(number)
    return said[0], float(number) == torch.distributed.get_world_size(), said[1]


def explained_job(topology: str) -> list[str]:
    """What three wrappers say of themselves: owned matrices, a fused rule on uneven shards, and one with a tensor."""
    track = Track(topology)
    said: list[str] = []
    for inner in (
        torch.optim.Muon([param for param in track.params.values() if param.dim() == 2]),
        torch.optim.AdamW(track.params.values(), fused=True),
        torch.optim.SGD(track.params.values()),
    ):
        if isinstance(inner, torch.optim.SGD):
            inner.scales = torch.ones(3)  # pyrefly: ignore
        said.append(ShardedStateOptimizer(inner, track.model, vote_timeout=VOTE_TIMEOUT_S).explain())
    return said


class KeepsViews(torch.optim.SGD):
    """Remembers the parameter, not a copy of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["old"] = param.data


def views_job(topology: str) -> str:
    """What a rule that keeps views is told."""
    track = Track(topology)
    inner = KeepsViews(list(track.params.values()), lr=0.125)
    optimizer = ShardedStateOptimizer(inner, track.model, compute="owner", vote_timeout=VOTE_TIMEOUT_S)
    try:
        track.train(optimizer, [0])
    except Exception as error:
        return str(error)
    return ""


def unfreezing_job(topology: str | None, compute: str) -> Held:
    """A parameter is frozen at first, and trained from the third step on."""
    track = Track(topology)
    track.put(track.start)
    frozen = track.params["odd.row.weight"]
    frozen.requires_grad_(False)
    optimizer = _make(track, WholeRule("AdamW", {"lr": 0.1}), compute)
    for step in range(4):
        frozen.requires_grad_(step >= 2)
        track.give_gradients(step)
        if step < 2:
            frozen.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(track)


def some_ranks_job(ranks: Sequence[int], compute: str) -> tuple[Any, float]:
    """An optimizer on some ranks of the world only; the others go on, and all meet at the end."""
    mesh = DeviceMesh("cpu", list(ranks))
    weights: Any = None
    if torch.distributed.get_rank() in ranks:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 5)
        fully_shard(model, mesh=mesh)
        inner = torch.optim.Adafactor(model.parameters(), lr=0.1)
        optimizer = ShardedStateOptimizer(inner, model, compute=compute, vote_timeout=VOTE_TIMEOUT_S)
        for step in range(3):
            model(torch.full((2, 6), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [array(param.full_tensor().detach()) for param in model.parameters()]  # type: ignore[operator]
    number = torch.ones(())
    torch.distributed.all_reduce(number)
    return weights, float(number)


def odd_state_job(topology: str, compute: str, rank: int) -> tuple[str, str, bool, list[str]]:
    """One rank keeps state that cannot be saved: error, cause, whether the group works on, keys once mended."""
    track = Track(topology)
    optimizer: Any = _make(track, WholeRule("AdamW", {"lr": 0.1}), compute)
    track.train(optimizer, [0])
    here = torch.distributed.get_rank() == rank
    state = next(iter(optimizer.state.values()))
    if here:
        state["odd"] = object()
    said, cause = "", ""
    try:
        optimizer.state_dict()
    except Exception as error:
        said, cause = f"{type(error).__name__}: {error}", str(error.__cause__)
    number = torch.ones(())
    torch.distributed.all_reduce(number)
    state.pop("odd", None)
    return said, cause, float(number) == torch.distributed.get_world_size(), sorted(optimizer.state_dict())


def alternating_job(topology: str | None, rule: WholeRule, compute: str) -> Held:
    """Every second step has gradients of every second parameter only, on all ranks alike."""
    track = Track(topology)
    track.put(track.start)
    optimizer = _make(track, rule, compute)
    for step in range(5):
        track.give_gradients(step)
        for index, param in enumerate(track.params.values()):
            if step % 2 and index % 2:
                param.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(track)
