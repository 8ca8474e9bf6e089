"""Checkpoints of several rules in one wrapper, and of rules that keep what no checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp

import shardopt
from shardopt import ShardedStateOptimizer
from tests.ranks import odd_rules
from tests.ranks.trajectories import VOTE_TIMEOUT_S, Array, Held, Track
from tests.ranks.whole_breaks import Optimizer, Session, matrices, rule
from tests.ranks.whole_runs import weights_of


def build_for_checkpoint(session: Session, name: str) -> list[Optimizer]:
    """What is saved: three optimizers that are shown their parameters in three ways, or one odd rule."""
    if name != "three":
        return [getattr(odd_rules, name)(list(session.params.values()))]
    return [
        rule("Muon")(matrices(session), lr=0.02),
        rule("prodigy")([session.params["odd.rows2"]], lr=1.0),
        torch.optim.AdamW([session.params["odd.idle"]], lr=0.1),
    ]


def save_job(topology: str | None, name: str, how: str, root: str) -> tuple[Held, Held, bool]:
    """Weights at the save and three steps later, and whether keys were the same before the first step."""
    torch.set_num_threads(1)
    session = Session(Track(topology), "auto")
    optimizer = session.wrap(*build_for_checkpoint(session, name))
    keys = set(optimizer.state_dict()) if topology else set()
    session.track.train(optimizer, range(3))
    middle = weights_of(session.track)
    same = not topology or set(optimizer.state_dict()) == keys
    if topology:
        if how == "dcp":
            dcp.save({"optim": optimizer}, checkpoint_id=root)
        else:
            shardopt.save({"optim": optimizer}, root)
    session.track.train(optimizer, range(3, 6))
    return middle, weights_of(session.track), same


def load_job(topology: str, name: str, how: str, root: str, weights: Mapping[str, Array]) -> Held:
    """Loads into optimizers that have been elsewhere, and trains on: last weights."""
    torch.set_num_threads(1)
    session = Session(Track(topology), "auto")
    optimizer = session.wrap(*build_for_checkpoint(session, name))
    session.track.train(optimizer, [8, 9])
    if how == "dcp":
        dcp.load({"optim": optimizer}, checkpoint_id=root)
    else:
        shardopt.load({"optim": optimizer}, root)
    session.track.put_whole(weights)
    session.track.train(optimizer, range(3, 6))
    return weights_of(session.track)


def own_coupled_job() -> str:
    """A coupled rule over parameters that are each rank's own: what wrapping it says."""
    track = Track("fsdp2+plain")
    inner = odd_rules.CoupledChangesForm(list(track.params.values()))
    try:
        ShardedStateOptimizer(inner, track.model, plain="per_rank", consensus="off", vote_timeout=VOTE_TIMEOUT_S)
    except shardopt.ShardoptError as error:
        return f"{type(error).__name__}: {error}"
    return ""
