"""Values to round-trip: hypothesis strategies, and a comparison that shares no code with the package."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter, deque

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]

NUMPY_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, by a route of its own: from memory, or element by element."""
    if tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.dtype.itemsize) if tensor.numel() else b""
    return b"".join(map(raw, walk(tensor)))


def walk(tensor: torch.Tensor) -> list[torch.Tensor]:
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.detach().view(ints[tensor.dtype.itemsize])
    return [plain[index] for index in np.ndindex(*tensor.shape)]


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (set, frozenset)):
        return Counter(map(fingerprint, a)) == Counter(map(fingerprint, b))
    return fingerprint(a) == fingerprint(b)


def fingerprint(value: object) -> object:
    """Equal for two scalars, or tuples of scalars, only when type and bits are."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.requires_grad, raw(value))
    if isinstance(value, np.generic):
        return (value.dtype, value.tobytes())
    if isinstance(value, complex):
        return (complex, bits(value.real), bits(value.imag))
    if isinstance(value, float):
        return (float, bits(value))
    if isinstance(value, (tuple, frozenset)):
        items = [fingerprint(item) for item in value]
        return (type(value), tuple(items) if isinstance(value, tuple) else frozenset(items))
    return (type(value), value)


any_float = st.one_of(st.floats(), st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack("<d", data)[0]))
# What text can go wrong with: quotes, escapes, the tag, other scripts, astral characters, lone and paired surrogates.
LETTERS = 'ab!"\\\0\n\u2028\u00e9\u20ac\U0001f600'
any_text = st.text(st.sampled_from([*LETTERS, "\ud83d", "\ude00"]), max_size=4)
any_numpy = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda name: st.binary(min_size=np.dtype(name).itemsize, max_size=np.dtype(name).itemsize).map(
        lambda data: (
            # A NumPy bool is 0 or 1; other bytes are no value of it.
            np.bool_(data[0] % 2) if name == "bool" else np.frombuffer(data, dtype=name)[0]
        )
    )
)


@st.composite
def tensors(draw: st.DrawFn, max_elems: int = 64) -> torch.Tensor:
    """Any dtype, any bits, up to 4 dims, empty and 0-d ones, row-major, permuted, sliced or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    num_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    tensor = torch.tensor(list(data), dtype=torch.uint8).view(dtype).view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    if tensor.dim() and tensor.shape[0] == 1 and draw(st.booleans()):
        tensor = tensor.expand(3, *tensor.shape[1:])
    return tensor


scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), any_float, st.complex_numbers(), any_text, st.binary(max_size=6)),
    st.integers(-(2**70), 2**70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int4, torch.qint8]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 3), torch.device("meta")]),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
    any_numpy,
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    few = st.lists(inner, max_size=3)
    return st.one_of(
        *(few, few.map(tuple), few.map(deque), few.map(lambda items: deque(items, len(items) + 1))),
        *(st.dictionaries(keys, inner, max_size=3), st.dictionaries(any_text, inner, max_size=3)),
        *(st.sets(keys, max_size=3), st.frozensets(keys, max_size=3)),
    )


values = st.recursive(st.one_of(scalars, tensors()), containers, max_leaves=8)
