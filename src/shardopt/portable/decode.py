"""JSON back into typed Python values: checks every field, imports nothing, runs nothing."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shardopt.errors import FormatError
from shardopt.layouts.objects import rebuilt, saved_class
from shardopt.portable.tagged import (
    MAX_DEPTH,
    NUMPY_SCALARS,
    TAG,
    Json,
    damaged,
    fields_of,
    hex_bytes,
    is_key,
    key_path,
)
from shardopt.portable.tensor_bytes import FORM_FIELDS, FORM_OPTIONS, TensorForm, dtype_from_name, from_bytes

__all__ = ["decode"]

_Decode = Callable[[Json, str], object]
_Fields = dict[str, Json]

_HEX_INT = re.compile(r"-?0x[0-9a-f]+")


def decode(encoded: Json, path: str = "", *, leaf: Callable[[_Fields, str], Tensor] | None = None) -> object:
    """The value that ``encode`` made this JSON of; equal to the last bit, tensors on the CPU in memory of their own.

    Args:
        encoded: from ``encode``, or parsed from a file.
        path: how errors call the value.
        leaf: makes the tensor of a ``"leaf"`` object, given that object and its path; by default a leaf is an error.

    Raises:
        FormatError: not something ``encode`` writes; names the path.
    """
    return _Decoder(leaf).decode(encoded, path)


class _Decoder:
    def __init__(self, leaf: Callable[[_Fields, str], Tensor] | None) -> None:
        self._leaf = leaf
        self._depth = 0

    def decode(self, encoded: Json, path: str) -> object:
        if encoded is None or isinstance(encoded, (bool, int, str)):
            return encoded
        if isinstance(encoded, float):
            if not math.isfinite(encoded):
                raise damaged(path, f"got the bare number {encoded}, expected it tagged with its bits")
            return encoded
        if self._depth == MAX_DEPTH:
            raise damaged(path, f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        value = self._container(encoded, path)
        self._depth -= 1
        return value

    def _container(self, encoded: Json, path: str) -> object:
        if isinstance(encoded, list):
            return [self.decode(item, f"{path}[{index}]") for index, item in enumerate(encoded)]
        if not isinstance(encoded, dict):
            raise damaged(path, f"got a {type(encoded).__name__}, expected a JSON value")
        if TAG not in encoded:
            return {key: self.decode(item, key_path(path, key)) for key, item in encoded.items()}
        kind = encoded[TAG]
        if kind == "leaf" and self._leaf is not None:
            return self._leaf(encoded, path)
        if not isinstance(kind, str) or kind not in _TAGGED:
            raise damaged(path, f"got the tag {kind!r:.80}, expected one of {sorted(_TAGGED)}")
        required, optional, make = _TAGGED[kind]
        return make(fields_of(encoded, path, required, optional), path, self.decode)


def _int(fields: _Fields, path: str, decode: _Decode) -> int:
    text = fields["hex"]
    if not isinstance(text, str) or not _HEX_INT.fullmatch(text):
        raise damaged(path, f"got the integer {text!r:.80}, expected hex such as '-0x1f'")
    return int(text, 16)


def _float(fields: _Fields, path: str, decode: _Decode) -> float:
    return struct.unpack(">d", hex_bytes(fields["bits"], path, 8))[0]


def _complex(fields: _Fields, path: str, decode: _Decode) -> complex:
    real, imag = decode(fields["real"], f"{path}.real"), decode(fields["imag"], f"{path}.imag")
    if not isinstance(real, float) or not isinstance(imag, float):
        raise damaged(path, f"got a complex number of {real!r:.80} and {imag!r:.80}, expected two floats")
    return complex(real, imag)


def _str(fields: _Fields, path: str, decode: _Decode) -> str:
    try:
        return _bytes(fields, path, decode).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise damaged(path, f"got text that is not UTF-8 ({error})") from error


def _bytes(fields: _Fields, path: str, decode: _Decode) -> bytes:
    text = fields["base64"]
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise damaged(path, f"got text that is not base64 ({error})") from error
    raise damaged(path, f"got {text!r:.80}, expected base64 text")


def _list(fields: _Fields, path: str) -> Sequence[Json]:
    items = fields["items"]
    if not isinstance(items, list):
        raise damaged(path, f"got the items {items!r:.80}, expected a list")
    return items


def _tuple(fields: _Fields, path: str, decode: _Decode) -> tuple[object, ...]:
    return tuple([decode(item, f"{path}[{index}]") for index, item in enumerate(_list(fields, path))])


def _size(fields: _Fields, path: str, decode: _Decode) -> torch.Size:
    sizes = [size for size in _list(fields, path) if type(size) is int and abs(size) < 2**63]
    if len(sizes) != len(_list(fields, path)):
        raise damaged(path, f"got a torch.Size of {fields['items']!r:.80}, expected 64-bit integers")
    return torch.Size(sizes)


def _deque(fields: _Fields, path: str, decode: _Decode) -> deque[object]:
    items, maxlen = _tuple(fields, path, decode), fields["maxlen"]
    if maxlen is not None and (type(maxlen) is not int or not len(items) <= maxlen < 2**63):
        raise damaged(path, f"got a deque of {len(items)} items with maxlen {maxlen!r:.80}")
    return deque(items, maxlen)


def _frozenset(fields: _Fields, path: str, decode: _Decode) -> frozenset[object]:
    items = _tuple(fields, path, decode)
    if not all(map(is_key, items)) or len(frozenset(items)) != len(items):
        raise damaged(path, f"got a set of {fields['items']!r:.80}, expected distinct hashable values")
    return frozenset(items)


def _set(fields: _Fields, path: str, decode: _Decode) -> set[object]:
    return set(_frozenset(fields, path, decode))


def _dict(fields: _Fields, path: str, decode: _Decode) -> dict[object, object]:
    result: dict[object, object] = {}
    for pair in _list(fields, path):
        if not isinstance(pair, list) or len(pair) != 2:
            raise damaged(path, f"got the dict item {pair!r:.80}, expected a [key, value] pair")
        key = decode(pair[0], f"{path}.<key>")
        if not is_key(key) or key in result:
            raise damaged(path, f"got the dict key {pair[0]!r:.80}, expected distinct hashable values")
        result[key] = decode(pair[1], key_path(path, key))
    return result


def _object(fields: _Fields, path: str, decode: _Decode) -> object:
    name = fields["class"]
    kind = saved_class(name) if isinstance(name, str) else None
    if kind is None:
        raise FormatError(
            f"{path or 'the value'}: an object of {name!r:.120}, and no such class is declared here. Import what "
            "defines it and call shardopt.declare_saved(...) with it on every rank, before the load."
        )
    inner = decode(fields["fields"], path)
    if not isinstance(inner, dict) or not all(isinstance(key, str) for key in inner):
        raise damaged(path, f"got an object of {name} with the fields {fields['fields']!r:.80}, expected a dict")
    try:
        return rebuilt(kind, inner)
    except KeyError as error:
        raise damaged(path, f"got {inner!r:.80}, which {name} does not have") from error


def _dtype(fields: _Fields, path: str, decode: _Decode) -> torch.dtype:
    return dtype_from_name(fields["name"], path)


def _device(fields: _Fields, path: str, decode: _Decode) -> torch.device:
    kind, index = fields["type"], fields["index"]
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise damaged(path, f"got the device {kind!r:.80} {index!r:.80}, expected a type and an index or null")
    try:
        device = torch.device(kind) if index is None else torch.device(kind, index)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise damaged(
            path, f"got the device {kind!r:.80} {index!r:.80}, unknown to torch {torch.__version__}"
        ) from error
    # torch parses "cuda:1" as a type and wraps indices to 8 bits.
    if (device.type, device.index) != (kind, index):
        raise damaged(path, f"got the device {kind!r:.80} {index!r:.80}, which torch reads as {device}")
    return device


def _tensor(fields: _Fields, path: str, decode: _Decode) -> Tensor:
    form = TensorForm.from_json(fields, path)
    data = _bytes(fields, path, decode)
    if len(data) != form.num_bytes:
        raise damaged(path, f"got {len(data)} bytes for a {form.dtype} tensor of shape {list(form.shape)}")
    # Cloned, since memory that torch did not allocate cannot be resized or shared with another process.
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)
    return from_bytes(form, flat)


def _numpy(fields: _Fields, path: str, decode: _Decode) -> np.generic:
    name = fields["dtype"]
    if not isinstance(name, str) or name not in NUMPY_SCALARS:
        raise damaged(path, f"got a NumPy scalar of dtype {name!r:.80}, expected one of {sorted(NUMPY_SCALARS)}")
    dtype = np.dtype(name)
    return np.frombuffer(hex_bytes(fields["bytes"], path, dtype.itemsize), dtype=dtype)[0]


_TAGGED: dict[str, tuple[Sequence[str], Sequence[str], Callable[[_Fields, str, _Decode], object]]] = {
    "int": (["hex"], [], _int),
    "float": (["bits"], [], _float),
    "complex": (["real", "imag"], [], _complex),
    "str": (["base64"], [], _str),
    "bytes": (["base64"], [], _bytes),
    "tuple": (["items"], [], _tuple),
    "size": (["items"], [], _size),
    "deque": (["maxlen", "items"], [], _deque),
    "set": (["items"], [], _set),
    "frozenset": (["items"], [], _frozenset),
    "dict": (["items"], [], _dict),
    "object": (["class", "fields"], [], _object),
    "dtype": (["name"], [], _dtype),
    "device": (["type", "index"], [], _device),
    "tensor": ([*FORM_FIELDS, "base64"], FORM_OPTIONS, _tensor),
    "numpy": (["dtype", "bytes"], [], _numpy),
}
