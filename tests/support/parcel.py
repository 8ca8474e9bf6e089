"""Values on their way between the pool and a rank: pickled, tensors by value, nothing that is bound to a rank."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.raw_values import raw_bytes

__all__ = ["pack", "unpack"]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor | dist.ProcessGroup | dist.DeviceMesh):
            raise TypeError(
                f"a {type(value).__name__} cannot leave its rank; return .to_local() or .full_tensor(), or plain values"
            )
        dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.device.type == "cpu"
        if dense and value.stride() == torch.empty_like(value).stride():
            parts = raw_bytes(value), value.dtype, value.shape, value.stride(), value.requires_grad
            return _restore, (type(value), *parts)
        # Of a tensor with holes or overlaps torch's own pickle sends the storage.
        return NotImplemented


def _restore(
    kind: type[Tensor], raw: bytes, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], requires_grad: bool
) -> Tensor:
    """A tensor of these bytes. Torch's own pickle cannot do it for 8-bit floats, and would send all of the storage."""
    value = torch.empty_strided(shape, stride, dtype=dtype)
    if raw:
        value.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape))
    return nn.Parameter(value, requires_grad) if kind is nn.Parameter else value.requires_grad_(requires_grad)


def pack(value: Any) -> bytes:
    """Pickles arguments or a result.

    Raises:
        TypeError: for a DTensor, a mesh or a process group.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(parcel: bytes) -> Any:
    """What was packed, in memory of its own."""
    return pickle.loads(parcel)
