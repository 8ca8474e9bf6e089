"""What ``get_optimizer_state_dict`` and ``dcp.save`` wrote of an unwrapped optimizer, as portable state.

Nested, the keys are ``state.<fqn>.<entry>``, ``param_groups.<index>.<key>`` and ``param_groups.<index>.params``;
flattened (``flatten_optimizer_state_dict=True``), ``state.<fqn>.<entry>`` and ``param_groups.<fqn>.<key>``. Tensors are
DCP's own, of global shape; everything else is a pickled value under a key of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import le

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves

from shardopt.errors import LoadError, PlacementError
from shardopt.layouts.tracked import Tracked
from shardopt.naming import canonical
from shardopt.portable.encode import MAX_INLINE_TENSOR_BYTES, encode
from shardopt.portable.export import handle_for
from shardopt.portable.handles import BoxHandle, BytesHandle, Handle
from shardopt.portable.keys import MANIFEST_KEY, blob_key, state_key
from shardopt.portable.manifest import (
    ElementwiseEntry,
    Entry,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
    ValueEntry,
    WholeEntry,
)
from shardopt.portable.packing import pack
from shardopt.portable.storage import Storage
from shardopt.portable.tagged import Json
from shardopt.portable.tensor_bytes import dtype_name

__all__ = ["read_torch_format", "torch_roots"]

_GROUPS, _STATE, _MEMBERS = "param_groups.", "state.", "params"
_NOT_VALUES = frozenset({_MEMBERS, "param_names"})

# What torch's optimizers keep as 0-d tensors; other 0-d entries of a 0-d parameter are element-wise.
_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})

_IN_PARTS = "is a value that DCP has taken apart, and its keys do not say what it was"
_INCOMPLETE = "The checkpoint is incomplete; load another one."


def torch_roots(storage: Storage) -> list[str]:
    """What the keys of each optimizer in torch's format begin with, e.g. ``["optim."]``."""
    roots: dict[str, None] = {}
    for key in storage.entries:
        at = 0 if key.startswith(_GROUPS) else key.find("." + _GROUPS) + 1
        if at or key.startswith(_GROUPS):
            roots[key[:at]] = None
    return list(roots)


def read_torch_format(storage: Storage, root: str, tracked: Mapping[str, Tracked]) -> dict[str, Handle]:
    """The portable state of an optimizer that torch's own functions saved.

    Args:
        storage: the checkpoint.
        root: what the optimizer's keys begin with.
        tracked: live parameters by FQN; only what they need is read.

    Returns:
        Handles, filled, and a manifest that does not know the optimizer's class.

    Raises:
        LoadError: what is saved cannot be placed; every problem is listed.
    """
    reading = _Reading(storage, root, tracked)
    reading.read_groups()
    reading.refuse()
    reading.find_state()
    reading.compare_entries()
    for one in reading.parameters.values():
        reading.place(one)
    reading.read_values()
    reading.refuse()
    return reading.finish()


@dataclass(slots=True)
class _Group:
    """Parameters of one group (flattened: of equal values), by their saved names, and its encoded values."""

    members: list[str]
    values: dict[str, Json]


@dataclass(slots=True)
class _Parameter:
    """One parameter of the checkpoint.

    Attributes:
        name: as the checkpoint spells it.
        fqn: canonical.
        live: the parameter that takes its state; None when none does.
        group: index of its group.
        state: entry -> its key in the checkpoint.
        shape: of the parameter, as far as the checkpoint tells; the live one's otherwise.
        entries: what becomes of its state.
        small: entries that are read as values.
        whole: entries that are read as tensors of any shape.
    """

    name: str
    fqn: str
    group: int
    live: Tracked | None = None
    state: dict[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    entries: dict[str, Entry] = field(default_factory=dict)
    small: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


class _Reading:
    """One optimizer being read, and every problem met on the way."""

    def __init__(self, storage: Storage, root: str, tracked: Mapping[str, Tracked]) -> None:
        self._storage = storage
        self._root = root
        self._tracked = tracked
        self._problems: list[str] = []
        self._groups: list[_Group] = []
        self._model_root: str | None = None
        self._boxes: dict[str, tuple[str, BoxHandle]] = {}  # our key -> the checkpoint's, and where to read it to
        self.parameters: dict[str, _Parameter] = {}

    def refuse(self) -> None:
        """Raises what has been found so far."""
        if self._problems:
            raise LoadError(
                f"{self._storage.path}: the optimizer state that torch saved under {self._root.rstrip('.')!r} cannot "
                "be loaded:\n" + "\n".join(f"- {problem}" for problem in self._problems),
                self._problems,
            )

    def read_groups(self) -> None:
        """Members and values of every group."""
        start = self._root + _GROUPS
        values = self._small([key for key in self._storage.entries if key.startswith(start)])
        nested = f"{start}0.{_MEMBERS}" in self._storage.entries
        owned: dict[str, dict[str, object]] = {}
        for key, value in values.items():
            # A FQN has dots and a group's index has none; a group's own keys are taken to have none.
            owner, _, name = key[len(start) :].partition(".") if nested else key[len(start) :].rpartition(".")
            if "." in name or name.isdigit():
                self._problems.append(f"{key} {_IN_PARTS}; save numbers and tuples of numbers in groups.")
            owned.setdefault(owner, {})[name] = value
        groups = self._nested(owned) if nested else self._flattened(owned)
        self._groups = list(groups)

    def _nested(self, owned: Mapping[str, Mapping[str, object]]) -> Iterator[_Group]:
        for index in sorted(owned, key=lambda text: (len(text), text)):
            where = f"{self._root}{_GROUPS}{index}"
            members = owned[index].get(_MEMBERS)
            if not isinstance(members, list) or any(not isinstance(name, str) for name in members):
                self._problems.append(
                    f"{where}.{_MEMBERS}: got {members!r:.80}, expected parameter names. Positions say nothing about "
                    "which parameter is meant; save get_optimizer_state_dict(model, optimizer), which has names."
                )
                continue
            yield _Group(members, self._encoded(where, owned[index]))

    def _flattened(self, owned: Mapping[str, Mapping[str, object]]) -> Iterator[_Group]:
        groups: dict[str, _Group] = {}
        for name, values in owned.items():
            encoded = self._encoded(f"{self._root}{_GROUPS}{name}", values)
            group = groups.setdefault(json.dumps(encoded, sort_keys=True), _Group([], encoded))
            group.members.append(name)
        yield from groups.values()

    def _encoded(self, where: str, values: Mapping[str, object]) -> dict[str, Json]:
        encoded: dict[str, Json] = {}
        for name, value in values.items():
            if name in _NOT_VALUES:
                continue
            try:
                encoded[name] = encode(value, f"{where}.{name}")
            except PlacementError as error:
                self._problems.append(str(error))
        return encoded

    def _small(self, keys: Sequence[str]) -> dict[str, object]:
        """Small tensors and pickled values; what cannot be read is a problem and left out."""
        tensors: list[str] = []
        pickled: list[str] = []
        for key in keys:
            entry = self._storage.entries[key]
            if not isinstance(entry, TensorStorageMetadata):
                pickled.append(key)
            elif entry.size.numel() * entry.properties.dtype.itemsize > MAX_INLINE_TENSOR_BYTES:
                self._problems.append(f"{key}: a tensor of shape {tuple(entry.size)} is too large for a group's value.")
            else:
                tensors.append(key)
        found: dict[str, object] = {}
        for values, problems in (self._storage.tensors(tensors), self._storage.values(pickled)):
            found.update(values)
            self._problems.extend(f"{key} {problem}." for key, problem in problems.items())
        return {key: found[key] for key in keys if key in found}

    def find_state(self) -> None:
        """Names every parameter, and finds the keys of its state."""
        by_name: dict[str, _Parameter] = {}
        for index, group in enumerate(self._groups):
            for name in group.members:
                one = _Parameter(name, canonical(name), index)
                other = self.parameters.setdefault(one.fqn, one)
                if other is not one:
                    self._problems.append(f"{one.fqn}: saved twice, as {other.name!r} and {name!r}.")
                by_name[name] = one
        for live in self._tracked.values():
            # Of several that are tied now the first one's state counts, as in every load.
            saved = [self.parameters[name] for name in live.name.all if name in self.parameters]
            if saved:
                saved[0].live = live
        start = self._root + _STATE
        for key in self._storage.entries:
            if not key.startswith(start):
                continue
            owner = name = key[len(start) :]
            while owner and owner not in by_name:
                owner = owner.rpartition(".")[0]
            if not owner:
                self._problems.append(f"{key}: no parameter of the saved groups has this state. {_INCOMPLETE}")
                continue
            by_name[owner].state[name[len(owner) + 1 :]] = key
        self._model_root = self._find_model()

    def compare_entries(self) -> None:
        """Notes a parameter that has less state than another of its group, and nothing that the other has not.

        Torch's format has no manifest: a key that was lost looks like an entry that never was.
        """
        fullest: list[dict[frozenset[str], _Parameter]] = [{} for _ in self._groups]
        wanted = [one for one in self.parameters.values() if one.live is not None]
        for one in wanted:
            fullest[one.group].setdefault(frozenset(one.state), one)
        for one in wanted:
            own = one.state.keys()
            for state, other in fullest[one.group].items():
                if own and own < state:
                    self._problems.append(
                        f"{one.fqn}: the checkpoint has its state {sorted(own)} but not {sorted(state - own)}, which "
                        f"it has for {other.fqn} of the same group. {_INCOMPLETE}"
                    )
                    break

    def place(self, one: _Parameter) -> None:
        """Decides what becomes of each entry of a parameter, reading none."""
        live = one.live
        if live is None:
            return
        one.shape = live.shape
        odd: dict[str, tuple[int, ...]] = {}
        for entry, key in one.state.items():
            saved = self._storage.entries[key]
            if "." in entry:
                self._problems.append(f"{one.fqn}: state {entry!r} {_IN_PARTS}; keep such state flat.")
            elif not isinstance(saved, TensorStorageMetadata) or (not saved.size and (live.shape or entry in _SCALARS)):
                one.small.append(entry)
            elif tuple(saved.size) == live.shape:
                handle = handle_for(live, None)
                one.entries[entry] = ElementwiseEntry(dtype_name(saved.properties.dtype))
                self._boxes[state_key(live.fqn, entry)] = key, handle
            else:
                odd[entry] = tuple(saved.size)
        if odd:
            self._place_odd(one, live, odd)

    def _place_odd(self, one: _Parameter, live: Tracked, odd: Mapping[str, tuple[int, ...]]) -> None:
        """Entries of another shape than the parameter's: the model has changed, or they are whole, or shards."""
        weight = self._weight(one.name)
        if weight is not None and tuple(weight.size) != live.shape:
            one.shape = tuple(weight.size)  # the load will say so
            return
        sharded = not live.has_whole_state
        for entry, shape in odd.items():
            if not sharded and (len(shape) != len(live.shape) or _factored(shape, odd.values(), live.shape)):
                one.whole.append(entry)
                continue
            problem = f"{one.fqn}: state {entry!r} was saved with shape {shape}, the parameter has {live.shape}"
            if len(shape) == len(live.shape) and all(map(le, shape, live.shape)):
                problem += (
                    ". It looks like one rank's shard that was kept as a plain tensor: of such a one torch saves a "
                    "single rank's, and the other shards are in no file: save with the optimizer wrapped by shardopt. "
                    f"If the parameter has grown since, fresh=[{live.fqn!r}] starts it anew"
                )
            elif sharded:
                problem += ", and nothing says how such a tensor is sharded"
            self._problems.append(f"{problem}.")

    def _weight(self, name: str) -> TensorStorageMetadata | None:
        """What the checkpoint says of the parameter itself, when it has the model too."""
        if self._model_root is None:
            return None
        entry = self._storage.entries[self._model_root + name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def _find_model(self) -> str | None:
        """What the keys of the model begin with: one beginning for the names of all parameters."""
        names = [one.name for one in self.parameters.values()]
        longest = max(names, key=len, default="")
        for key in self._storage.entries:
            root = key[: len(key) - len(longest)]
            named = key.endswith(longest) and (not root or root.endswith("."))
            if named and all(root + name in self._storage.entries for name in names):
                return root
        return None

    def _dtype(self, one: _Parameter) -> str:
        """The saved parameter's dtype, as far as the checkpoint tells."""
        weight = self._weight(one.name)
        if weight is not None:
            return dtype_name(weight.properties.dtype)
        kept = {entry.dtype for entry in one.entries.values() if isinstance(entry, ElementwiseEntry)}
        live = one.live
        if len(kept) == 1:
            return kept.pop()
        return "float32" if live is None else dtype_name(live.param.dtype)

    def read_values(self) -> None:
        """Reads the entries that go into the manifest."""
        parameters = list(self.parameters.values())
        values = self._small([one.state[entry] for one in parameters for entry in one.small])
        for one in parameters:
            for entry in (entry for entry in one.small if one.state[entry] in values):
                value = values[one.state[entry]]
                if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    self._problems.append(
                        f"{one.fqn}: state {entry!r} is a pickle with tensors in it; nothing says how they are sharded."
                    )
                    continue
                try:
                    one.entries[entry] = ValueEntry(encode(value, f"{one.fqn}.{entry}"))
                except PlacementError as error:
                    self._problems.append(str(error))

    def finish(self) -> dict[str, Handle]:
        """Reads the tensors, and writes the manifest that a load wants."""
        self._storage.read({key: handle for key, handle in self._boxes.values()})
        handles: dict[str, Handle] = {key: handle for key, (_, handle) in self._boxes.items()}
        records: dict[str, ParameterRecord] = {}
        for fqn, one in self.parameters.items():
            blob = self._read_whole(one, one.live, handles) if one.live and one.whole else None
            records[fqn] = ParameterRecord(
                shape=one.shape,
                dtype=self._dtype(one),
                optimizer=0,
                group=one.group,
                aliases=(),
                entries=one.entries,
                blob=blob,
            )
        self.refuse()
        names = {one.name: fqn for fqn, one in self.parameters.items()}
        manifest = Manifest(
            shardopt="",
            torch="",
            # Unknown, and so compared with nothing.
            optimizers=(OptimizerRecord("", ""),),
            groups=tuple(
                GroupRecord(0, tuple(names[n] for n in group.members), group.values) for group in self._groups
            ),
            parameters=records,
            world_size=1,
        )
        handles[MANIFEST_KEY] = BytesHandle.of(manifest.to_bytes()).as_read()
        return handles

    def _read_whole(self, one: _Parameter, live: Tracked, handles: dict[str, Handle]) -> int:
        keys = {one.state[entry]: entry for entry in one.whole}
        found, problems = self._storage.tensors(keys)
        self._problems.extend(f"{key} {problem}." for key, problem in problems.items())
        packed = pack({keys[key]: tensor for key, tensor in found.items()}, one.fqn)
        one.entries.update((entry, WholeEntry(layout)) for entry, layout in packed.entries().items())
        handles[blob_key(live.fqn)] = BytesHandle.make(packed.chunks, packed.total_bytes).as_read()
        return packed.total_bytes


def _factored(shape: tuple[int, ...], others: Iterable[tuple[int, ...]], full: tuple[int, ...]) -> bool:
    """Whether the shape is one of the factors of a parameter's: cut to 1 along a dim, and another along another dim.

    Shards are all cut along the same dims.
    """
    cuts = {
        tuple(dim for dim, size in enumerate(full) if other[dim] != size) for other in others if len(other) == len(full)
    }
    own = [dim for dim, size in enumerate(full) if shape[dim] != size]
    return len(own) == 1 and shape[own[0]] == 1 and any(len(cut) == 1 and cut[0] != own[0] for cut in cuts)
