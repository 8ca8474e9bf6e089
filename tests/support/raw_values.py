"""Facts of a value down to its bytes: what must not differ between two looks at it, and a sentence where it does."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import random
import struct
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Fact", "difference", "facts", "raw_bytes", "value_differences"]

_NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
_SPELLED = (int, str, bytes, type(None), enum.Enum, range, slice, torch.dtype, torch.device, torch.layout)


@dataclasses.dataclass(frozen=True, eq=False)
class Fact:
    """What is known of one value, its parts excepted: they have facts of their own.

    Attributes:
        type_name: its class; ``bool`` is not ``int``, and a numpy float is not a float.
        details: what to compare by ``==``: shape, dtype, placements, length, keys, spelling.
        content: its bytes, of a tensor or an array in row-major order.
        owner: the object itself if it can be replaced by an equal one; held, so that its id is not used again.
        address: where its memory starts; 0 if it has none.
    """

    type_name: str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    content: bytes = b""
    owner: object = None
    address: int = 0

    def without_identity(self) -> Fact:
        return dataclasses.replace(self, owner=None, address=0)


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a plain tensor of any dtype and rank, in row-major order."""
    values = tensor.detach().resolve_conj().resolve_neg().cpu()
    # Copied: of one element torch calls any stride contiguous, and views as another dtype only a stride of 1.
    flat = torch.empty(values.numel(), dtype=values.dtype).copy_(values.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def facts(path: str, value: Any) -> Iterator[tuple[str, Fact]]:
    """The facts of a value and of everything in it, each with its path.

    Raises:
        TypeError: if there is no way to see inside of a value.
    """
    yield from _facts(path, value, ())


def _facts(path: str, value: Any, outer: tuple[int, ...]) -> Iterator[tuple[str, Fact]]:
    if id(value) in outer:
        yield path, Fact(_type_name(value), {"part of itself": True}, owner=value)
        return
    fact, parts = _look(path, value)
    yield path, fact
    for name, part in parts:
        yield from _facts(f"{path}{name}", part, (*outer, id(value)))


def _look(path: str, value: Any) -> tuple[Fact, list[tuple[str, Any]]]:
    """The fact of the value alone, and its parts."""
    if isinstance(value, Tensor):
        return _look_at_tensor(value)
    name = _type_name(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        details = {"dtype": array.dtype, "shape": array.shape}
        owner = value if isinstance(value, np.ndarray) else None
        return Fact(name, details, np.ascontiguousarray(array).tobytes(), owner), []
    if isinstance(value, float):
        return Fact(name, {"value": repr(value)}, struct.pack("<d", value)), []
    if isinstance(value, complex):
        return Fact(name, {"value": repr(value)}, struct.pack("<dd", value.real, value.imag)), []
    if isinstance(value, _SPELLED):
        return Fact(name, {"value": repr(value)}), []
    if isinstance(value, _NAMED):
        return Fact(name, {"name": getattr(value, "__qualname__", value.__name__)}, owner=value), []
    return _look_at_container(path, value)


def _look_at_container(path: str, value: Any) -> tuple[Fact, list[tuple[str, Any]]]:
    name = _type_name(value)
    if isinstance(value, torch.Generator):
        return Fact(name, {"device": str(value.device)}, raw_bytes(value.get_state()), owner=value), []
    if isinstance(value, random.Random):
        return Fact(name, owner=value), [(".state", value.getstate())]
    if isinstance(value, np.random.Generator):
        return Fact(name, owner=value), [(".state", value.bit_generator.state)]
    if isinstance(value, Mapping):
        keys = frozenset((_type_name(key), repr(key)) for key in value)
        return Fact(name, {"keys": keys}, owner=value), [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, Set):
        return Fact(name, {"members": frozenset((_type_name(part), repr(part)) for part in value)}, owner=value), []
    if isinstance(value, Sequence | deque):
        parts = [(f"[{index}]", part) for index, part in enumerate(value)]
        # CPython makes equal tuples the same object or not as it likes.
        owner = None if isinstance(value, tuple) else value
        details = {"length": len(value)} | ({"maxlen": value.maxlen} if isinstance(value, deque) else {})
        return Fact(name, details, owner=owner), parts
    if not hasattr(value, "__dict__"):
        raise TypeError(f"{path}: cannot see inside a {name}; teach tests/support/raw_values.py what it holds")
    return Fact(name, owner=value), [(f".{attribute}", part) for attribute, part in vars(value).items()]


def _look_at_tensor(value: Tensor) -> tuple[Fact, list[tuple[str, Any]]]:
    details: dict[str, Any] = {
        "dtype": value.dtype,
        "shape": tuple(value.shape),
        "device": str(value.device),
        "layout": value.layout,
        "requires_grad": value.requires_grad,
    }
    name = _type_name(value)
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        details["placements"] = value.placements
        details["mesh"] = (tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), mesh.mesh_dim_names)
        # Not to_local(): it makes a new tensor object on every call, and this one's identity counts.
        return Fact(name, details, owner=value), [(".local", value._local_tensor)]
    if is_traceable_wrapper_subclass(value):
        attributes, context = value.__tensor_flatten__()
        details["context"] = repr(context)
        return Fact(name, details, owner=value), [
            (f".{attribute}", getattr(value, attribute)) for attribute in attributes
        ]
    if value.layout is torch.sparse_coo:
        details["coalesced"] = value.is_coalesced()
        return Fact(name, details, owner=value), [(".indices", value._indices()), (".values", value._values())]
    details["stride"] = value.stride()
    if value.device.type == "meta":
        return Fact(name, details, owner=value), []
    return Fact(name, details, raw_bytes(value), value, value.data_ptr()), []


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def difference(before: Fact, after: Fact, *, identities: bool) -> str:
    """A sentence on how two facts differ, or nothing."""
    if before.type_name != after.type_name:
        return f"type {before.type_name} -> {after.type_name}"
    found: list[str] = []
    for key in {**before.details, **after.details}:
        old, new = before.details.get(key), after.details.get(key)
        if old == new:
            continue
        if isinstance(old, frozenset) and isinstance(new, frozenset):
            found += [f"{key} removed: {_keys(old - new)}"] if old - new else []
            found += [f"{key} added: {_keys(new - old)}"] if new - old else []
        else:
            found.append(f"{key} {old!r} -> {new!r}" if key != "value" else f"{old} -> {new}")
    if before.content != after.content and not found:
        found.append(_content_difference(before, after))
    if identities and before.owner is not after.owner:
        found.append("replaced by another object")
    elif identities and before.address != after.address:
        found.append(f"moved from address {before.address:#x} to {after.address:#x}")
    return "; ".join(found)


def _keys(keys: frozenset[tuple[str, str]]) -> str:
    return ", ".join(sorted(spelled for _, spelled in keys))


def _content_difference(before: Fact, after: Fact) -> str:
    dtype = before.details.get("dtype")
    if not isinstance(dtype, torch.dtype):
        same = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(before.content, after.content, strict=False)
            )
        )
        return f"content differs from byte {same} of {len(before.content)}"
    old, new = (np.frombuffer(fact.content, np.uint8).reshape(-1, dtype.itemsize) for fact in (before, after))
    changed = np.flatnonzero((old != new).any(axis=1))
    index = int(changed[0])
    values = [torch.frombuffer(bytearray(raw[index].tobytes()), dtype=dtype)[0].item() for raw in (old, new)]
    return (
        f"{len(changed)} of {len(old)} elements differ, first at {index}: "
        f"{values[0]!r} ({old[index].tobytes().hex()}) -> {values[1]!r} ({new[index].tobytes().hex()})"
    )


def value_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """How two flat dicts of any values differ, by bytes and types, not by object; empty if they do not."""
    left = dict(item for key, value in before.items() for item in facts(key, value))
    right = dict(item for key, value in after.items() for item in facts(key, value))
    return fact_differences(left, right, identities=False)


def fact_differences(before: Mapping[str, Fact], after: Mapping[str, Fact], *, identities: bool) -> list[str]:
    """One sentence per path whose facts differ or which only one side has; empty if there is none."""
    found = []
    for path in {**before, **after}:
        if path not in after:
            found.append(f"{path}: removed")
        elif path not in before:
            found.append(f"{path}: added")
        elif text := difference(before[path], after[path], identities=identities):
            found.append(f"{path}: {text}")
    return found
