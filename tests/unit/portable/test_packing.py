from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.errors import FormatError, PlacementError
from shardopt.portable.packing import ALIGNMENT_BYTES, MAX_SMALL_LEAF_BYTES, Packed, pack, unpack
from tests.unit.portable.values import DTYPES, same, tensors, values

# One element past the limit, and no multiple of the alignment, so that a pad chunk is needed after it.
LARGE = MAX_SMALL_LEAF_BYTES // 4 + 1


def joined(packed: Packed) -> torch.Tensor:
    """The bytes as a checkpoint would hold them; fails unless the chunks cover them exactly, in order."""
    data = torch.empty(packed.total_bytes, dtype=torch.uint8)
    end = 0
    for offset, chunk in packed.chunks:
        assert offset == end
        assert chunk.dtype == torch.uint8
        assert chunk.dim() == 1
        assert chunk.numel() > 0
        end = offset + chunk.numel()
        data[offset:end] = chunk
    assert end == packed.total_bytes
    return data


def round_trip(value: object, *, copy: bool = True) -> Any:
    packed = pack(value)
    return unpack(json.loads(json.dumps(packed.layout)), joined(packed), copy=copy)


@settings(max_examples=60, deadline=None)
@given(values, st.booleans())
def test_every_value_comes_back_to_the_bit(value: object, copy: bool) -> None:
    assert same(round_trip(value, copy=copy), value)


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors(), max_size=5), st.booleans())
def test_every_leaf_is_aligned_and_apart(leaves: list[torch.Tensor], copy: bool) -> None:
    back = round_trip(leaves, copy=copy)
    assert same(back, leaves)
    for leaf in back:
        assert leaf.data_ptr() % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_small_and_large(dtype: torch.dtype, copy: bool) -> None:
    data = torch.arange(MAX_SMALL_LEAF_BYTES * 4).to(torch.uint8).view(dtype)
    # 6-D and strided: sliced along two dims, so it has holes and must be copied.
    strided = data[: 256 // dtype.itemsize].view(2, 2, 1, 2, 2, -1)[:, ::2, :, :, ::2]
    value = {"empty": data[:0].view(0, 3), "scalar": data[3], "large": data, "strided": strided, "odd": data[1:2]}
    assert same(round_trip(value, copy=copy), value)


def test_a_large_dense_leaf_is_not_copied() -> None:
    row_major = torch.randn(LARGE, 3)
    column_major = torch.randn(3, LARGE).t()
    packed = pack([row_major, column_major])
    addresses = {chunk.data_ptr() for _, chunk in packed.chunks}
    assert {row_major.data_ptr(), column_major.data_ptr()} <= addresses
    back = round_trip([row_major, column_major])
    assert [leaf.stride() for leaf in back] == [row_major.stride(), column_major.stride()]


def test_small_leaves_share_one_chunk_and_large_ones_need_few_pads() -> None:
    # Adafactor's state of a matrix: one item to write, not three.
    assert len(pack({"row": torch.zeros(100), "col": torch.zeros(70), "step": torch.tensor(1.0)}).chunks) == 1
    ragged, aligned = torch.zeros(LARGE), torch.zeros(LARGE + 15)
    # Whatever the order given: small ones and a pad, the aligned leaf, the ragged one at the end.
    for value in ([ragged, aligned, torch.ones(3)], [torch.ones(3), aligned, ragged]):
        assert [chunk.numel() for _, chunk in pack(value).chunks] == [12, 52, 4 * (LARGE + 15), 4 * LARGE]
    assert len(pack([ragged, ragged.clone()]).chunks) == 3


def test_pads_are_zeros() -> None:
    # Stale memory in the file would make equal states differ in their digests.
    data = joined(pack([torch.ones(3, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)]))
    assert data.tolist() == [1, 1, 1, *[0] * 61, 1]


def test_the_layout_is_pinned() -> None:
    q = torch.arange(6.0).view(2, 3).t()
    packed = pack({"q": q, "history": (q, torch.zeros((), dtype=torch.bfloat16)), "k": 3})
    leaf = {"!": "leaf", "id": 0, "offset": 0, "dtype": "float32", "shape": [3, 2], "order": [1, 0]}
    scalar = {"!": "leaf", "id": 1, "offset": 64, "dtype": "bfloat16", "shape": []}
    assert packed.layout == {"q": leaf, "history": {"!": "tuple", "items": [leaf, scalar]}, "k": 3}
    assert packed.total_bytes == 66


def test_a_shared_leaf_is_stored_once_and_comes_back_shared() -> None:
    shared = torch.randn(5)
    alias = shared.view(5)
    back = round_trip({"a": [shared], "b": shared, "c": alias})
    assert back["a"][0] is back["b"]
    assert back["c"] is not back["b"]
    assert pack([shared, shared]).total_bytes == 20


def test_empty_leaves_stay_apart_unless_shared() -> None:
    a, b = torch.empty(0), torch.empty(0)
    back = round_trip([a, b, a])
    assert back[0] is back[2]
    assert back[0] is not back[1]
    assert pack([a, b]).chunks == []
    assert pack([a, b]).total_bytes == 0


def test_a_value_without_tensors_has_no_bytes() -> None:
    packed = pack({"history": [1, (2.5, None)]})
    assert (packed.chunks, packed.total_bytes) == ([], 0)
    assert round_trip({"history": [1, (2.5, None)]}) == {"history": [1, (2.5, None)]}


def test_entries_are_read_apart_or_together() -> None:
    shared = torch.arange(4.0)
    packed = pack({"row": shared, "col": [torch.ones(2), shared]})
    entries, data = packed.entries(), joined(packed)
    assert same(unpack(entries["col"], data, copy=True), [torch.ones(2), shared])
    together: Any = unpack(entries, data, copy=True)
    assert together["row"] is together["col"][1]


@pytest.mark.parametrize("value", [{"!": torch.zeros(1)}, {3: torch.zeros(1)}, [torch.zeros(1)]])
def test_entries_need_plain_names(value: object) -> None:
    with pytest.raises(PlacementError, match="state entries must be named by text other than '!'"):
        pack(value).entries()


def test_copies_own_their_memory_and_views_share_it() -> None:
    packed = pack([torch.zeros(3), torch.zeros(3)])
    data = joined(packed)
    views: Any = unpack(packed.layout, data, copy=False)
    copies: Any = unpack(packed.layout, data, copy=True)
    data.fill_(1)
    assert copies[0].tolist() == [0, 0, 0]
    assert views[0].view(torch.uint8).tolist() == [1] * 12
    assert copies[0].untyped_storage().nbytes() == 12


def test_requires_grad_comes_back() -> None:
    assert round_trip(torch.zeros(2, requires_grad=True)).requires_grad
    assert not round_trip(torch.zeros(2)).requires_grad


def test_packing_changes_nothing() -> None:
    tensor = torch.ones(3, requires_grad=True)
    value = {"a": tensor}
    pack(value)
    assert value["a"] is tensor
    assert tensor.grad is None
    assert tensor.is_leaf


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(PlacementError, match=r"^layers\.0\.state\[1\]: got a tensor on the meta device"):
        pack({"state": [torch.zeros(1), torch.zeros(1, device="meta")]}, "layers.0")


LAYOUT: dict[str, Any] = {"!": "leaf", "id": 0, "offset": 0, "dtype": "float32", "shape": [16]}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (LAYOUT | {"shape": [33]}, r"blob\.w: leaf 0 is bytes 0 to 132 of data that has 128"),
        (LAYOUT | {"offset": 128}, r"leaf 0 is bytes 128 to 192 of data that has 128"),
        (LAYOUT | {"offset": 4}, r"got the leaf 0 at offset 4, expected a multiple of 64"),
        (LAYOUT | {"offset": -64}, r"at offset -64, expected a multiple of 64"),
        (LAYOUT | {"offset": 0.0}, r"at offset 0\.0, expected"),
        (LAYOUT | {"id": "a"}, r"got the leaf 'a'"),
        (LAYOUT | {"dtype": "float31"}, r"dtype 'float31' is unknown to torch"),
        (LAYOUT | {"dtype": "qint8"}, r"not stored as bytes"),
        (LAYOUT | {"shape": [2**62, 4]}, r"got shape .*, expected a list of sizes"),
        (LAYOUT | {"strides": [1]}, r"has the unknown fields \['strides'\]"),
        ({"!": "leaf", "id": 0}, r"lacks the fields \['offset', 'dtype', 'shape'\]"),
        ([LAYOUT, LAYOUT | {"shape": [4]}], r"blob\.w\[1\]: leaf 0 is described twice"),
        (
            [LAYOUT | {"shape": [17]}, LAYOUT | {"id": 1, "offset": 64}],
            r"leaf 0 ends at byte 68 and leaf 1 starts at byte 64",
        ),
        ([LAYOUT, LAYOUT | {"id": 1}], r"leaf 0 ends at byte 64 and leaf 1 starts at byte 0"),
        ({"a": {"!": "tuple"}}, r"blob\.w\.a: tagged object 'tuple' lacks"),
    ],
)
@pytest.mark.parametrize("copy", [True, False])
def test_damage_is_named(layout: Any, message: str, copy: bool) -> None:
    with pytest.raises(FormatError, match=message):
        unpack(layout, torch.zeros(128, dtype=torch.uint8), copy=copy, path="blob.w")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["id", "offset", "dtype", "shape", "order"]), st.integers(0, 2), st.data())
def test_any_damage_is_a_format_error_or_another_value(field: str, leaf: int, data: st.DataObject) -> None:
    packed = pack([torch.zeros(4, 2).t(), torch.zeros(3), torch.zeros(0)])
    layout = copy.deepcopy(packed.layout)
    assert isinstance(layout, list)
    damage = st.integers(-64, 200) | st.lists(st.integers(-1, 2**40), max_size=3) | st.sampled_from([None, "int8", 0.5])
    layout[leaf][field] = data.draw(damage)
    with contextlib.suppress(FormatError):
        unpack(layout, joined(packed), copy=True)


@pytest.mark.parametrize(
    ("data", "copy", "message"),
    [
        (torch.zeros(64), True, r"must be contiguous 1-D uint8, got torch\.float32 of shape \[64\]"),
        (torch.zeros(8, 8, dtype=torch.uint8), True, r"got torch\.uint8 of shape \[8, 8\]"),
        (torch.zeros(128, dtype=torch.uint8)[::2], True, r"must be contiguous"),
        (torch.zeros(128, dtype=torch.uint8)[8:72], False, r"must start at a multiple of 64 bytes .*; pass copy=True"),
    ],
)
def test_the_wrong_kind_of_data_is_the_callers_mistake(data: torch.Tensor, copy: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(LAYOUT, data, copy=copy)


def test_unaligned_data_can_be_copied_from() -> None:
    data = torch.zeros(128, dtype=torch.uint8)[8:72]
    assert same(unpack(LAYOUT, data, copy=True), torch.zeros(16))
