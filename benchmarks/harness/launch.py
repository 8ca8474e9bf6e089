"""Processes that form a group of ranks, as ``torchrun`` would start them on one machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["Ranks"]

_TIMEOUT = timedelta(seconds=120)
_PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"]


class Ranks:
    """A pool of processes in which a function can be run as 1 to ``most`` ranks of a gloo group.

    Every rank computes with one thread. The processes are new, and live until the pool is closed.
    """

    def __init__(self, most: int) -> None:
        # OpenMP reads this when torch is loaded; a spinning second thread would take the other rank's core.
        os.environ["OMP_NUM_THREADS"] = "1"
        # Forked from a process that has imported torch and done nothing else: an import takes longer than most runs.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        # A process keeps its rank: torch's device meshes remember the coordinate they had in an earlier group.
        self._ranks = [ProcessPoolExecutor(1, mp_context=context) for _ in range(most)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.shutdown(cancel_futures=True)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank of a group of ``world_size``; the results in rank order."""
        # port 0, read back from the store: fixed ports collide when two runs share a host
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        futures = [
            process.submit(_as_rank, rank, world_size, store.port, function, args)
            for rank, process in enumerate(self._ranks[:world_size])
        ]
        return [future.result() for future in futures]


def _as_rank(rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        torch.manual_seed(rank)
        return function(*args)
    finally:
        dist.destroy_process_group()
