"""Tensors as raw little-endian bytes: their form as JSON, their bytes without a copy, and the way back."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt.errors import PlacementError
from shardopt.portable.tagged import Json, damaged

__all__ = [
    "FORM_FIELDS",
    "FORM_OPTIONS",
    "TensorForm",
    "byte_view",
    "dtype_from_name",
    "dtype_name",
    "from_bytes",
    "is_dtype_name",
]

FORM_FIELDS = ("dtype", "shape")
FORM_OPTIONS = ("order", "requires_grad")

_MAX_ELEMS = 2**63 - 1

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}

# Dtypes whose elements are plain bytes. Left out: quantised ones (their scale is not in the bytes), opaque bits and
# the sub-byte integers (torch has no copy kernel for them).
_BYTE_DTYPES: frozenset[torch.dtype] = frozenset(
    _DTYPES[name]
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
)

# Bits are moved as integers: torch warns or has no kernel when it copies some of the rarer dtypes.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """The name a dtype has in the format, e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def is_dtype_name(name: str) -> bool:
    """Whether this torch has a dtype of that name."""
    return name in _DTYPES


def dtype_from_name(name: Json, path: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        FormatError: no such dtype in this torch.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise damaged(path, f"dtype {name!r:.80} is unknown to torch {torch.__version__}")
    return dtype


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Everything about a tensor but its bytes and its device.

    Attributes:
        dtype: one of the dtypes whose elements are plain bytes.
        shape: the tensor's shape.
        order: None for row-major; else the dims from slowest to fastest in memory. Kept because a matrix that comes
            back with other strides takes other kernels, whose last bits differ (``linalg.qr`` returns column-major).
        requires_grad: as on the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        """Length of the tensor's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor, path: str) -> TensorForm:
        """The form of a live tensor on any device.

        Raises:
            PlacementError: its bytes alone would not bring it back (subclass, sparse, quantised, meta).
        """
        problem = _why_not_bytes(tensor)
        if problem:
            raise PlacementError(f"{path or 'the value'}: {problem}")
        return cls(tensor.dtype, tuple(tensor.shape), _memory_order(tensor), tensor.requires_grad)

    def to_json(self) -> dict[str, Json]:
        """``{"dtype", "shape"}`` plus ``order`` and ``requires_grad`` where they are not the default."""
        form: dict[str, Json] = {"dtype": dtype_name(self.dtype), "shape": list(self.shape)}
        if self.order is not None:
            form["order"] = list(self.order)
        if self.requires_grad:
            form["requires_grad"] = True
        return form

    @classmethod
    def from_json(cls, fields: Mapping[str, Json], path: str) -> TensorForm:
        """The form that ``to_json`` wrote.

        Raises:
            FormatError: not such a form.
        """
        dtype = dtype_from_name(fields["dtype"], path)
        if dtype not in _BYTE_DTYPES:
            raise damaged(path, f"tensors of dtype {dtype_name(dtype)} are not stored as bytes")
        shape = _sizes(fields["shape"])
        if shape is None or math.prod(max(size, 1) for size in shape) > _MAX_ELEMS:
            raise damaged(path, f"got shape {fields['shape']!r:.80}, expected a list of sizes")
        order = _sizes(fields["order"]) if "order" in fields else None
        if "order" in fields and (order is None or sorted(order) != list(range(len(shape)))):
            raise damaged(path, f"got order {fields['order']!r:.80}, expected a permutation of {len(shape)} dims")
        requires_grad = fields.get("requires_grad", False)
        if not isinstance(requires_grad, bool) or (requires_grad and not (dtype.is_floating_point or dtype.is_complex)):
            raise damaged(path, f"requires_grad={requires_grad!r:.80} on a tensor of dtype {dtype_name(dtype)}")
        return cls(dtype, shape, order, requires_grad)


def byte_view(tensor: Tensor, form: TensorForm) -> Tensor:
    """The tensor's bytes, in the memory order of its form.

    Args:
        tensor: of any device.
        form: ``TensorForm.of`` of the same tensor.

    Returns:
        uint8, 1-D ``[form.num_bytes]``, on the tensor's device, detached. It shares the tensor's memory; only a
        tensor with holes, repeated elements or a lazy conjugate is copied.
    """
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if form.order is not None:
        plain = plain.permute(form.order)
    if not plain.is_contiguous():
        plain = plain.view(_CARRIERS[form.dtype.itemsize]).contiguous()
    # Not view(-1): a contiguous tensor of 0 or 1 elements keeps any stride, and then has no bytes to view.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def from_bytes(form: TensorForm, data: Tensor) -> Tensor:
    """The tensor of this form, as a view of ``data``.

    Args:
        form: what to make of the bytes.
        data: uint8, contiguous, 1-D ``[form.num_bytes]``; its memory and its storage offset are multiples of the
            dtype's size.
    """
    flat = data.view(form.dtype)
    if form.order is None:
        tensor = flat.view(form.shape)
    else:
        place = [form.order.index(dim) for dim in range(len(form.shape))]
        tensor = flat.view([form.shape[dim] for dim in form.order]).permute(place)
    return tensor.requires_grad_() if form.requires_grad else tensor


def _why_not_bytes(tensor: Tensor) -> str | None:
    kind = type(tensor)
    if kind is not Tensor:
        return (
            f"got a {kind.__module__}.{kind.__qualname__}, expected a plain torch.Tensor: a subclass holds more than "
            "its bytes; keep its plain parts in the state"
        )
    if tensor.layout is not torch.strided:
        return f"got a {tensor.layout} tensor, expected a strided one: store its parts, or make it dense"
    if tensor.is_meta:
        return "got a tensor on the meta device, which has no data: materialise it before saving"
    if tensor.dtype not in _BYTE_DTYPES:
        return f"got a tensor of {tensor.dtype}, which has no plain bytes: keep int_repr() and the scales as tensors"
    if sys.byteorder != "little":
        return (
            f"this machine is {sys.byteorder}-endian and the format is little-endian: save on a little-endian machine"
        )
    return None


def _memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dims from slowest to fastest, when that order fills memory without holes and is not row-major."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def _sizes(value: Json) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes = tuple(size for size in value if type(size) is int and size >= 0)
    return sizes if len(sizes) == len(value) else None
