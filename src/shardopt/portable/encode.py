"""Typed Python values as JSON, bit for bit: no pickle, no import by name.

What JSON can say stays plain JSON, so a manifest can be read by eye. Everything else is a tagged object such as
``{"!": "tuple", "items": [...]}``; a dict that JSON cannot hold (keys that are no strings, or are ``"!"``) is a list
of pairs under a tag. The order of dicts and deques is kept. An object that occurs twice comes back as two equal ones.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from shardopt.errors import PlacementError
from shardopt.layouts.objects import fields_of_object, saved_as
from shardopt.portable.decode import decode
from shardopt.portable.tagged import MAX_DEPTH, NUMPY_SCALARS, TAG, Json, is_key, key_path
from shardopt.portable.tensor_bytes import TensorForm, byte_view, dtype_name

__all__ = ["MAX_INLINE_TENSOR_BYTES", "decode", "encode", "equal"]

MAX_INLINE_TENSOR_BYTES = 64 * 1024
"""Largest tensor kept inside the JSON, which every rank reads whole; larger ones belong in a blob."""

_MIN_PLAIN_INT, _MAX_PLAIN_INT = -(2**63), 2**64 - 1
_CONTAINERS: frozenset[type] = frozenset({list, tuple, torch.Size, dict, set, frozenset, deque})


def encode(value: object, path: str = "", *, tensor: Callable[[Tensor, str], Json] | None = None) -> Json:
    """The value as JSON.

    Knows None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, torch.dtype,
    torch.device, torch.Size, NumPy scalars (a computed ``lr`` often is one) and plain tensors. Exact types only: a
    subclass (namedtuple, OrderedDict, enum) could be rebuilt only by importing what the checkpoint names.

    Args:
        value: what to encode.
        path: how errors call the value, e.g. ``"groups[0]"``.
        tensor: encodes a tensor, given it and its path; by default its bytes in base64, without its device.

    Raises:
        PlacementError: a part of the value has no exact form; names path, type and what to do.
    """
    return _Encoder(tensor or _encode_tensor).encode(value, path)


def equal(a: object, b: object) -> bool:
    """Whether two values are the same to the last bit.

    Types, the order of dicts, NaN payloads and signed zeros count; a tensor's device and strides do not.

    Raises:
        PlacementError: a part that was compared has no encoded form.
    """
    if isinstance(a, np.generic) and isinstance(b, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensors_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return equal(list(a.items()), list(b.items()))
    if isinstance(a, deque) and isinstance(b, deque):
        return a.maxlen == b.maxlen and equal(list(a), list(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if saved_as(type(a)) is not None:
        return equal(fields_of_object(a), fields_of_object(b))
    # Scalars, and sets of them: their JSON text is canonical.
    return _text(encode(a)) == _text(encode(b))


class _Encoder:
    """One walk over a value; counts the depth, so that a value that holds itself ends in an error."""

    def __init__(self, tensor: Callable[[Tensor, str], Json]) -> None:
        self._tensor = tensor
        self._depth = 0

    def encode(self, value: object, path: str) -> Json:
        scalar = _SCALARS.get(type(value))
        if scalar is not None:
            return scalar(value)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic):
            return _encode_numpy(value, path)
        name = None if type(value) in _CONTAINERS else saved_as(type(value))
        if type(value) not in _CONTAINERS and name is None:
            raise PlacementError(f"{path or 'the value'}: {_why_unknown(value)}")
        if self._depth == MAX_DEPTH:
            raise PlacementError(f"{path}: nested deeper than {MAX_DEPTH} levels, or it holds itself; keep it flatter")
        self._depth += 1
        encoded = self._container(value, path) if name is None else self._object(value, name, path)
        self._depth -= 1
        return encoded

    def _container(self, value: object, path: str) -> Json:
        if isinstance(value, list):
            return self._items(value, path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, torch.Size):
            return {TAG: "size", "items": list(value)}
        if isinstance(value, tuple):
            return {TAG: "tuple", "items": self._items(value, path)}
        if isinstance(value, deque):
            return {TAG: "deque", "maxlen": value.maxlen, "items": self._items(value, path)}
        if isinstance(value, (set, frozenset)):
            return {TAG: type(value).__name__, "items": self._sorted_items(value, path)}
        raise AssertionError(f"no encoder for the container {type(value)}")

    def _object(self, value: object, name: str, path: str) -> Json:
        return {TAG: "object", "class": name, "fields": self._dict(dict(fields_of_object(value)), path)}

    def _items(self, items: Iterable[object], path: str) -> list[Json]:
        return [self.encode(item, f"{path}[{index}]") for index, item in enumerate(items)]

    def _sorted_items(self, items: Iterable[object], path: str) -> list[Json]:
        return sorted((self._key(item, path, "element") for item in items), key=_text)

    def _dict(self, value: Mapping[object, object], path: str) -> Json:
        if all(type(key) is str and key != TAG and _is_utf8(key) for key in value):
            return {str(key): self.encode(item, key_path(path, key)) for key, item in value.items()}
        pairs: list[Json] = []
        for key, item in value.items():
            pairs.append([self._key(key, path, "key"), self.encode(item, key_path(path, key))])
        return {TAG: "dict", "items": pairs}

    def _key(self, key: object, path: str, what: str) -> Json:
        if not is_key(key):
            kind = f"{type(key).__module__}.{type(key).__qualname__}"
            raise PlacementError(
                f"{path or 'the value'}: the {what} {key!r:.80} of type {kind} cannot be stored: keys of dicts and "
                "elements of sets must be strings, numbers, None, dtypes, devices, or tuples of these"
            )
        return self.encode(key, key_path(path, key))


def _plain(value: bool | None) -> Json:
    return value


def _encode_bytes(value: bytes) -> Json:
    return {TAG: "bytes", "base64": _base64(value)}


def _encode_dtype(value: torch.dtype) -> Json:
    return {TAG: "dtype", "name": dtype_name(value)}


def _encode_device(value: torch.device) -> Json:
    return {TAG: "device", "type": value.type, "index": value.index}


def _encode_int(value: int) -> Json:
    # Past 64 bits in hex: other JSON readers round such numbers, and Python refuses decimals past 4,300 digits.
    return value if _MIN_PLAIN_INT <= value <= _MAX_PLAIN_INT else {TAG: "int", "hex": hex(value)}


def _encode_float(value: float) -> Json:
    # Python's JSON writes the shortest text that reads back to the same float, "-0.0" included.
    return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}


def _encode_complex(value: complex) -> Json:
    return {TAG: "complex", "real": _encode_float(value.real), "imag": _encode_float(value.imag)}


def _encode_str(value: str) -> Json:
    if _is_utf8(value):
        return value
    # Not as JSON escapes: two lone surrogates in a row would be read back as one character.
    return {TAG: "str", "base64": _base64(value.encode("utf-8", "surrogatepass"))}


def _encode_numpy(value: np.generic, path: str) -> Json:
    name = value.dtype.name
    if name not in NUMPY_SCALARS:
        raise PlacementError(f"{path or 'the value'}: got a NumPy scalar of dtype {name}; convert it to a Python value")
    return {TAG: "numpy", "dtype": name, "bytes": value.tobytes().hex()}


def _encode_tensor(value: Tensor, path: str) -> Json:
    form = TensorForm.of(value, path)
    if form.num_bytes > MAX_INLINE_TENSOR_BYTES:
        raise PlacementError(
            f"{path or 'the value'}: a tensor of {form.num_bytes} bytes is too large for the manifest, whose tensors "
            f"have at most {MAX_INLINE_TENSOR_BYTES} bytes; keep it in a parameter's state"
        )
    return {TAG: "tensor", **form.to_json(), "base64": _base64(byte_view(value, form).cpu().numpy().tobytes())}


_SCALARS: dict[type, Callable[..., Json]] = {
    type(None): _plain,
    bool: _plain,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    bytes: _encode_bytes,
    torch.dtype: _encode_dtype,
    torch.device: _encode_device,
}


def _tensors_equal(a: Tensor, b: Tensor) -> bool:
    forms = TensorForm.of(a, "a"), TensorForm.of(b, "b")
    if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
        return False
    if forms[0].order != forms[1].order:
        row_major = TensorForm(a.dtype, tuple(a.shape))
        forms = row_major, row_major
    return torch.equal(byte_view(a, forms[0]).cpu(), byte_view(b, forms[1]).cpu())


def _why_unknown(value: object) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"got a namedtuple {name}, whose class a load could not make; store a tuple, or a dict from _asdict()"
    if isinstance(value, np.ndarray):
        return "got a numpy.ndarray; store torch.from_numpy(value)"
    if callable(value):
        return f"got the callable {name}, and code is not stored; store its name and look it up when loading"
    known = "numbers, strings, bytes, lists, tuples, dicts, sets, deques, dtypes, devices or plain tensors"
    return (
        f"got a {name}, which has no exact stored form; store {known} instead, or declare that its attributes are all "
        f"there is to it: shardopt.declare_saved({kind.__name__})"
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _text(encoded: Json) -> str:
    return json.dumps(encoded, separators=(",", ":"))
