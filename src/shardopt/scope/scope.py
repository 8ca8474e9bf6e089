"""The ranks that hold an optimizer's parameters, and how they agree."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from torch import distributed as dist

from shardopt.errors import RankFailureError, ScopeError
from shardopt.scope.ballot import Ballot
from shardopt.scope.exchange import Parcel
from shardopt.scope.meeting import meet
from shardopt.scope.record import Record, Status, describe
from shardopt.scope.verdict import judge, say_ranks
from shardopt.torch_compat import own_store

__all__ = ["Scope"]

_T = TypeVar("_T")


class Scope:
    """A fixed set of ranks that vote before they act: all go on, or all raise the same error.

    Made by ``Scope.single()`` or ``Scope.over(...)``. Its operations must be called by every rank of it in the
    same order; a rank that calls another one is named in everybody's error, and the next vote works again.

    Attributes:
        name: the scope's name, for messages.
        ranks: global ranks, sorted.
        rank: this process's global rank.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, ballot: Ballot | None, *, name: str) -> None:
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self._ballot = ballot
        self._lock = threading.RLock()  # a checkpoint thread may vote too, and one vote is several requests

    @classmethod
    def single(cls) -> Scope:
        """A scope of this rank alone. It never communicates, and needs no process group."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls((rank,), rank, None, name="single")

    @classmethod
    def over(cls, ranks: Sequence[int], *, timeout_s: float, name: str) -> Scope:
        """Collective over ``ranks``: the scope of these ranks, once all of them have constructed it.

        Votes go over the default process group's store, by a connection of their own. They take no
        part in the group's collectives, and go on working after one of those has timed out.

        Args:
            ranks: global ranks, in any order.
            timeout_s: how long a rank waits for the others, here and in each vote, in seconds.
            name: the same on every rank; scopes of the same ranks are told apart by it, then by their order.

        Raises:
            ScopeError: no process group, or one without a store; this rank is not one of ``ranks``; a rank
                did not come in time, or constructs a scope over other ranks or under another name.
            ValueError: ``timeout_s`` is not positive.
        """
        chosen = tuple(sorted(set(ranks)))
        what = f"scope {name!r} over {say_ranks(chosen)}"
        if not timeout_s > 0:
            raise ValueError(f"{what}: timeout_s is {timeout_s!r}; it must be positive")
        if not dist.is_initialized():
            raise ScopeError(f"{what} needs the default process group; call torch.distributed.init_process_group first")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank not in chosen:
            raise ScopeError(f"{what} is constructed on rank {rank}, which is not one of its ranks")
        if chosen[0] < 0 or chosen[-1] >= world_size:
            raise ScopeError(f"{what} has ranks that the world of {world_size} has not")
        if len(chosen) == 1:
            return cls(chosen, rank, None, name=name)
        try:
            ballot = meet(own_store("shardopt/scope"), chosen, rank, name=name, timeout_s=timeout_s)
        except dist.DistNetworkError as error:
            raise ScopeError(f"{what}: {_store_is_gone(rank)}") from error
        return cls(chosen, rank, ballot, name=name)

    @property
    def index(self) -> int:
        """This rank's place in ``ranks``."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Scope({self.name!r}, {say_ranks(self.ranks)}, on rank {self.rank})"

    def vote(
        self, operation: str, *, problem: BaseException | str | None = None, digest: bytes = b"", facts: int = 0
    ) -> int:
        """Collective: returns when every rank is well and all digests are equal; else raises on every rank.

        Every rank gets the same verdict, however late it comes. In a scope of one rank nothing is sent and a
        problem that is an exception is raised itself.

        Args:
            operation: what the ranks are about to do; at most 64 bytes of UTF-8, the same on every rank.
            problem: why this rank cannot; its text is cut to 392 bytes. KeyboardInterrupt, SystemExit and
                GeneratorExit are told to the others and raised again at once, without waiting; so is the error of an
                earlier vote that has waited for ranks in vain.
            digest: what must be equal on all ranks that have no problem; at most 32 bytes.
            facts: 64 flags which may differ between ranks.

        Returns:
            The bitwise OR of all ranks' ``facts``.

        Raises:
            RankFailureError: a rank has a problem, did not come in time, disagrees, or is in another operation;
                or the store is gone. On a rank with a problem its ``__cause__`` is that exception.
            ValueError: ``operation``, ``digest`` or ``facts`` is too long.
        """
        record = Record(
            operation,
            Status.OK if problem is None else Status.FAILED,
            digest,
            facts,
            "" if problem is None else describe(problem),
        )
        if self._ballot is None:
            return _decide_alone(record, problem, self.rank)
        has_waited = isinstance(problem, RankFailureError) and problem.missing
        if has_waited or isinstance(problem, KeyboardInterrupt | SystemExit | GeneratorExit):
            self._leave(record, self._ballot)
            assert isinstance(problem, BaseException)
            raise problem
        cause = problem if isinstance(problem, BaseException) else None
        try:
            with self._lock:
                verdict = self._ballot.cast(record)
        except dist.DistNetworkError as lost:
            raise _lost(operation, self.rank) from (cause or lost)
        if not verdict.ok:
            raise verdict.error(operation) from cause
        return verdict.facts

    def _leave(self, record: Record, ballot: Ballot) -> None:
        """Tells the others that this rank has failed, without waiting for them."""
        # Without a store there is nobody to tell.
        with contextlib.suppress(dist.DistNetworkError), self._lock:
            ballot.cast(record, leave=True)

    def exchange(self, operation: str, payload: bytes) -> list[bytes]:
        """Collective: every rank's payload, in the order of ``ranks``.

        Payloads may have any size, different ones on different ranks; they all pass through the store's
        host and stay there until the last rank has read them.

        Raises:
            RankFailureError: a rank did not come in time, or is in another operation; or the store is gone.
        """
        if self._ballot is None:
            return [payload]
        try:
            with self._lock:
                parcel = Parcel(self._ballot, self.size, self.index)
                parcel.post(payload)
                verdict = self._ballot.cast(Record(f"exchange {operation}"))
                if verdict.ok:
                    return parcel.collect(payload)
                parcel.withdraw(payload)
        except (dist.DistNetworkError, TimeoutError) as error:
            raise _lost(operation, self.rank) from error
        raise verdict.error(operation)

    def gather(self, operation: str, payload: bytes, *, problem: BaseException | None = None) -> list[bytes]:
        """Collective: a vote and, when it goes well, every rank's payload for the first rank, in rank order.

        The other ranks get nothing. With a ``problem`` the payload does not matter.

        Raises:
            RankFailureError: as ``vote``.
        """
        posted = {self.index: payload} if self.index and problem is None else {}

        def receive(parcel: Parcel) -> list[bytes]:
            return [payload, *map(parcel.take, range(1, self.size))] if self.index == 0 else []

        return self._mail(operation, posted, problem, receive, alone=[payload])

    def scatter(self, operation: str, payloads: Sequence[bytes], *, problem: BaseException | None = None) -> bytes:
        """Collective: a vote and, when it goes well, for each rank the payload the first rank has for it.

        Args:
            operation: what the ranks are about to do.
            payloads: on the first rank one for each rank, in the order of ``ranks``; elsewhere they do not matter.
            problem: why this rank cannot; then its payloads do not matter.

        Raises:
            RankFailureError: as ``vote``.
        """
        first = self.index == 0 and problem is None
        own = payloads[0] if first else b""
        posted = {index: payload for index, payload in enumerate(payloads) if first and index}

        def receive(parcel: Parcel) -> bytes:
            return parcel.take(self.index) if self.index else own

        return self._mail(operation, posted, problem, receive, alone=own)

    def _mail(
        self,
        operation: str,
        posted: Mapping[int, bytes],
        problem: BaseException | None,
        receive: Callable[[Parcel], _T],
        *,
        alone: _T,
    ) -> _T:
        """A vote with payloads by index around it; ``alone`` is what a scope of one rank receives."""
        if self._ballot is None:
            self.vote(operation, problem=problem)
            return alone
        try:
            with self._lock:
                parcel = Parcel(self._ballot, self.size, self.index)
                for index, payload in posted.items():
                    parcel.post(payload, index=index)
                try:
                    self.vote(operation, problem=problem)
                except RankFailureError:
                    # Not after an interrupt: then the others may have agreed, and be about to read.
                    for index, payload in posted.items():
                        parcel.withdraw(payload, index=index)
                    raise
                return receive(parcel)
        except (dist.DistNetworkError, TimeoutError) as error:
            raise _lost(operation, self.rank) from error

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Generator[None]:
        """In this block a rank waits so long for the others in each vote, in seconds."""
        if self._ballot is None:
            yield
            return
        before = self._ballot.timeout_s
        self._ballot.set_timeout(timeout_s)
        try:
            yield
        finally:
            self._ballot.set_timeout(before)


def _decide_alone(record: Record, problem: BaseException | str | None, rank: int) -> int:
    """A vote of one rank."""
    record.encode(0)  # holds the arguments to the same limits as in a vote of many
    if problem is None:
        return record.facts
    if isinstance(problem, BaseException):
        raise problem
    raise judge([rank], [record]).error(record.operation)


def _lost(operation: str, rank: int) -> RankFailureError:
    return RankFailureError(f"{operation}: {_store_is_gone(rank)}", operation=operation)


def _store_is_gone(rank: int) -> str:
    return (
        "the rank that hosts the store (usually rank 0; under torchrun, its agent on the first node) "
        f"is gone or cannot be reached from rank {rank}"
    )
