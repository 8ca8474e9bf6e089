from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.errors import FormatError
from shardopt.portable import manifest, manifest_reader
from shardopt.portable.encode import encode
from shardopt.portable.manifest import (
    AbsentEntry,
    ElementwiseEntry,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
    ValueEntry,
    WholeEntry,
)
from shardopt.portable.manifest_reader import read_manifest
from shardopt.portable.packing import pack
from tests.unit.portable.values import LETTERS


def small() -> Manifest:
    """Every kind of entry once, two optimizers, a tied parameter, names that need quoting."""
    whole = pack({"row": torch.zeros(2)})
    return Manifest(
        shardopt="0.1.0",
        torch="2.13.0",
        optimizers=(OptimizerRecord("torch.optim.adamw.AdamW", "local"), OptimizerRecord("my.Opt", "dtensor")),
        groups=(
            GroupRecord(
                0, ("head.weight", "body.weight"), {"lr": 0.001, "betas": encode((0.9, 0.999)), "foreach": None}
            ),
            GroupRecord(1, ('ü"n',), {"lr": encode(torch.tensor(0.5))}),
        ),
        parameters={
            "head.weight": ParameterRecord(
                (4, 2), "float32", 0, 0, ("embed.weight",), {"step": ValueEntry(encode(torch.tensor(3.0)))}
            ),
            "body.weight": ParameterRecord(
                (0, 2), "bfloat16", 0, 0, (), {"exp_avg": ElementwiseEntry("float32"), "max_exp_avg_sq": AbsentEntry()}
            ),
            'ü"n': ParameterRecord(
                (), "float32", 1, 1, (), {"row": WholeEntry(whole.entries()["row"])}, whole.total_bytes
            ),
        },
        world_size=4,
    )


GOLDEN = (
    '{"magic":"shardopt optimizer state","format":1,"writer":{"shardopt":"0.1.0","torch":"2.13.0"},'
    '"scope":{"world_size":4},'
    '"optimizers":[{"class":"torch.optim.adamw.AdamW","compute":"local"},{"class":"my.Opt","compute":"dtensor"}],'
    '"groups":[{"optimizer":0,"members":["head.weight","body.weight"],'
    '"values":{"betas":{"!":"tuple","items":[0.9,0.999]},"foreach":null,"lr":0.001}},'
    '{"optimizer":1,"members":["ü\\"n"],'
    '"values":{"lr":{"!":"tensor","dtype":"float32","shape":[],"base64":"AAAAPw=="}}}],'
    '"parameters":{"body.weight":{"shape":[0,2],"dtype":"bfloat16","optimizer":0,"group":0,"aliases":[],'
    '"entries":{"exp_avg":{"layout":"elementwise","dtype":"float32"},"max_exp_avg_sq":{"layout":"absent"}},"blob":null},'
    '"head.weight":{"shape":[4,2],"dtype":"float32","optimizer":0,"group":0,"aliases":["embed.weight"],'
    '"entries":{"step":{"layout":"value","value":{"!":"tensor","dtype":"float32","shape":[],"base64":"AABAQA=="}}},'
    '"blob":null},'
    '"ü\\"n":{"shape":[],"dtype":"float32","optimizer":1,"group":1,"aliases":[],'
    '"entries":{"row":{"layout":"whole","packing":{"!":"leaf","id":0,"offset":0,"dtype":"float32","shape":[2]}}},'
    '"blob":8}},"extra":{}}'
).encode()


def test_the_bytes_of_format_1_are_pinned() -> None:
    # A change here is a new format version: checkpoints exist.
    assert small().to_bytes() == GOLDEN
    assert read_manifest(GOLDEN) == small()


def test_the_order_dicts_were_filled_in_does_not_show() -> None:
    forwards = small()
    backwards = dataclasses.replace(
        forwards,
        groups=tuple(
            dataclasses.replace(group, values=dict(reversed(list(group.values.items())))) for group in forwards.groups
        ),
        parameters={
            fqn: dataclasses.replace(record, entries=dict(reversed(list(record.entries.items()))))
            for fqn, record in reversed(list(forwards.parameters.items()))
        },
    )
    assert list(backwards.parameters) != list(forwards.parameters)
    assert backwards.to_bytes() == forwards.to_bytes()


def test_the_order_inside_a_typed_value_is_kept() -> None:
    reserved = dataclasses.replace(small(), extra={"z": {"b": 1, "a": 2}, "a": 0})
    extra = read_manifest(reserved.to_bytes()).extra
    assert list(extra) == ["a", "z"]
    assert list(extra["z"]) == ["b", "a"]


names = st.text(st.sampled_from(LETTERS), min_size=1, max_size=5)
typed = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), names, st.none()).map(encode)
entries = st.dictionaries(
    names,
    st.sampled_from([ElementwiseEntry("float32"), ElementwiseEntry("int8"), AbsentEntry()])
    | st.builds(ValueEntry, typed),
    max_size=3,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    fqns = draw(st.lists(names, unique=True, max_size=5))
    num_groups = draw(st.integers(1, 3))
    parameters = {
        fqn: ParameterRecord(
            shape=tuple(draw(st.lists(st.integers(0, 2**40), max_size=3))),
            dtype=draw(st.sampled_from(["float32", "bfloat16"])),
            optimizer=0,
            group=index % num_groups,
            aliases=(f"{fqn}.alias-{index}",),
            entries=draw(entries),
        )
        for index, fqn in enumerate(fqns)
    }
    groups = [
        GroupRecord(0, tuple(fqns[index::num_groups]), draw(st.dictionaries(names, typed, max_size=3)))
        for index in range(num_groups)
    ]
    return Manifest(
        shardopt="0.1.0",
        torch=draw(names),
        optimizers=(OptimizerRecord(draw(names), "local"),),
        groups=tuple(groups),
        parameters=parameters,
        world_size=draw(st.integers(1, 512)),
        extra=draw(st.dictionaries(names, typed, max_size=2)),
    )


@settings(max_examples=30, deadline=None)
@given(manifests())
def test_every_manifest_comes_back(written: Manifest) -> None:
    data = written.to_bytes()
    back = read_manifest(memoryview(data))
    assert back == written
    assert back.to_bytes() == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"^the manifest is not JSON \(.*\); its 0 bytes start with b''"),
        (
            b"\x80\x04\x95pickle",
            r"^the manifest is not JSON \(.*utf-8.*\); its 9 bytes start with b'\\x80\\x04\\x95pickle'",
        ),
        (GOLDEN[:-100], r"is not JSON"),
        (GOLDEN + b"x", r"is not JSON \(Extra data"),
        (b"[" * 100_000, r"is not JSON"),
        (b'{"magic":NaN}', r"is not JSON \(NaN is not JSON\)"),
        (GOLDEN.replace(b'"extra":{}', b'"extra":{"a":1,"a":2}'), r"keys occur twice in one object: \['a'\]"),
        (GOLDEN.replace(b'"world_size":4', b'"world_size":' + b"9" * 5000), r"is not JSON"),
        (b"{}", r"^not a shardopt manifest: got b'\{\}', expected an object whose magic is 'shardopt optimizer state'"),
        (b"[1]", r"^not a shardopt manifest"),
        (
            GOLDEN.replace(b"shardopt optimizer", b"someone's"),
            r"^not a shardopt manifest: .* written by a shardopt optimizer\?$",
        ),
        (
            GOLDEN.replace(b'"format":1', b'"format":2'),
            r"^the checkpoint has format 2, written by shardopt 0\.1\.0; this shardopt reads format 1: "
            r"install that version or a newer one\.$",
        ),
        (
            GOLDEN.replace(b'"format":1', b'"format":0'),
            r"^the checkpoint has format 0, written by shardopt 0\.1\.0; this shardopt reads format 1: "
            r"load it with that version\.$",
        ),
        (b'{"magic":"shardopt optimizer state","format":7}', r"has format 7, written by shardopt unknown"),
        (GOLDEN.replace(b'"format":1', b'"format":"1"'), r"has format '1', expected a number"),
        (GOLDEN.replace(b'"format":1', b'"format":true'), r"has format True, expected a number"),
    ],
    ids=range(16),
)
def test_what_is_no_manifest_of_this_format_is_named_F17(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_manifest(data)


def damaged(**paths: Any) -> bytes:
    """The golden manifest with values replaced: ``parameters__<fqn>__shape=...``; `...` deletes."""
    tree = json.loads(GOLDEN)
    for path, value in paths.items():
        *parents, last = [
            int(name) if name.isdecimal() else name.replace("body_weight", "body.weight") for name in path.split("__")
        ]
        node = tree
        for name in parents:
            node = node[name]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scope": ...}, "the manifest: lacks the fields ['scope'], has the unknown fields []"),
        ({"mesh": 1}, "the manifest: lacks the fields [], has the unknown fields ['mesh']"),
        ({"writer": 3}, "writer: got 3, expected an object with ['shardopt', 'torch']"),
        ({"writer__torch": 2.13}, "writer torch: got 2.13, expected text"),
        ({"scope__world_size": True}, "scope world_size: got True, expected a whole number of 0 or more"),
        ({"scope__world_size": 0}, "scope: got world_size 0, expected at least 1"),
        ({"extra": []}, "the manifest extra: got [], expected an object"),
        ({"optimizers": {}}, "the manifest optimizers: got {}, expected a list"),
        ({"optimizers__0__class": None}, "optimizers[0] class: got None, expected text"),
        ({"groups__0": "g"}, "groups[0]: got 'g', expected an object with ['members', 'optimizer', 'values']"),
        ({"groups__0__members": ["a", 1]}, "groups[0] members: got ['a', 1], expected a list of text"),
        ({"groups__1__optimizer": 2}, "groups[1]: optimizer 2 of 2 optimizers"),
        ({"groups__1__members": ['ü"n', "x"]}, "groups[1]: member 'x' is not among the parameters"),
        ({"groups__1__members": ['ü"n', 'ü"n']}, "groups[1]: member 'ü\"n' occurs twice, first in groups[1]"),
        ({"groups__1__members": []}, "parameter 'ü\"n': names groups[1] as its group, and is a member of groups[None]"),
        ({"parameters__body_weight__group": 1}, "parameter 'body.weight': names groups[1] as its group, and is a"),
        ({"parameters__body_weight__optimizer": 1}, "parameter 'body.weight': has optimizer 1, and its group 0"),
        (
            {"parameters__body_weight__shape": [1.0]},
            "parameter 'body.weight' shape: got [1.0], expected a list of whole",
        ),
        (
            {"parameters__body_weight__dtype": "torch.float32"},
            "dtype 'torch.float32' is unknown to this torch; names are",
        ),
        ({"parameters__body_weight__aliases": ["embed.weight"]}, "alias 'embed.weight' is already a name of"),
        ({"parameters__body_weight__blob": 5}, "parameter 'body.weight': has a blob of 5 bytes and no entries in it"),
        ({'parameters__ü"n__blob': None}, "parameter 'ü\"n': has a blob of None bytes and some entries in it"),
        ({'parameters__ü"n__blob': -1}, "parameter 'ü\"n' blob: got -1, expected a whole number of 0 or more"),
        (
            {"parameters__body_weight__entries__exp_avg": {"layout": "magic"}},
            "parameter 'body.weight' entry 'exp_avg': got layout 'magic', expected one of ['elementwise', 'absent', ",
        ),
        (
            {"parameters__body_weight__entries__exp_avg": {"layout": "absent", "dtype": "int8"}},
            "parameter 'body.weight' entry 'exp_avg': lacks the fields [], has the unknown fields ['dtype']",
        ),
        (
            {"parameters__body_weight__entries__exp_avg__dtype": 8},
            "parameter 'body.weight' entry 'exp_avg' dtype: got 8, expected text",
        ),
        ({"parameters__body_weight__entries__exp_avg__dtype": "float31"}, "dtype 'float31' is unknown to this torch"),
    ],
    ids=range(27),
)
def test_a_broken_manifest_is_refused_with_the_place(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_manifest(damaged(**change))
    assert f"\n- {problem}" in str(caught.value) or f": {problem}" in str(caught.value)


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(FormatError) as caught:
        read_manifest(damaged(writer__torch=1, parameters__body_weight__shape=3, groups__0__optimizer=-1))
    assert str(caught.value) == (
        "the manifest is damaged or not written by shardopt; load another checkpoint (3 problems):"
        "\n- groups[0] optimizer: got -1, expected a whole number of 0 or more"
        "\n- parameter 'body.weight' shape: got 3, expected a list"
        "\n- writer torch: got 1, expected text"
    )


def test_a_flood_of_problems_is_cut() -> None:
    with pytest.raises(FormatError, match=r"\(30 problems\):(\n- [^\n]*){20}\n- and 10 more$"):
        read_manifest(damaged(optimizers=[{"class": 1, "compute": 1}] * 15))


def test_too_large_is_refused_before_parsing_and_before_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_reader, "MAX_MANIFEST_BYTES", len(GOLDEN))
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", len(GOLDEN))
    assert read_manifest(small().to_bytes()) == small()
    monkeypatch.setattr(manifest_reader, "MAX_MANIFEST_BYTES", 100)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(
        FormatError, match=rf"^the manifest has {len(GOLDEN)} bytes, expected at most 100: it is damaged"
    ):
        read_manifest(GOLDEN)
    with pytest.raises(
        FormatError, match=r"and at most 100 can be read back: keep large tensors out of parameter groups$"
    ):
        small().to_bytes()


def test_a_contradiction_cannot_be_written() -> None:
    with pytest.raises(FormatError, match=r"contradicts itself \(1 problem\):\n- scope: got world_size 0"):
        dataclasses.replace(small(), world_size=0)


def test_a_name_that_is_not_text_cannot_be_written() -> None:
    odd = dataclasses.replace(small(), torch="2.13\ud800")
    with pytest.raises(FormatError, match=r"has a lone surrogate, which is not text: rename it"):
        odd.to_bytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))
def test_a_flipped_byte_is_a_format_error_or_another_manifest(position: int, byte: int) -> None:
    data = bytearray(GOLDEN)
    data[position] = byte
    with contextlib.suppress(FormatError):
        read_manifest(data)
