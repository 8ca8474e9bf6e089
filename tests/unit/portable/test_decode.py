"""Damage: every malformed input ends in a FormatError that says where and what, never in another exception."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.errors import FormatError
from shardopt.portable.decode import decode
from shardopt.portable.encode import encode
from shardopt.portable.tagged import Json
from tests.unit.portable.values import values

TENSOR: dict[str, Json] = {"!": "tensor", "dtype": "float32", "shape": [1], "base64": "AABAQA=="}


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ({"a": [0, {"!": "pickle"}]}, r"^state\.a\[1\]: got the tag 'pickle', expected one of \['bytes', 'complex'"),
        ({"!": ["tuple"]}, r"got the tag \['tuple'\]"),
        ({"!": "tuple"}, r"tagged object 'tuple' lacks the fields \['items'\] and has the unknown fields \[\]"),
        ({"!": "tuple", "items": [], "x": 1}, r"has the unknown fields \['x'\]"),
        ({"!": "tuple", "items": "ab"}, r"got the items 'ab', expected a list"),
        ({"!": "leaf", "id": 0}, r"got the tag 'leaf'"),
        (float("nan"), r"got the bare number nan, expected it tagged"),
        (b"x", r"got a bytes, expected a JSON value"),
        ({"!": "int", "hex": "0x1_0"}, r"got the integer '0x1_0'"),
        ({"!": "int", "hex": 5}, r"got the integer 5"),
        ({"!": "float", "bits": "7FF0000000000000"}, r"expected 16 lower-case hex digits"),
        ({"!": "float", "bits": "7ff0"}, r"got '7ff0', expected 16 lower-case hex digits"),
        ({"!": "complex", "real": 1, "imag": 0.0}, r"complex number of 1 and 0\.0, expected two floats"),
        ({"!": "str", "base64": "/w=="}, r"text that is not UTF-8"),
        ({"!": "bytes", "base64": "A"}, r"text that is not base64"),
        ({"!": "bytes", "base64": "\u20ac"}, r"text that is not base64"),
        ({"!": "bytes", "base64": None}, r"got None, expected base64 text"),
        ({"!": "size", "items": [True]}, r"torch\.Size of \[True\], expected 64-bit integers"),
        ({"!": "size", "items": [2**63]}, r"expected 64-bit integers"),
        ({"!": "deque", "maxlen": 1, "items": [1, 2]}, r"deque of 2 items with maxlen 1"),
        ({"!": "deque", "maxlen": True, "items": []}, r"deque of 0 items with maxlen True"),
        ({"!": "set", "items": [1, 1]}, r"expected distinct hashable values"),
        ({"!": "frozenset", "items": [[1]]}, r"expected distinct hashable values"),
        ({"!": "dict", "items": [[1]]}, r"got the dict item \[1\], expected a \[key, value\] pair"),
        ({"!": "dict", "items": [[[], 1]]}, r"got the dict key \[\], expected distinct hashable values"),
        ({"!": "dict", "items": [[1, 1], [1, 2]]}, r"got the dict key 1, expected distinct"),
        ({"!": "dict", "items": [[TENSOR, 1]]}, r"expected distinct hashable values"),
        ({"!": "dtype", "name": "float31"}, r"dtype 'float31' is unknown to torch"),
        ({"!": "dtype", "name": "nn"}, r"dtype 'nn' is unknown"),
        ({"!": "device", "type": "warp", "index": 0}, r"device 'warp' 0, unknown to torch"),
        ({"!": "device", "type": "cuda", "index": 300}, r"device 'cuda' 300, which torch reads as cuda:44"),
        ({"!": "device", "type": "cuda:1", "index": None}, r"which torch reads as cuda:1"),
        ({"!": "device", "type": "cuda", "index": "0"}, r"expected a type and an index or null"),
        ({**TENSOR, "shape": [2]}, r"got 4 bytes for a torch\.float32 tensor of shape \[2\]"),
        ({**TENSOR, "shape": [-1]}, r"got shape \[-1\], expected a list of sizes"),
        ({**TENSOR, "shape": [2**62, 2, 0]}, r"expected a list of sizes"),
        ({**TENSOR, "shape": 1}, r"got shape 1, expected"),
        ({**TENSOR, "dtype": "qint8"}, r"tensors of dtype qint8 are not stored as bytes"),
        ({**TENSOR, "order": [1]}, r"got order \[1\], expected a permutation of 1 dims"),
        ({**TENSOR, "dtype": "int32", "requires_grad": True}, r"requires_grad=True on a tensor of dtype int32"),
        ({**TENSOR, "requires_grad": 1}, r"requires_grad=1 on"),
        ({"!": "numpy", "dtype": "object", "bytes": ""}, r"NumPy scalar of dtype 'object', expected one of"),
        ({"!": "numpy", "dtype": "int16", "bytes": "00"}, r"expected 4 lower-case hex digits"),
    ],
)
def test_damage_is_named(encoded: Json, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        decode(encoded, "state")
    assert str(caught.value).startswith("state")
    assert str(caught.value).endswith("the checkpoint is damaged or not written by shardopt: load another one.")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**65)
    | st.floats()
    | st.sampled_from(["", "a", "tuple", "0x1", "AAAA", "float32"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["!", "items", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def _damage(encoded: Json, spot: int, damage: Json) -> Json:
    """The same tree with its ``spot``-th node replaced."""
    nodes: list[tuple[list[Json] | dict[str, Json], int | str]] = []
    pending: list[Json] = [encoded]
    while pending:
        node = pending.pop()
        if isinstance(node, (list, dict)):
            for key in range(len(node)) if isinstance(node, list) else list(node):
                nodes.append((node, key))
                pending.append(node[key])
    if not nodes:
        return damage
    parent, key = nodes[spot % len(nodes)]
    parent[key] = damage
    return encoded


@settings(max_examples=50, deadline=None)
@given(values, st.integers(0, 100), json_values)
def test_any_damage_is_a_format_error_or_another_value(value: object, spot: int, damage: Json) -> None:
    encoded = _damage(copy.deepcopy(encode(value)), spot, damage)
    with contextlib.suppress(FormatError):
        decode(encoded)
