"""A load that is known to be good on every rank and waits to be committed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from shardopt.errors import LoadError, PresentationError, RankFailureError, StaleLoadError
from shardopt.scope import Scope
from shardopt.scope.verdict import say_ranks
from shardopt.staging.fingerprint import Fingerprint
from shardopt.staging.options import LoadOptions
from shardopt.staging.prepare import Plan
from shardopt.staging.report import Report
from shardopt.torch_compat import without_dynamo

__all__ = ["PreparedLoad", "agree"]


def agree(
    scope: Scope, plan: Plan | None, failure: BaseException | None, *, options: LoadOptions | None, voting: bool
) -> Plan:
    """Collective. Makes any rank's problem every rank's error.

    Raises:
        LoadError: this rank found problems (all of them are listed), or its reading failed.
        RankFailureError: another rank did, or ranks read different checkpoints or were given different options.
    """
    if failure is None and plan is not None and plan.report.problems:
        failure = LoadError(plan.report.summary(), plan.report.problems)
    said = ""
    try:
        said = options.spelled() if options is not None else ""
    except Exception as error:
        # Of a given value that cannot be spelled: everybody's error too.
        failure = failure or error
    digest = b"" if plan is None else hashlib.blake2b(plan.digest + said.encode(), digest_size=16).digest()
    if voting:
        try:
            scope.vote("prepare_load", problem=failure, digest=digest if failure is None else b"")
        except Exception as verdict:
            # A rank's own problems are worth more to it than the vote's short text of them.
            if isinstance(failure, LoadError):
                raise failure from failure.__cause__ or (verdict if verdict is not failure else None)
            if isinstance(verdict, RankFailureError) and verdict.disagree and not verdict.failures:
                raise _disagreement(verdict) from None
            raise
    if failure is not None:
        raise failure
    if plan is None:
        raise AssertionError("a load that did not fail has a plan")
    return plan


def _disagreement(verdict: RankFailureError) -> RankFailureError:
    return RankFailureError(
        "prepare_load: ranks disagree: they read different checkpoints, were given different options, or keep "
        f"different group values; alike are {' / '.join(map(say_ranks, verdict.disagree.values()))}. Nothing was "
        "changed. Give every rank the same path, options and hyperparameters.",
        operation=verdict.operation,
        disagree=verdict.disagree,
    )


class PreparedLoad:
    """A checked load. ``commit`` puts it in place; dropping it changes nothing.

    Attributes:
        report: what will be restored, and notes on differences that are handled.
    """

    def __init__(
        self,
        plan: Plan,
        scope: Scope,
        *,
        fingerprint: Callable[[], Fingerprint],
        check_identity: Callable[[], None],
        voting: bool,
        committed: Callable[[BaseException | None], None],
    ) -> None:
        self.report: Report = plan.report
        self._plan: Plan | None = plan
        self._scope = scope
        self._fingerprint = fingerprint
        self._check_identity = check_identity
        self._prepared = fingerprint()
        self._voting = voting
        self._committed = committed

    def _check_fresh(self) -> None:
        if self._plan is None:
            raise StaleLoadError("this load has been committed already; prepare it again.")
        moved = self._prepared.difference(self._fingerprint())
        if moved is not None:
            raise StaleLoadError(f"{moved} after the load was prepared; nothing was changed. Prepare it again.")
        try:
            self._check_identity()
        except PresentationError as error:
            raise StaleLoadError(f"nothing was changed: {error}") from error
        outdated = self._plan.why_outdated()
        if outdated is not None:
            raise StaleLoadError(f"nothing was changed: {outdated}")

    @without_dynamo
    def commit(self) -> None:
        """Collective. Puts the loaded state and group values in place, on every rank or on none.

        Live tensors, group dicts and a tensor ``lr`` keep their identity and are copied into; weights,
        gradients, RNG and hooks are not touched, and nothing steps.

        Raises:
            StaleLoadError: this load was committed already, or the optimizer has moved since it was prepared.
            RankFailureError: that is so on another rank.
        """
        problem: BaseException | None = None
        try:
            self._check_fresh()
        except BaseException as error:
            problem = error
        if self._voting:
            try:
                self._scope.vote("commit", problem=problem)
            except Exception as verdict:
                if problem is not None:
                    raise problem from problem.__cause__ or (verdict if verdict is not problem else None)
                raise
        if problem is not None or self._plan is None:
            raise problem or AssertionError("a load without a problem has a plan")
        plan, self._plan = self._plan, None
        try:
            with torch.no_grad():
                plan.commit()
        except BaseException as error:
            self._committed(error)
            raise
        self._committed(None)
