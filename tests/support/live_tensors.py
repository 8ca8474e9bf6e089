"""Tensors that are alive in this process, by their memory, to see what an operation leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["live_memory", "memory_of"]


def live_memory() -> dict[int, int]:
    """Address -> bytes of the memory of every tensor that something in Python holds, after a collection."""
    gc.collect()
    # By type: an isinstance would wake up lazy proxies among the objects.
    return memory_of(one for one in gc.get_objects() if issubclass(type(one), Tensor))


def memory_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory that tensors lie in, whole where they are views; DTensors' is their shards'."""
    storages = [
        (one._local_tensor if isinstance(one, DTensor) else one).untyped_storage()
        for one in tensors
        # Sparse tensors, which other tests may have left, have no memory of their own: their parts are tensors too.
        if one.device.type != "meta" and one.layout == torch.strided
    ]
    return {one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}
