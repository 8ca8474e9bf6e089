"""Objects of declared classes in state: saved by their attributes, rebuilt without an import or a constructor."""

from __future__ import annotations

import enum
import json
from typing import Any

import pytest
import torch

from shardopt import FormatError, PlacementError, declare_saved
from shardopt.layouts import objects
from shardopt.portable.encode import decode, encode, equal
from shardopt.portable.packing import pack, unpack


class Kind(enum.Enum):
    ROW = 1
    COLUMN = 2


class Projector:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.basis = torch.arange(rank * 3.0).view(rank, 3)
        self.kind = Kind.COLUMN


class Slotted:
    __slots__ = ("value",)


@pytest.fixture(autouse=True)
def _declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_DECLARED", {})


def test_an_undeclared_object_is_refused_and_told_how_to_declare_it() -> None:
    with pytest.raises(PlacementError, match=r"state: got a .*Projector, .*shardopt.declare_saved\(Projector\)"):
        encode(Projector(2), "state")


def test_a_declared_object_comes_back_with_its_class_and_attributes() -> None:
    declare_saved(Projector, Kind)
    packed = pack({"projector": Projector(2)}, "weight")
    data = torch.cat([chunk for _, chunk in packed.chunks])
    back: Any = unpack(json.loads(json.dumps(packed.layout)), data, copy=True)
    found = back["projector"]
    assert type(found) is Projector
    assert (found.rank, found.kind) == (2, Kind.COLUMN)
    assert torch.equal(found.basis, Projector(2).basis)
    assert equal(found, Projector(2))
    assert not equal(found, Projector(3))


def test_an_enumeration_is_saved_by_its_members_name() -> None:
    declare_saved(Kind)
    encoded = json.loads(json.dumps(encode(Kind.ROW)))
    assert encoded["fields"] == {"name": "ROW"}
    assert decode(encoded) is Kind.ROW
    encoded["fields"] = {"name": "DIAGONAL"}
    with pytest.raises(FormatError, match="DIAGONAL"):
        decode(encoded, "kind")


def test_a_load_makes_no_object_of_a_class_that_is_not_declared_there(monkeypatch: pytest.MonkeyPatch) -> None:
    declare_saved(Kind)
    encoded = encode(Kind.ROW)
    monkeypatch.setattr(objects, "_DECLARED", {})
    with pytest.raises(FormatError, match=r"kind: an object of '.*Kind', and no such class is declared here"):
        decode(encoded, "kind")


@pytest.mark.parametrize(
    "damage",
    [{"class": 3}, {"class": "os.system"}, {"fields": [1]}, {"fields": {"!": "dict", "items": [[1, 2]]}}],
    ids=str,
)
def test_a_damaged_object_is_refused(damage: dict[str, Any]) -> None:
    declare_saved(Projector, Kind)
    encoded: Any = encode(Kind.ROW)
    with pytest.raises(FormatError):
        decode({**encoded, **damage}, "kind")


def test_a_subclass_is_a_class_of_its_own() -> None:
    class Special(Projector):
        pass

    declare_saved(Projector, Kind)
    with pytest.raises(PlacementError, match="Special"):
        encode(Special(1))


@pytest.mark.parametrize("wrong", [3, "Projector", Slotted])
def test_what_cannot_be_declared_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="declare_saved"):
        declare_saved(wrong)


def test_known_classes_of_libraries_are_found_where_they_are_loaded() -> None:
    pytest.importorskip("pytorch_optimizer")
    missing = [name for name in objects._KNOWN if objects.saved_class(name) is None]
    assert missing == []
