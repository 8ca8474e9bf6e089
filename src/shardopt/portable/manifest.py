"""The manifest: everything about an optimizer's saved state that is not a large tensor, as JSON in UTF-8.

Equal manifests are equal bytes, so ranks can compare digests. Typed values in it are JSON from ``encode``; the manifest
carries them as they are, and whoever needs one decodes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias, TypeVar

from shardopt.errors import FormatError
from shardopt.portable.segments import BlockwiseEntry, blockwise_contradictions, blockwise_json, overlapping_spans
from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import is_dtype_name

__all__ = [
    "FORMAT",
    "MAGIC",
    "MAX_MANIFEST_BYTES",
    "AbsentEntry",
    "ElementwiseEntry",
    "Entry",
    "GroupRecord",
    "Manifest",
    "OptimizerRecord",
    "ParameterRecord",
    "PerRankEntry",
    "ValueEntry",
    "WholeEntry",
    "parameters_json",
    "raise_problems",
]

FORMAT = 1
MAGIC = "shardopt optimizer state"

MAX_MANIFEST_BYTES = 256 * 1024**2
"""Every rank holds the manifest and its parsed form, several times this size; 100,000 parameters need a tenth of it."""

_MAX_PROBLEMS_SHOWN = 20

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class ElementwiseEntry:
    """Stored as boxes of a tensor of the parameter's shape, under ``state.<fqn>.<entry>``.

    Attributes:
        dtype: the entry's own dtype, e.g. ``"bfloat16"``.
    """

    layout: ClassVar[str] = "elementwise"
    dtype: str


@dataclass(frozen=True, slots=True)
class AbsentEntry:
    """The optimizer did not have this entry yet; a marker is stored under ``state.<fqn>.<entry>``."""

    layout: ClassVar[str] = "absent"


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A scalar, a counter or a 0-d tensor, kept here.

    Attributes:
        value: from ``encode``.
    """

    layout: ClassVar[str] = "value"
    value: Json


@dataclass(frozen=True, slots=True)
class WholeEntry:
    """A value of any structure, its bytes in ``blob.<fqn>``.

    Attributes:
        packing: the entry's part of the layout from ``pack``.
    """

    layout: ClassVar[str] = "whole"
    packing: Json


@dataclass(frozen=True, slots=True)
class PerRankEntry:
    """Each rank has state of its own, which it alone describes, under ``rank.<index>.layout.<fqn>`` and ``.blob.``."""

    layout: ClassVar[str] = "per_rank"


Entry: TypeAlias = ElementwiseEntry | AbsentEntry | ValueEntry | WholeEntry | PerRankEntry | BlockwiseEntry


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One inner optimizer.

    Attributes:
        class_name: its class's module and qualified name; compared, never imported.
        compute: the presentation it ran in.
    """

    class_name: str
    compute: str


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One parameter group.

    Attributes:
        optimizer: index of its optimizer.
        members: FQNs, in the group's order.
        values: every key of the group but ``params``, from ``encode``.
    """

    optimizer: int
    members: tuple[str, ...]
    values: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter and its state.

    Attributes:
        shape: global shape.
        dtype: the parameter's dtype, e.g. ``"float32"``.
        optimizer: index of its optimizer.
        group: index of its group, among the groups of all optimizers.
        aliases: its other names, when tied.
        entries: state entries by name, the absent ones too.
        blob: length of ``blob.<fqn>`` in bytes; None when the parameter has no whole entries.
    """

    shape: tuple[int, ...]
    dtype: str
    optimizer: int
    group: int
    aliases: tuple[str, ...]
    entries: Mapping[str, Entry]
    blob: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Format version 1.

    Attributes:
        shardopt: version of the shardopt that wrote it.
        torch: version of its torch.
        optimizers: the inner optimizers, in the wrapper's order.
        groups: the groups of all of them, in order.
        parameters: by FQN.
        world_size: number of ranks that hold the parameters.
        extra: reserved; carried along, and ignored by readers that do not know it.

    Raises:
        FormatError: when made, if the parts contradict each other; lists every problem.
    """

    shardopt: str
    torch: str
    optimizers: tuple[OptimizerRecord, ...]
    groups: tuple[GroupRecord, ...]
    parameters: Mapping[str, ParameterRecord]
    world_size: int
    extra: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_problems("the manifest contradicts itself", list(_contradictions(self)))

    def to_bytes(self) -> bytes:
        """Compact JSON; the same bytes for equal manifests, whatever order their dicts were filled in.

        Lists and typed values keep their order: it means something.

        Raises:
            FormatError: a name is not valid text, or the manifest is too large to be read back.
        """
        tree = {
            "magic": MAGIC,
            "format": FORMAT,
            "writer": {"shardopt": self.shardopt, "torch": self.torch},
            "scope": {"world_size": self.world_size},
            "optimizers": [{"class": one.class_name, "compute": one.compute} for one in self.optimizers],
            "groups": [
                {"optimizer": group.optimizer, "members": group.members, "values": _sorted(group.values)}
                for group in self.groups
            ],
            "parameters": parameters_json(self.parameters),
            "extra": _sorted(self.extra),
        }
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            around = text[max(error.start - 40, 0) : error.end + 40]
            raise FormatError(f"a name near {around!r} has a lone surrogate, which is not text: rename it") from error
        if len(data) > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"the manifest has {len(data)} bytes, and at most {MAX_MANIFEST_BYTES} can be read back: keep large "
                "tensors out of parameter groups"
            )
        return data


def parameters_json(parameters: Mapping[str, ParameterRecord]) -> dict[str, object]:
    """Records by FQN as JSON, as a manifest has them."""
    return {fqn: _parameter_json(record) for fqn, record in _sorted(parameters).items()}


def raise_problems(summary: str, problems: Sequence[str]) -> None:
    """Raises one FormatError that lists the problems; returns when there are none."""
    if problems:
        shown = [f"\n- {problem}" for problem in problems[:_MAX_PROBLEMS_SHOWN]]
        rest = len(problems) - len(shown)
        more = f"\n- and {rest} more" if rest else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise FormatError(f"{summary} ({count}):{''.join(shown)}{more}")


def _parameter_json(record: ParameterRecord) -> dict[str, object]:
    return {
        "shape": record.shape,
        "dtype": record.dtype,
        "optimizer": record.optimizer,
        "group": record.group,
        "aliases": record.aliases,
        "entries": {name: _entry_json(entry) for name, entry in _sorted(record.entries).items()},
        "blob": record.blob,
    }


def _entry_json(entry: Entry) -> dict[str, Json]:
    if isinstance(entry, ElementwiseEntry):
        return {"layout": entry.layout, "dtype": entry.dtype}
    if isinstance(entry, ValueEntry):
        return {"layout": entry.layout, "value": entry.value}
    if isinstance(entry, WholeEntry):
        return {"layout": entry.layout, "packing": entry.packing}
    if isinstance(entry, BlockwiseEntry):
        return blockwise_json(entry)
    return {"layout": entry.layout}


def _contradictions(manifest: Manifest) -> Iterator[str]:
    if manifest.world_size < 1:
        yield f"scope: got world_size {manifest.world_size}, expected at least 1"
    group_of: dict[str, int] = {}
    for index, group in enumerate(manifest.groups):
        if not 0 <= group.optimizer < len(manifest.optimizers):
            yield f"groups[{index}]: optimizer {group.optimizer} of {len(manifest.optimizers)} optimizers"
        for fqn in group.members:
            if fqn not in manifest.parameters:
                yield f"groups[{index}]: member {fqn!r} is not among the parameters"
            elif fqn in group_of:
                yield f"groups[{index}]: member {fqn!r} occurs twice, first in groups[{group_of[fqn]}]"
            else:
                group_of[fqn] = index
    for fqn, record in manifest.parameters.items():
        for problem in _parameter_contradictions(manifest, record, group_of.get(fqn)):
            yield f"parameter {fqn!r}: {problem}"
    yield from _name_clashes(manifest)


def _name_clashes(manifest: Manifest) -> Iterator[str]:
    owner = {fqn: fqn for fqn in manifest.parameters}
    for fqn, record in manifest.parameters.items():
        for alias in record.aliases:
            if alias in owner:
                yield f"parameter {fqn!r}: alias {alias!r} is already a name of {owner[alias]!r}"
            owner[alias] = fqn


def _parameter_contradictions(manifest: Manifest, record: ParameterRecord, group: int | None) -> Iterator[str]:
    if record.group != group:
        yield f"names groups[{record.group}] as its group, and is a member of groups[{group}]"
    elif record.optimizer != manifest.groups[record.group].optimizer:
        yield f"has optimizer {record.optimizer}, and its group {manifest.groups[record.group].optimizer}"
    if min(record.shape, default=0) < 0:
        yield f"has the shape {record.shape}"
    dtypes = {entry.dtype for entry in record.entries.values() if isinstance(entry, ElementwiseEntry)}
    for dtype in sorted({record.dtype, *dtypes}):
        if not is_dtype_name(dtype):
            yield f"dtype {dtype!r} is unknown to this torch; names are like 'float32'"
    whole = any(
        isinstance(entry, WholeEntry) or (isinstance(entry, BlockwiseEntry) and entry.segments)
        for entry in record.entries.values()
    )
    if whole != (record.blob is not None) or (record.blob or 0) < 0:
        yield f"has a blob of {record.blob} bytes and {'some' if whole else 'no'} entries in it"
    yield from _blocks_contradict(record)


def _blocks_contradict(record: ParameterRecord) -> Iterator[str]:
    blockwise = {name: entry for name, entry in record.entries.items() if isinstance(entry, BlockwiseEntry)}
    if overlapping_spans(blockwise.values()):
        yield "has shards that share bytes of its blob"
    for name, entry in blockwise.items():
        for problem in blockwise_contradictions(entry, record.shape):
            yield f"entry {name!r}: {problem}"


def _sorted(mapping: Mapping[str, _Item]) -> dict[str, _Item]:
    return {key: mapping[key] for key in sorted(mapping)}
