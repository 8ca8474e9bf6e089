"""Saving a checkpoint in phases, each voted on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from shardopt.checkpoint.agreement import agree_on_arguments, own_error
from shardopt.checkpoint.contents import check_state, checked_path, collect, kinds_of, usable
from shardopt.checkpoint.files import Writer
from shardopt.checkpoint.participants import scope_of
from shardopt.checkpoint.wrapped import scope_of_wrapped
from shardopt.collector import paused_collector
from shardopt.errors import RankFailureError, ShardoptError
from shardopt.optimizer import ShardedStateOptimizer
from shardopt.portable.storage import why_not_read_back
from shardopt.scope import Scope
from shardopt.scope.verdict import say_ranks
from shardopt.torch_compat import mesh_ranks, without_dynamo

__all__ = ["save"]


@without_dynamo
def save(state: Mapping[str, Any], path: str | os.PathLike[str], *, timeout_s: float = 600.0) -> None:
    """Collective. Saves a dict as ``dcp.save`` does, on every rank or on none; ``dcp.load`` reads it too.

    It returns when the checkpoint is complete. A checkpoint that is in the directory already stays whole until it is
    replaced in one step; when the save fails it is the one that is there.

    Args:
        state: models, optimizers, schedulers, tensors, plain values and dicts of them, by key; see ``dcp.save``.
        path: a directory that all ranks see.
        timeout_s: how long a rank waits in each phase for the others, in seconds. A rank that is stopped or dead is an
            error on all others when it has passed.

    Raises:
        RankFailureError: a rank failed, is missing, or was given something else; it is named, with its cause.
        ScopeError: the ranks that hold what is in the dict did not come together.
        TypeError, ValueError: an argument is not what it must be, on this rank.
    """
    problem: BaseException | None = None
    place = ""
    try:
        check_state(state)
        place = checked_path(path, timeout_s)
    except BaseException as error:
        problem = error
    # The ranks meet whatever is wrong with one's arguments: else the others would wait for it.
    scope = scope_of(state, timeout_s=usable(timeout_s))
    with scope.within(usable(timeout_s)):
        said = {} if problem else {"path": place, **kinds_of(state, scope)}
        agree_on_arguments(scope, "save: keys", said, problem=problem)
        _Save(scope, state, place, timeout_s).run()


class _Save:
    def __init__(self, scope: Scope, state: Mapping[str, Any], place: str, timeout_s: float) -> None:
        self._scope = scope
        self._state = state
        self._timeout_s = timeout_s
        self._is_coordinator = scope.index == 0
        self._planner = DefaultSavePlanner()
        self._writer = Writer(place)

    def run(self) -> None:
        plans = self._collect()
        part, metadata = self._plan(plans)
        results = self._write(part)
        self._finish(metadata, results)

    def _collect(self) -> list[bytes]:
        """Every rank's plan, on the coordinator."""
        problem: BaseException | None = None
        payload = b""
        try:
            found = collect(self._state, self._ask)
            self._planner.set_up_planner(found, self._writer.storage_meta(), self._is_coordinator)
            self._check(self._planner.state_dict)
            self._writer.set_up_storage_writer(self._is_coordinator)
            payload = pickle.dumps(self._writer.prepare_local_plan(self._planner.create_local_plan()))
        except BaseException as error:
            problem = error
        with own_error(problem):
            return self._scope.gather("save: collect", payload, problem=problem)

    def _ask(self, key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, ShardedStateOptimizer):
            return value.state_dict()
        with scope_of_wrapped(value).within(self._timeout_s):
            return value.state_dict()

    def _check(self, flat: Mapping[str, Any]) -> None:
        """Refuses what a load could not put back."""
        problems: list[str] = []
        for key, value in flat.items():
            if isinstance(value, DTensor):
                beyond = set(mesh_ranks(value.device_mesh)).difference(self._scope.ranks)
                if beyond:
                    problems.append(
                        f"{key}: it is on {say_ranks(beyond)} too, which do not take part: from the dict itself only "
                        f"{say_ranks(self._scope.ranks)} can be told. Put the model itself into the dict."
                    )
            elif not hasattr(value, "__create_write_items__"):
                why = why_not_read_back(value)
                if why is not None:
                    problems.append(
                        f"{key}: a {type(value).__name__} {why}; save its state_dict or plain values of it."
                    )
        if problems:
            raise ShardoptError("\n".join(problems))

    def _plan(self, payloads: list[bytes]) -> tuple[bytes, Metadata | None]:
        """This rank's part of the plan for all, and on the coordinator what describes the checkpoint."""
        problem: BaseException | None = None
        metadata: Metadata | None = None
        parts: list[bytes] = []
        try:
            if self._is_coordinator:
                # An object for each part of each entry on each rank, which the collector would look at again and again.
                with paused_collector():
                    plans, metadata = self._planner.create_global_plan([pickle.loads(one) for one in payloads])
                    parts = [pickle.dumps(plan) for plan in self._writer.prepare_global_plan(plans)]
        except BaseException as error:
            problem = error
        return self._scope.scatter("save: plan", parts, problem=problem), metadata

    def _write(self, part: bytes) -> list[list[WriteResult]]:
        """Every rank's results, on the coordinator."""
        problem: BaseException | None = None
        payload = b""
        try:
            plan: SavePlan = self._planner.finish_plan(pickle.loads(part))
            payload = pickle.dumps(self._writer.write(plan, self._planner))
        except BaseException as error:
            problem = error
        try:
            return [pickle.loads(one) for one in self._scope.gather("save: write", payload, problem=problem)]
        except BaseException as error:
            # Unless all ranks know that it has failed, the coordinator may be about to publish these files.
            if problem is not None or _is_verdict(error):
                self._discard(error)
            raise

    def _finish(self, metadata: Metadata | None, results: list[list[WriteResult]]) -> None:
        problem: BaseException | None = None
        late: BaseException | None = None
        try:
            if metadata is not None:
                self._writer.publish(metadata, results)
        except BaseException as error:
            # Interrupted, or failed, when the checkpoint was published already: then the others must not hear of it.
            if self._writer.is_published():
                late = error
            else:
                problem = error
        try:
            self._scope.vote("save: finish", problem=problem)
        except BaseException as error:
            if problem is not None or (isinstance(error, RankFailureError) and self._scope.ranks[0] in error.failures):
                self._discard(error)
                raise
            raise self._what_is_there(error) from error.__cause__
        if self._is_coordinator:
            self._writer.remove_replaced()
        if late is not None:
            raise late

    def _discard(self, error: BaseException) -> None:
        """Removes what this save has written here; the first rank that is there does so for those that are not."""
        missing = error.missing if isinstance(error, RankFailureError) else ()
        first = min(rank for rank in self._scope.ranks if rank not in missing)
        self._writer.discard(of_all=self._scope.rank == first)

    def _what_is_there(self, error: BaseException) -> BaseException:
        """The error of the last vote, with what is in the directory all the same."""
        if not isinstance(error, RankFailureError):
            return error
        coordinator = self._scope.ranks[0]
        known = _is_verdict(error) and coordinator not in error.missing
        there = (
            "the new checkpoint is complete"
            if known
            else f"rank {coordinator} publishes the checkpoint, and may have: the old or the new one is there, complete"
        )
        return RankFailureError(
            f"{error}. In {self._writer.directory}: {there}.",
            operation=error.operation,
            failures=error.failures,
            missing=error.missing,
            disagree=error.disagree,
        )


def _is_verdict(error: BaseException) -> bool:
    """Whether all ranks that get there get this error; not so when the store is gone."""
    return isinstance(error, RankFailureError) and bool(error.failures or error.missing or error.disagree)
