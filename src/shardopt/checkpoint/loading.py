"""Loading a checkpoint in phases, each voted on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from shardopt.checkpoint.agreement import agree, agree_on_arguments, own_error
from shardopt.checkpoint.contents import check_state, checked_path, collect, kinds_of, usable
from shardopt.checkpoint.participants import scope_of
from shardopt.checkpoint.target import Targets
from shardopt.checkpoint.wrapped import names_of_wrapped, poison, prepare_unvoted, run_post_hooks
from shardopt.errors import LoadError, RankFailureError, ShardoptError
from shardopt.optimizer import ShardedStateOptimizer
from shardopt.portable.storage import Storage, foreign
from shardopt.scope import Scope
from shardopt.staging.options import LoadOptions
from shardopt.staging.prepared import PreparedLoad
from shardopt.staging.report import Report
from shardopt.torch_compat import without_dynamo

__all__ = ["load"]

_METADATA = ".metadata"
_MOST_SHOWN = 20


@without_dynamo
def load(
    state: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    fresh: Sequence[str] = (),
    hyperparameters: str | Mapping[str, Any] = "checkpoint",
    dtype: str = "same",
    finite: str = "error",
    timeout_s: float = 600.0,
) -> dict[str, Report]:
    """Collective. Loads what ``save`` or ``dcp.save`` saved into a dict like theirs, on every rank or on none.

    Everything is read beside what is live and checked first, with all problems in one error; nothing changes before
    all ranks know that all is well. Tensors are copied into and keep their identity; models, schedulers and the rest
    then get their ``load_state_dict``, and plain values are put into the dict. Pickled values are read only where
    ``torch.load(weights_only=True)`` would, or if they are NumPy's.

    Args:
        state: models, optimizers, schedulers, tensors, plain values and dicts of them, by key.
        path: the checkpoint's directory.
        strict: False takes what both sides have. Keys of the checkpoint beside those of the dict are never wanted.
        fresh: patterns of names (``"head.*"``) of parameters whose optimizer state starts anew. Tensors of such names
            are loaded where they fit and keep their values where they do not, which the report says.
        hyperparameters: see ``prepare_load``.
        dtype: ``"same"``, or ``"live"`` to convert floating-point tensors to what is here.
        finite: whether infinities and NaNs in optimizers' state are an error, ``"error"`` or ``"report"``.
        timeout_s: how long a rank waits in each phase for the others, in seconds.

    Returns:
        What was found, for each key of the dict.

    Raises:
        LoadError: something does not fit; every problem is listed and nothing was changed.
        RankFailureError: that is so on another rank, or a rank failed, is missing, or was given something else.
        ScopeError: the ranks that hold what is in the dict did not come together.
        TypeError, ValueError: an argument is not what it must be, on this rank.
    """
    problem: BaseException | None = None
    place, options = "", LoadOptions()
    try:
        check_state(state)
        if not isinstance(state, MutableMapping):
            raise TypeError(f"state is a {type(state).__name__}; values are put into it, so it must be a dict.")
        place = checked_path(path, timeout_s)
        options = LoadOptions.of(
            strict=strict, fresh=fresh, hyperparameters=hyperparameters, dtype=dtype, finite=finite
        )
    except BaseException as error:
        problem = error
    # The ranks meet whatever is wrong with one's arguments: else the others would wait for it.
    scope = scope_of(state, timeout_s=usable(timeout_s))
    with scope.within(usable(timeout_s)):
        said = {} if problem else {"options": options.spelled(), **kinds_of(state, scope)}
        agree_on_arguments(scope, "load: keys", said, problem=problem)
        return _Load(scope, state, Path(place), options).run()


class _Load:
    def __init__(self, scope: Scope, state: MutableMapping[str, Any], place: Path, options: LoadOptions) -> None:
        self._scope = scope
        self._state = state
        self._place = place
        self._options = options
        self._optimizers = {key: one for key, one in sorted(state.items()) if isinstance(one, ShardedStateOptimizer)}
        self._prepared: dict[str, PreparedLoad] = {}

    def run(self) -> dict[str, Report]:
        storage, targets = self._plan()
        self._read(storage, targets)
        self._commit(targets)
        found = targets.reports | {key: prepared.report for key, prepared in self._prepared.items()}
        return {key: found[key] for key in self._state}

    def _plan(self) -> tuple[Storage, Targets]:
        """Opens the checkpoint, the same one on every rank, and asks for the states it goes into."""
        problem: BaseException | None = None
        opened: tuple[Storage, Targets] | None = None
        digest = ""
        try:
            rest = {key: value for key, value in self._state.items() if key not in self._optimizers}
            targets = Targets.of(collect(rest, lambda _, value: value.state_dict()))
            storage = self._open()
            digest = hashlib.blake2b((self._place / _METADATA).read_bytes(), digest_size=16).hexdigest()
            opened = storage, targets
        except BaseException as error:
            problem = error
        agree(self._scope, "load: plan", {"the checkpoint, by a digest of its metadata": digest}, problem=problem)
        assert opened is not None  # a plan that did not fail has opened it
        return opened

    def _open(self) -> Storage:
        try:
            return Storage(self._place)
        except Exception as error:
            problem = f"reading {_METADATA} failed: {type(error).__name__}: {error}{foreign(self._place)}"
            raise LoadError(f"{self._place} cannot be loaded; nothing was changed: {problem}", [problem]) from error

    def _read(self, storage: Storage, targets: Targets) -> None:
        """Reads and checks everything; the vote on it is the last thing before the commit."""
        problem: BaseException | None = None
        try:
            problems = self._prepare_all(storage, targets)
            if problems:
                problem = LoadError(self._summary(problems), problems)
        except BaseException as error:
            problem = error
        with own_error(problem):
            self._scope.vote("load: read", problem=problem)

    def _prepare_all(self, storage: Storage, targets: Targets) -> list[str]:
        targets.read(storage, self._options, set(self._optimizers))
        problems = [
            one if one.startswith(key) else f"{key}: {one}"
            for key, report in targets.reports.items()
            for one in report.problems
        ]
        for key, optimizer in self._optimizers.items():
            try:
                self._prepared[key] = prepare_unvoted(optimizer, storage, key, self._options)
            except LoadError as error:
                problems += [f"{key}: {one}" for one in error.problems]
            except ShardoptError as error:
                problems.append(f"{key}: {error}")
        known = [name for one in self._optimizers.values() for name in names_of_wrapped(one)]
        idle = self._options.idle_patterns([*known, *targets.names()])
        if idle:
            problems.append(f"fresh={idle} matches nothing in the dict.")
        return problems

    def _summary(self, problems: Sequence[str]) -> str:
        shown = "\n".join(f"  - {problem}" for problem in problems[:_MOST_SHOWN])
        more = f"\n  - and {len(problems) - _MOST_SHOWN} more" * (len(problems) > _MOST_SHOWN)
        count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
        return f"{self._place} cannot be loaded ({count}); nothing was changed:\n{shown}{more}"

    def _commit(self, targets: Targets) -> None:
        problem: BaseException | None = None
        try:
            with torch.no_grad():
                self._put(targets)
        except BaseException as error:
            problem = error
        try:
            self._scope.vote("load: commit", problem=problem)
        except BaseException as error:
            for optimizer in self._optimizers.values():
                poison(optimizer, error)
            if not isinstance(error, RankFailureError):
                raise
            raise RankFailureError(
                f"{error}. What was loaded may be in place in part, on any rank: load a good checkpoint to go on.",
                operation=error.operation,
                failures=error.failures,
                missing=error.missing,
            ) from error.__cause__

    def _put(self, targets: Targets) -> None:
        """Models, then optimizers, then everything else."""
        keys = sorted(targets.states)
        models = [key for key in keys if isinstance(self._state[key], nn.Module)]
        for key in models:
            self._state[key].load_state_dict(targets.fill(key))
        for prepared in self._prepared.values():
            prepared.commit()
        for key in keys:
            if key not in models:
                filled = targets.fill(key)
                value = self._state[key]
                if isinstance(value, Stateful):
                    value.load_state_dict(filled)
                else:
                    self._state[key] = filled
        for optimizer in self._optimizers.values():
            run_post_hooks(optimizer)
