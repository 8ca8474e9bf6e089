"""Tagged JSON objects: how the checkpoint format says what plain JSON cannot."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import numpy as np
import torch

from shardopt.errors import FormatError

__all__ = ["MAX_DEPTH", "NUMPY_SCALARS", "TAG", "Json", "damaged", "fields_of", "hex_bytes", "is_key", "key_path"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

TAG = "!"
"""The key that makes a JSON object a tagged one; its value names the kind."""

MAX_DEPTH = 64
"""Deepest nesting of containers written or read: far below Python's recursion limit, far above real state."""

NUMPY_SCALARS = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""Names of the NumPy dtypes that mean the same bytes on every platform; longdouble is not one."""

_KEY_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def is_key(value: object) -> bool:
    """Whether the value may be a dict key or a set element: hashed by value, and with no tensor inside."""
    if type(value) in (tuple, frozenset) and isinstance(value, (tuple, frozenset)):
        return all(map(is_key, value))
    return type(value) in _KEY_TYPES or isinstance(value, np.generic)


def key_path(path: str, key: object) -> str:
    """The path of a dict's item: ``group.lr``, or ``group['my key']``."""
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r:.80}]"


def damaged(path: str, problem: str) -> FormatError:
    """The error for encoded data that no shardopt wrote.

    Args:
        path: where in the value, e.g. ``"groups[0].foo[2]"``; empty for the value itself.
        problem: what is wrong there: got, then expected.
    """
    where = path or "the value"
    return FormatError(f"{where}: {problem}; the checkpoint is damaged or not written by shardopt: load another one.")


def fields_of(
    encoded: dict[str, Json], path: str, required: Collection[str], optional: Collection[str] = ()
) -> dict[str, Json]:
    """The fields of a tagged object, without its tag.

    Raises:
        FormatError: a required field is missing or an unknown one is there.
    """
    fields = {name: item for name, item in encoded.items() if name != TAG}
    lacking = [name for name in required if name not in fields]
    unknown = [name for name in fields if name not in required and name not in optional]
    if lacking or unknown:
        kind = encoded.get(TAG)
        raise damaged(path, f"tagged object {kind!r} lacks the fields {lacking} and has the unknown fields {unknown}")
    return fields


def hex_bytes(text: Json, path: str, num_bytes: int) -> bytes:
    """The bytes that lower-case hex text spells.

    Raises:
        FormatError: not a string, not lower-case hex, or not of this length.
    """
    if isinstance(text, str) and len(text) == 2 * num_bytes and not set(text) - set("0123456789abcdef"):
        return bytes.fromhex(text)
    raise damaged(path, f"got {text!r:.80}, expected {2 * num_bytes} lower-case hex digits")
