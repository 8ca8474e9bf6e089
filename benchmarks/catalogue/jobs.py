"""What ranks do for the catalogue: train one class unsharded, wrapped or bare, save half way, resume on any number.

Every function here runs in the rank pool's workers, found by its name.
"""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.catalogue.models import MODELS
from benchmarks.catalogue.protocols import classes, protocol_of
from benchmarks.catalogue.sessions import SEED, Session, ShardedSession, Weights
from benchmarks.catalogue.training import train
from shardopt import ShardedStateOptimizer
from shardopt.errors import PresentationError
from tests.support.ranks import reached

__all__ = [
    "NUM_STEPS",
    "SAVED_AFTER",
    "Chosen",
    "Trained",
    "choose",
    "resume_bare",
    "resume_wrapped",
    "train_bare",
    "train_unsharded",
    "train_wrapped",
]

NUM_STEPS = 30
SAVED_AFTER = 13

_SEED = 11
_SEED_OF_FRESH = 12
_VOTE_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """How the wrapper shows an optimizer its parameters.

    Attributes:
        asked: what the wrapper was asked for.
        compute: the presentation's name, or ``"refused"``.
        reason: why; of a refusal, the error's text.
        seconds: how long it took to wrap the optimizers of one model, whose classes had not been met before.
    """

    asked: str
    compute: str
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to on rank 0; on other ranks it is empty.

    Attributes:
        weights: whole final weights by ``"<model>.<parameter>"``.
        initial: the same before the first step, of the oracle.
    """

    weights: Weights = field(default_factory=dict)
    initial: Weights = field(default_factory=dict)


def train_unsharded(name: str) -> Trained:
    """The oracle: no wrapper, no sharding."""
    initial: dict[str, Any] = {}
    final: dict[str, Any] = {}
    with _quiet():
        for key, model in MODELS.items():
            session = Session(model(_SEED))
            initial |= _named(key, session.weights())
            optimizers = protocol_of(name).make(classes()[name], session.model)
            train(session, optimizers, protocol_of(name), range(NUM_STEPS))
            final |= _named(key, session.weights())
    return Trained(weights=final, initial=initial)


def choose(name: str, compute: str) -> Chosen:
    """Collective. Wraps the optimizers of model ``a``, and takes no step."""
    with _quiet():
        session = _sharded("a", _SEED)
        begin = time.perf_counter()
        try:
            wrapped = _wrap(name, session.model, compute)
        except PresentationError as error:
            seconds = time.perf_counter() - begin
            return Chosen(asked=compute, compute="refused", reason=str(error), seconds=seconds)
        return _chosen(wrapped, compute, time.perf_counter() - begin)


def train_wrapped(name: str, compute: str, directory: Path) -> Trained:
    """Collective. All steps under the wrapper, with a save on the way."""
    final: dict[str, Any] = {}
    with _quiet():
        for key in MODELS:
            reached("wrap")
            session = _sharded(key, _SEED)
            wrapped = _wrap(name, session.model, compute)
            reached("step")
            train(session, [wrapped], protocol_of(name), range(SAVED_AFTER))
            reached("save")
            dcp.save({"model": session.model, "optim": wrapped}, checkpoint_id=str(directory / key))
            reached("step after save")
            train(session, [wrapped], protocol_of(name), range(SAVED_AFTER, NUM_STEPS))
            final |= _named(key, session.weights())
    return _on_rank_0(Trained(weights=final))


def resume_wrapped(name: str, compute: str, directory: Path) -> Trained:
    """Collective. Loads into a fresh model and a fresh optimizer, and takes the steps that are left."""
    final: dict[str, Any] = {}
    with _quiet():
        for key in MODELS:
            session = _sharded(key, _SEED_OF_FRESH)
            reached("wrap")
            wrapped = _wrap(name, session.model, compute)
            reached("load")
            dcp.load({"model": session.model, "optim": wrapped}, checkpoint_id=str(directory / key))
            reached("step after load")
            train(session, [wrapped], protocol_of(name), range(SAVED_AFTER, NUM_STEPS))
            final |= _named(key, session.weights())
    return _on_rank_0(Trained(weights=final))


def train_bare(name: str, directory: Path) -> Trained:
    """Collective. The same with the optimizer on DTensors, its state saved as torch's documentation does it."""
    final: dict[str, Any] = {}
    with _quiet():
        for key in MODELS:
            session = _sharded(key, _SEED)
            reached("make")
            optimizers = protocol_of(name).make(classes()[name], session.model)
            reached("step")
            train(session, optimizers, protocol_of(name), range(SAVED_AFTER))
            reached("save")
            model_state, state = get_state_dict(session.model, optimizers)
            dcp.save({"model": model_state, "optim": state}, checkpoint_id=str(directory / key))
            reached("step after save")
            train(session, optimizers, protocol_of(name), range(SAVED_AFTER, NUM_STEPS))
            final |= _named(key, session.weights())
    return _on_rank_0(Trained(weights=final))


def resume_bare(name: str, directory: Path) -> Trained:
    """Collective. The same with the optimizer on DTensors, its state loaded as torch's documentation does it."""
    final: dict[str, Any] = {}
    with _quiet():
        for key in MODELS:
            session = _sharded(key, _SEED_OF_FRESH)
            reached("make")
            optimizers = protocol_of(name).make(classes()[name], session.model)
            reached("load")
            model_state, state = get_state_dict(session.model, optimizers)
            loaded: dict[str, Any] = {"model": model_state, "optim": state}
            dcp.load(loaded, checkpoint_id=str(directory / key))
            set_state_dict(
                session.model, optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"]
            )
            reached("step after load")
            train(session, optimizers, protocol_of(name), range(SAVED_AFTER, NUM_STEPS))
            final |= _named(key, session.weights())
    return _on_rank_0(Trained(weights=final))


def _sharded(key: str, seed: int) -> ShardedSession:
    return ShardedSession(MODELS[key](seed), MODELS[key](seed))


def _wrap(name: str, model: Any, compute: str) -> ShardedStateOptimizer:
    optimizers: Sequence[Any] = protocol_of(name).make(classes()[name], model)
    torch.manual_seed(SEED)
    return ShardedStateOptimizer(optimizers, model, compute=compute, vote_timeout=_VOTE_TIMEOUT_S)


def _chosen(wrapped: ShardedStateOptimizer, asked: str, seconds: float) -> Chosen:
    """Of several optimizers, what was chosen for the first: the others are AdamW."""
    said = re.search(r"compute='(\w+)' because (.*)", wrapped.explain())
    if said is None:
        raise RuntimeError(f"explain() names no presentation: {wrapped.explain()}")
    return Chosen(asked=asked, compute=said[1], reason=said[2], seconds=seconds)


def _named(key: str, weights: Weights) -> dict[str, Any]:
    return {f"{key}.{name}": value for name, value in weights.items()}


def _on_rank_0(trained: Trained) -> Trained:
    return trained if dist.get_rank() == 0 else Trained()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that classes of other libraries log and warn of."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
