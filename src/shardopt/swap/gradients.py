"""The gradients of a step: this rank's parts of them, as the kernel reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import attrgetter
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.errors import PresentationError
from shardopt.swap.held import Held
from shardopt.swap.host_kernel import DtypeCode
from shardopt.swap.spans import dense_strides
from shardopt.torch_compat import gradients_of, local_shard, same_spec, shard_in_place, spec_token, versions_of

__all__ = ["Found", "Gradients"]

_CODES = {torch.float32: DtypeCode.FP32, torch.bfloat16: DtypeCode.BF16}
_kind_of = attrgetter("device", "layout", "dtype")
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


# Gradients of which one element is looked at.
_SAMPLED = 4


@dataclass(slots=True)
class Found:
    """The gradients of one step. Not kept: they must not outlive ``zero_grad``.

    Attributes:
        parts: this rank's part of each, None where there is none.
        unaligned: those that are not placed like their parameter, by index; completing them communicates.
    """

    parts: list[Tensor | None]
    unaligned: dict[int, DTensor] = field(default_factory=dict)


class Gradients:
    """Reads the gradients of parameters, in their order."""

    def __init__(self, held: Sequence[Held], device: torch.device) -> None:
        self._held = held
        self._device = device
        self._params = [one.param for one in held]
        self._shapes = [one.shard.shape for one in held]
        self._strides = [dense_strides(one.shard.shape, one.shard.stride()) for one in held]
        self._row_major = all(one.shard.is_contiguous() for one in held)
        # What a gradient has that is placed like its parameter: FSDP2 gives it the parameter's own spec.
        self._specs = [spec_token(param) if isinstance(param, DTensor) else None for param in self._params]
        self._smallest_first = sorted(range(len(held)), key=lambda index: held[index].shard.numel())
        self._sharded = bool(held) and all(isinstance(param, DTensor) for param in self._params)

    def look(self) -> Found:
        """Finds and checks all gradients. No communication.

        Raises:
            PresentationError: gradients cannot be used; all of them are named.
        """
        grads = gradients_of(self._params)
        usual = self._usual(grads)
        if usual is not None and self._are_plain(usual):
            return Found(usual)
        found = Found([None] * len(grads))
        problems: list[str] = []
        for index, grad in enumerate(grads):
            problem = None if grad is None else self._take(index, grad, found)
            if problem is not None:
                problems.append(f"{self._held[index].name}: {problem}")
        if problems:
            raise PresentationError("step: gradients cannot be used, and nothing was stepped:\n" + "\n".join(problems))
        return found

    def _usual(self, grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """The parts, when all gradients are there, DTensors placed like their parameters; else None.

        Loops in C, one after the other, are quicker than a single one of Python.
        """
        if not self._sharded or set(map(type, grads)) != {DTensor}:
            return None
        sharded = cast("Sequence[DTensor]", grads)
        if list(map(spec_token, sharded)) != self._specs:
            return None
        parts = list(map(shard_in_place, sharded))
        return cast("list[Tensor | None]", parts) if set(map(type, parts)) == {Tensor} else None

    def _are_plain(self, parts: Sequence[Tensor | None]) -> bool:
        """Whether the kernel can read all of them as they are."""
        tensors = cast("Sequence[Tensor]", parts)
        kinds = set(map(_kind_of, tensors))
        return (
            self._row_major
            and kinds <= {(self._device, torch.strided, dtype) for dtype in _CODES}
            and all(map(Tensor.is_contiguous, tensors))
            and list(map(_shape_of, tensors)) == self._shapes
        )

    def _take(self, index: int, grad: Tensor, found: Found) -> str | None:
        """Notes one gradient; what is wrong with it, if anything."""
        param = self._params[index]
        if isinstance(param, DTensor) != isinstance(grad, DTensor):
            kinds = ["a DTensor" if isinstance(one, DTensor) else "a plain tensor" for one in (param, grad)]
            return f"it is {kinds[0]}, its gradient {kinds[1]} of shape {tuple(grad.shape)}; assign one of its own kind"
        local = local_shard(grad) if isinstance(grad, DTensor) else grad
        if local.layout != torch.strided:
            return f"its gradient is sparse ({local.layout}); make it dense (sparse=False)"
        if local.dtype not in _CODES:
            return f"its gradient is {local.dtype}; expected torch.float32 or torch.bfloat16"
        if local.device != self._device:
            where = "the host" if self._device.type == "cpu" else self._device
            return f"its gradient is on {local.device}, the parameter on {where}; move it there"
        if isinstance(grad, DTensor) and isinstance(param, DTensor):
            if spec_token(grad) is not self._specs[index] and not same_spec(grad, param):
                found.unaligned[index] = grad
                return None
            self._specs[index] = spec_token(grad)
        if local.shape != self._shapes[index]:
            return f"this rank's part of its gradient has shape {tuple(local.shape)}, not {tuple(self._shapes[index])}"
        found.parts[index] = self._dense(index, local)
        return None

    def _dense(self, index: int, local: Tensor) -> Tensor:
        """The part itself if its elements lie as state does; else a copy of it in that order, for this step."""
        strides = self._strides[index]
        if all(size < 2 or a == b for size, a, b in zip(local.shape, local.stride(), strides, strict=True)):
            return local
        return torch.empty_strided(local.shape, strides, dtype=local.dtype, device=self._device).copy_(local)

    def witness(self) -> Tensor | None:
        """The smallest gradient there is. Who keeps it can tell it from any later one, which an address may not."""
        return next((grad for index in self._smallest_first if (grad := self._params[index].grad) is not None), None)

    def sample(self) -> list[Tensor]:
        """Copies of a few elements, for what writes gradients and moves no counter (a scaler's ``unscale_``)."""
        there = (self._params[index].grad for index in self._smallest_first)
        parts = (local_shard(grad) if isinstance(grad, DTensor) else grad for grad in there if grad is not None)
        some = islice((part for part in parts if part.layout == torch.strided and part.numel()), _SAMPLED)
        return [part.detach()[(0,) * part.dim()].clone() for part in some]

    def marks(self) -> list[list[int]]:
        """What tells these gradients from others, and from themselves once they have been written to."""
        grads = gradients_of(self._params)
        there = [grad for grad in grads if grad is not None]
        parts = [local_shard(grad) if isinstance(grad, DTensor) else grad for grad in there]
        missing = [index for index, grad in enumerate(grads) if grad is None]
        # A sparse one has no address, and no step. A DTensor and the tensor within count by themselves.
        places = [part.data_ptr() if part.layout == torch.strided else 0 for part in parts]
        return [missing, places, versions_of(there), versions_of(parts)]

    def complete(self, found: Found) -> None:
        """Collective, where gradients are not placed like their parameters: brings them there, as torch's own does."""
        for index, grad in found.unaligned.items():
            param = cast("DTensor", self._params[index])
            local = local_shard(grad.redistribute(param.device_mesh, param.placements))
            found.parts[index] = self._dense(index, local)

    def addresses(self, found: Found) -> tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.bool_]]:
        """Of all parameters: address and dtype of the gradient's part, and whether there is one."""
        count = len(found.parts)
        there = [part is not None for part in found.parts]
        parts = cast("list[Tensor]", list(compress(found.parts, there)))
        has = np.array(there, np.bool_)
        address, code = np.zeros(count, np.int64), np.zeros(count, np.int8)
        address[has] = list(map(Tensor.data_ptr, parts))
        dtypes = list(map(_dtype_of, parts))
        code[has] = _CODES[dtypes[0]] if len(set(dtypes)) == 1 else [_CODES[dtype] for dtype in dtypes]
        return address, code, has
