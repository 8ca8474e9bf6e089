from __future__ import annotations

import collections
import enum
import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from shardopt.errors import FormatError, PlacementError
from shardopt.portable.decode import decode
from shardopt.portable.encode import MAX_INLINE_TENSOR_BYTES, encode, equal
from shardopt.portable.tagged import MAX_DEPTH, Json
from tests.unit.portable.values import DTYPES, same, values


def through_text(encoded: Json) -> Json:
    """What a reader gets: the JSON as UTF-8 text, as in the manifest."""
    return json.loads(json.dumps(encoded, ensure_ascii=False, allow_nan=False).encode("utf-8"))


@settings(max_examples=100, deadline=None)
@given(values)
def test_every_value_comes_back_to_the_bit(value: object) -> None:
    back = decode(through_text(encode(value)))
    assert same(back, value)
    assert equal(back, value)


@settings(max_examples=50, deadline=None)
@given(values, values)
def test_equal_agrees_with_an_independent_comparison(a: object, b: object) -> None:
    assert equal(a, b) == same(a, b)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.1, "text", "\u20ac", [1, [2.5, None]], {"lr": 1e-3, "betas": [0.9, 0.999]}),
        *(2**64 - 1, -(2**63), 5e-324, 1.7976931348623157e308),
    ],
)
def test_what_json_can_say_stays_plain(value: object) -> None:
    assert encode(value) == value


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ((0.9, 0.999), {"!": "tuple", "items": [0.9, 0.999]}),
        (float("inf"), {"!": "float", "bits": "7ff0000000000000"}),
        (2**64, {"!": "int", "hex": "0x10000000000000000"}),
        ({"!": 1}, {"!": "dict", "items": [["!", 1]]}),
        ({2: "b", 1: "a"}, {"!": "dict", "items": [[2, "b"], [1, "a"]]}),
        ({3, 1, 2}, {"!": "set", "items": [1, 2, 3]}),
        (torch.bfloat16, {"!": "dtype", "name": "bfloat16"}),
        (torch.device("cuda", 1), {"!": "device", "type": "cuda", "index": 1}),
        (torch.tensor(3.0), {"!": "tensor", "dtype": "float32", "shape": [], "base64": "AABAQA=="}),
        (np.float64(0.5), {"!": "numpy", "dtype": "float64", "bytes": "000000000000e03f"}),
        ("\ud800", {"!": "str", "base64": "7aCA"}),
        (collections.deque([1], 2), {"!": "deque", "maxlen": 2, "items": [1]}),
    ],
)
def test_the_encoded_form_is_pinned(value: object, encoded: Json) -> None:
    assert encode(value) == encoded


# Each pair is told apart by one property that Python's == or JSON would lose.
@pytest.mark.parametrize(
    ("a", "b"),
    [
        *((1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ("a", b"a"), (0, None), (1.0, np.float64(1.0)), ({1}, {True})),
        (struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0], float("nan")),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 0}, {True: 0}),
        (torch.Size([1]), (1,)),
        ({1}, frozenset({1})),
        (collections.deque([1], 1), collections.deque([1])),
        ("\ud83d\ude00", "\U0001f600"),
        # The same bytes.
        (np.int32(1), np.uint32(1)),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.device("cuda"), torch.device("cuda", 0)),
    ],
)
def test_near_misses_differ(a: object, b: object) -> None:
    assert not equal(a, b)
    assert json.dumps(encode(a)) != json.dumps(encode(b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    # Every byte value, so NaNs, subnormals and bools other than 0 and 1 are among the elements.
    tensor = torch.arange(256).to(torch.uint8).view(dtype)
    forms = [tensor, tensor.view(2, -1), tensor.view(2, -1).t(), tensor[::2], tensor[0], tensor[:0], tensor[1:2]]
    # Contiguous to torch, and yet with a stride of 2.
    forms += [tensor[:0][::2], tensor[:1][::2]]
    for form in forms:
        back = decode(through_text(encode(form)))
        assert same(back, form)
        assert equal(back, form)


def test_equal_ignores_a_tensors_strides() -> None:
    square = torch.arange(6.0).view(2, 3)
    assert equal(square, square.t().contiguous().t())


def test_memory_order_survives() -> None:
    # linalg.qr returns column-major factors; row-major ones would take other kernels after a resume.
    q = torch.linalg.qr(torch.eye(3))[0]
    assert q.stride() == (1, 3)
    back = decode(encode(q))
    assert isinstance(back, torch.Tensor)
    assert back.stride() == (1, 3)


def test_a_lazy_conjugate_and_negative_are_stored_resolved() -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (number.conj(), number.conj().imag):
        assert same(decode(encode(lazy)), lazy.resolve_conj().resolve_neg().clone())


def test_a_decoded_tensor_owns_its_memory() -> None:
    encoded = encode(torch.zeros(2))
    first, second = decode(encoded), decode(encoded)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    first.add_(1).resize_(100)
    assert second.tolist() == [0, 0]


def test_a_value_that_is_encoded_is_not_touched() -> None:
    tensor = torch.ones(2, requires_grad=True)
    value = {"a": [tensor], 1: {2}}
    encode(value)
    assert value["a"][0] is tensor
    assert tensor.grad is None
    assert value[1] == {2}


Point = collections.namedtuple("Point", ["x", "y"])


class Colour(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Point(1, 2), r"^groups\[0\]: got a namedtuple .*Point, .*; store a tuple, or a dict from _asdict\(\)$"),
        (
            {"foo": [1, 2, object()]},
            r"^groups\[0\]\.foo\[2\]: got a builtins\.object, which has no exact stored form; ",
        ),
        ({"my key": Colour.RED}, r"^groups\[0\]\['my key'\]: got a .*\.Colour, "),
        (Text("a"), r"^groups\[0\]: got a .*\.Text, "),
        (collections.OrderedDict(), r"OrderedDict"),
        (np.zeros(2), r"numpy\.ndarray; store torch\.from_numpy"),
        (np.longdouble(1), r"NumPy scalar of dtype (float128|longdouble)"),
        (np.str_("a"), r"NumPy scalar of dtype str"),
        (len, r"callable .* code is not stored"),
        ({(1, torch.zeros(1)): 1}, r"^groups\[0\]: the key \(1, tensor\(\[0\.\]\)\) of type builtins\.tuple cannot"),
        ({torch.zeros(1)}, r"^groups\[0\]: the element tensor\(\[0\.\]\) of type torch\.Tensor cannot be stored"),
        (nn.Parameter(torch.zeros(1)), r"got a torch\.nn\.parameter\.Parameter, expected a plain torch\.Tensor"),
        (torch.zeros(2).to_sparse(), r"torch\.sparse_coo tensor, expected a strided one"),
        (torch.zeros(2, device="meta"), r"meta device, which has no data: materialise it"),
        (torch.zeros(2, dtype=torch.int4), r"got a tensor of torch\.int4, which has no plain bytes"),
        (
            [torch.zeros(MAX_INLINE_TENSOR_BYTES + 1, dtype=torch.uint8)],
            r"^groups\[0\]\[0\]: a tensor of 65537 bytes is too large for the manifest",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(value: object, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        encode(value, "groups[0]")


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(PlacementError, match="nested deeper than 64 levels, or it holds itself"):
        encode(loop)


def test_depth_is_the_same_limit_both_ways() -> None:
    nested: object = 0
    for _ in range(MAX_DEPTH):
        nested = (nested,)
    encoded = through_text(encode(nested))
    assert equal(decode(encoded), nested)
    with pytest.raises(PlacementError, match="nested deeper"):
        encode((nested,))
    with pytest.raises(FormatError, match="nested deeper than 64 levels"):
        decode({"!": "tuple", "items": [encoded]})


def test_the_root_has_a_name_in_errors() -> None:
    with pytest.raises(PlacementError, match=r"^the value: got a builtins\.object"):
        encode(object())


def test_equal_refuses_what_encode_refuses() -> None:
    with pytest.raises(PlacementError, match="Colour"):
        equal(Colour.RED, Colour.RED)
