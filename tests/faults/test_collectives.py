"""How often ranks communicate in an operation is one number, whatever data they have: a spy counts."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import shardopt
from shardopt import ShardedStateOptimizer
from shardopt.scope.ballot import Ballot
from shardopt.scope.exchange import Parcel
from tests.support.models import Shape, SmallModel, build, local_tensor, set_gradients
from tests.support.ranks import RankPool

# Of 4 ranks the last holds nothing of most, and rank 1 nothing of a head. Plain parameters beside them.
SHAPE = Shape(rows=(1, 3), width=3, hidden=5, ignored=("scale", "gain"), gain=True)
PATTERNS = 50
SCALE = 1024.0


class Spy(TorchDispatchMode):
    """Counts votes, payloads around them, and collectives of torch.distributed, also those of DTensors.

    Attributes:
        seen: what it was -> how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what happens inside."""
        genuine = {(owner, name): getattr(owner, name) for owner, name in ((Ballot, "cast"), (Parcel, "__init__"))}
        for (owner, name), function in genuine.items():
            setattr(owner, name, self._counted(name, function))
        try:
            with self:
                yield
        finally:
            for (owner, name), function in genuine.items():
                setattr(owner, name, function)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            self.seen[{"cast": "vote", "__init__": "payloads"}[name]] += 1
            return function(*args, **options)

        return count


def make(model: SmallModel) -> ShardedStateOptimizer:
    """One group of what is sharded and plain, one of two biases, one without parameters."""
    params = [*model.parameters()]
    inner = torch.optim.AdamW([{"params": params[:-2]}, {"params": params[-2:], "lr": 0.5}, {"params": []}], lr=0.125)
    return ShardedStateOptimizer(inner, model, vote_timeout=30.0)


def give(model: SmallModel, pattern: int, scale: float = 1.0, *, apart: bool = True) -> None:
    """Gradients of a pattern: all ranks lack some; ``apart``, each lacks some of its own, and one may overflow."""
    mine, common = random.Random(f"{pattern}/{dist.get_rank()}"), random.Random(pattern)
    names = [name for name, _ in model.named_parameters()]
    unused = common.sample(names, common.choice([0, 0, 1, 3, len(names)]))
    lacking = mine.sample(names, mine.choice([0, 1, 5, len(names)])) if apart else []
    set_gradients(model, pattern, without={*unused, *lacking})
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    for gradient in gradients:
        gradient.mul_(scale)
    if gradients and scale != 1.0 and mine.random() < 0.2:
        local_tensor(mine.choice(gradients)).view(-1)[:1] = float("inf")


def steps(pattern: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every operation on gradients, which come to ranks as they please."""
    model = build("fsdp", SHAPE)
    made: list[ShardedStateOptimizer] = []
    yield "construct", lambda: made.append(make(model))
    (optimizer,) = made
    give(model, pattern)
    yield "first step", optimizer.step
    for more in (1, 2):
        give(model, pattern + more * PATTERNS)
        yield "step", optimizer.step
    give(model, pattern)
    yield "clip_grad_norm_", lambda: shardopt.clip_grad_norm_(optimizer, 1.0)
    scaler = shardopt.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(1))
    give(model, pattern, SCALE)
    yield "unscale_", lambda: scaler.unscale_(optimizer)
    yield "step, unscaled", lambda: scaler.step(optimizer)
    scaler.update()
    give(model, pattern + PATTERNS, SCALE)
    yield "scaled step", lambda: scaler.step(optimizer)


def checkpoints(directory: str, pattern: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every operation on state, which is there for what has had a gradient: ranks that step apart may not save."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    give(model, pattern, apart=False)
    if pattern % 4:
        optimizer.step()
    state = {"model": model, "optim": optimizer}
    prepared: list[Any] = []
    yield "state_dict", optimizer.state_dict
    # Ranks meet when they save for the first time.
    yield "save" if pattern else "first save", lambda: shardopt.save(state, directory, timeout_s=30.0)
    yield "prepare_load", lambda: prepared.append(optimizer.prepare_load(directory))
    yield "commit", lambda: prepared[0].commit()
    yield "load", lambda: shardopt.load(state, directory, timeout_s=30.0)


def count(directory: str, patterns: int) -> dict[str, list[tuple[tuple[str, int], ...]]]:
    """Operation -> the different counts seen here."""
    found: dict[str, set[tuple[tuple[str, int], ...]]] = {}
    for pattern in range(patterns):
        for name, operation in itertools.chain(steps(pattern), checkpoints(directory, pattern)):
            spy = Spy()
            with spy.watching():
                operation()
            found.setdefault(name, set()).add(tuple(sorted(spy.seen.items())))
    return {name: sorted(counts) for name, counts in found.items()}


def _votes(votes: int, payloads: int = 0) -> tuple[tuple[str, int], ...]:
    return ((("payloads", payloads),) if payloads else ()) + (("vote", votes),)


EXPECTED = {
    "construct": _votes(2),
    "first step": _votes(3, payloads=2),
    "step": _votes(1),
    "clip_grad_norm_": (("c10d.allgather_.default", 1),),
    "unscale_": _votes(1),
    "step, unscaled": _votes(1),
    "scaled step": _votes(2),
    "state_dict": _votes(1),
    "first save": _votes(7, payloads=3),
    "save": _votes(6, payloads=3),
    "prepare_load": _votes(1),
    "commit": _votes(1),
    "load": _votes(4),
}


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_number_of_collectives_per_operation(world_size: int, ranks: RankPool, tmp_path: Any) -> None:
    patterns = PATTERNS if world_size == 2 else PATTERNS // 5
    everywhere = ranks.run(world_size, count, str(tmp_path), patterns)
    first = everywhere[0]
    assert {name: counts for name, counts in first.items() if len(counts) != 1} == {}
    assert all(one == first for one in everywhere)
    assert {name: tuple(dict(*counts).items()) for name, counts in first.items()} == EXPECTED
