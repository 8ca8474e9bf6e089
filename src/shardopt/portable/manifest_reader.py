"""Bytes back into a manifest: judged in full before any of it is believed, all problems in one error."""

from __future__ import annotations

import json
from collections.abc import Set

from shardopt.errors import FormatError
from shardopt.portable.manifest import (
    FORMAT,
    MAGIC,
    MAX_MANIFEST_BYTES,
    AbsentEntry,
    ElementwiseEntry,
    Entry,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
    PerRankEntry,
    ValueEntry,
    WholeEntry,
    raise_problems,
)
from shardopt.portable.segments import BLOCKWISE_FIELDS, read_blockwise
from shardopt.portable.tagged import Json

__all__ = ["read_manifest", "read_parameters"]

_Object = dict[str, Json]

_FIELDS = frozenset(("magic", "format", "writer", "scope", "optimizers", "groups", "parameters", "extra"))
_WRITER_FIELDS = frozenset(("shardopt", "torch"))
_SCOPE_FIELDS = frozenset(("world_size",))
_OPTIMIZER_FIELDS = frozenset(("class", "compute"))
_GROUP_FIELDS = frozenset(("optimizer", "members", "values"))
_PARAMETER_FIELDS = frozenset(("shape", "dtype", "optimizer", "group", "aliases", "entries", "blob"))
_ENTRY_FIELDS = {
    "elementwise": frozenset(("layout", "dtype")),
    "absent": frozenset(("layout",)),
    "value": frozenset(("layout", "value")),
    "whole": frozenset(("layout", "packing")),
    "per_rank": frozenset(("layout",)),
    "blockwise": BLOCKWISE_FIELDS,
}

_ABSENT = AbsentEntry()


def read_manifest(data: bytes | bytearray | memoryview) -> Manifest:
    """The manifest that ``Manifest.to_bytes`` wrote.

    Raises:
        FormatError: no manifest, one of another format version, or a broken one; the last lists every problem.
    """
    tree = _parse(bytes(data))
    _check_format(tree)
    reader = _Reader()
    parts = reader.fields(tree, "the manifest", _FIELDS)
    writer = reader.fields(parts["writer"], "writer", _WRITER_FIELDS) if "writer" in parts else {}
    scope = reader.fields(parts["scope"], "scope", _SCOPE_FIELDS) if "scope" in parts else {}
    optimizers = reader.optimizers(parts)
    groups = reader.groups(parts)
    parameters = reader.parameters(parts)
    shardopt, torch = reader.text(writer, "shardopt", "writer"), reader.text(writer, "torch", "writer")
    world_size = reader.count(scope, "world_size", "scope")
    extra = reader.object(parts, "extra", "the manifest")
    raise_problems("the manifest is damaged or not written by shardopt; load another checkpoint", reader.problems)
    return Manifest(
        shardopt=shardopt,
        torch=torch,
        optimizers=optimizers,
        groups=groups,
        parameters=parameters,
        world_size=world_size,
        extra=extra,
    )


def read_parameters(tree: _Object) -> dict[str, ParameterRecord]:
    """The records that ``parameters_json`` wrote.

    Raises:
        FormatError: one of them is broken; lists every problem.
    """
    reader = _Reader()
    records = reader.parameters({"parameters": tree})
    raise_problems("the parameters are not as shardopt writes them", reader.problems)
    return records


def _parse(data: bytes) -> _Object:
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"the manifest has {len(data)} bytes, expected at most {MAX_MANIFEST_BYTES}: it is damaged")
    try:
        tree = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"the manifest is not JSON ({error}); its {len(data)} bytes start with {data[:32]!r}. The checkpoint is "
            "damaged or was not written by shardopt: load another one."
        ) from error
    if not isinstance(tree, dict) or tree.get("magic") != MAGIC:
        raise FormatError(
            f"not a shardopt manifest: got {data[:64]!r}, expected an object whose magic is {MAGIC!r}. Was this "
            "checkpoint written by a shardopt optimizer?"
        )
    return tree


def _check_format(tree: _Object) -> None:
    found = tree.get("format")
    if type(found) is not int:
        raise FormatError(f"the manifest has format {found!r:.80}, expected a number: it is damaged; load another one")
    if found == FORMAT:
        return
    writer = tree.get("writer")
    version = writer.get("shardopt", "unknown") if isinstance(writer, dict) else "unknown"
    mend = "install that version or a newer one" if found > FORMAT else "load it with that version"
    raise FormatError(
        f"the checkpoint has format {found}, written by shardopt {version!s:.40}; this shardopt reads format {FORMAT}: "
        f"{mend}."
    )


def _distinct(pairs: list[tuple[str, Json]]) -> _Object:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"keys occur twice in one object: {sorted({key for key in keys if keys.count(key) > 1})}")
    return result


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


class _Reader:
    """Takes the tree apart. A wrong part is noted and an empty one used instead, so that the rest is judged too."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._elementwise: dict[str, ElementwiseEntry] = {}

    def optimizers(self, parts: _Object) -> tuple[OptimizerRecord, ...]:
        found: list[OptimizerRecord] = []
        for index, item in enumerate(self._list(parts, "optimizers", "the manifest")):
            where = f"optimizers[{index}]"
            fields = self.fields(item, where, _OPTIMIZER_FIELDS)
            found.append(OptimizerRecord(self.text(fields, "class", where), self.text(fields, "compute", where)))
        return tuple(found)

    def groups(self, parts: _Object) -> tuple[GroupRecord, ...]:
        found: list[GroupRecord] = []
        for index, item in enumerate(self._list(parts, "groups", "the manifest")):
            where = f"groups[{index}]"
            fields = self.fields(item, where, _GROUP_FIELDS)
            optimizer = self.count(fields, "optimizer", where)
            members = self._texts(fields, "members", where)
            found.append(GroupRecord(optimizer, members, self.object(fields, "values", where)))
        return tuple(found)

    def parameters(self, parts: _Object) -> dict[str, ParameterRecord]:
        found = self.object(parts, "parameters", "the manifest")
        return {fqn: self._parameter(item, f"parameter {fqn!r}") for fqn, item in found.items()}

    def _parameter(self, encoded: Json, where: str) -> ParameterRecord:
        fields = self.fields(encoded, where, _PARAMETER_FIELDS)
        entries = self.object(fields, "entries", where)
        return ParameterRecord(
            shape=self._counts(fields, "shape", where),
            dtype=self.text(fields, "dtype", where),
            optimizer=self.count(fields, "optimizer", where),
            group=self.count(fields, "group", where),
            aliases=self._texts(fields, "aliases", where),
            entries={name: self._entry(entry, where, name) for name, entry in entries.items()},
            blob=None if fields.get("blob") is None else self.count(fields, "blob", where),
        )

    def _entry(self, encoded: Json, parameter: str, name: str) -> Entry:
        # Most entries are these, thousands of them: one record a dtype, and no path is spelt out.
        if isinstance(encoded, dict) and len(encoded) == 2 and encoded.get("layout") == "elementwise":
            dtype = encoded.get("dtype")
            if isinstance(dtype, str):
                return self._elementwise.get(dtype) or self._elementwise.setdefault(dtype, ElementwiseEntry(dtype))
        where = f"{parameter} entry {name!r}"
        layout = encoded.get("layout") if isinstance(encoded, dict) else None
        if not isinstance(layout, str) or layout not in _ENTRY_FIELDS:
            self._note(where, f"layout {layout!r:.80}", f"one of {list(_ENTRY_FIELDS)}")
            return _ABSENT
        fields = self.fields(encoded, where, _ENTRY_FIELDS[layout])
        if layout == "elementwise":
            return ElementwiseEntry(self.text(fields, "dtype", where))
        if layout == "value":
            return ValueEntry(fields.get("value"))
        if layout == "per_rank":
            return PerRankEntry()
        if layout == "blockwise":
            read = read_blockwise(fields)
            if not isinstance(read, str):
                return read
            self.problems.append(f"{where}: {read}")
            return _ABSENT
        return WholeEntry(fields.get("packing")) if layout == "whole" else _ABSENT

    def fields(self, encoded: Json, where: str, names: Set[str]) -> _Object:
        """The object with exactly these fields; a missing one is noted here, and silent in the readers below."""
        if not isinstance(encoded, dict):
            self._note(where, repr(encoded), f"an object with {sorted(names)}")
            return {}
        if encoded.keys() != names:
            lacking, unknown = sorted(names - encoded.keys()), sorted(encoded.keys() - names)
            self.problems.append(f"{where}: lacks the fields {lacking}, has the unknown fields {unknown}")
        return encoded

    def object(self, fields: _Object, name: str, where: str) -> _Object:
        found = fields.get(name, {})
        if isinstance(found, dict):
            return found
        self._note(f"{where} {name}", repr(found), "an object")
        return {}

    def text(self, fields: _Object, name: str, where: str) -> str:
        found = fields.get(name, "")
        if isinstance(found, str):
            return found
        self._note(f"{where} {name}", repr(found), "text")
        return ""

    def count(self, fields: _Object, name: str, where: str) -> int:
        found = fields.get(name, 0)
        if type(found) is int and found >= 0:
            return found
        self._note(f"{where} {name}", repr(found), "a whole number of 0 or more")
        return 0

    def _list(self, fields: _Object, name: str, where: str) -> list[Json]:
        found = fields.get(name, [])
        if isinstance(found, list):
            return found
        self._note(f"{where} {name}", repr(found), "a list")
        return []

    def _texts(self, fields: _Object, name: str, where: str) -> tuple[str, ...]:
        found = self._list(fields, name, where)
        if not found:
            return ()
        texts = tuple([item for item in found if isinstance(item, str)])
        if len(texts) != len(found):
            self._note(f"{where} {name}", repr(found), "a list of text")
        return texts

    def _counts(self, fields: _Object, name: str, where: str) -> tuple[int, ...]:
        found = self._list(fields, name, where)
        counts = tuple([item for item in found if type(item) is int and item >= 0])
        if len(counts) != len(found):
            self._note(f"{where} {name}", repr(found), "a list of whole numbers of 0 or more")
        return counts

    def _note(self, where: str, got: str, expected: str) -> None:
        self.problems.append(f"{where}: got {got:.80}, expected {expected}")
