"""Everything a wrapper looks after: inner optimizers, their presentations, parameters and state."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt.errors import NamingError, PlacementError
from shardopt.layouts.attributes import changed, held_in
from shardopt.layouts.catalog import spec_of, whole_spec_of
from shardopt.layouts.codec import Blocks, Codec, Subject, codec_of
from shardopt.layouts.declared import ATTRIBUTE, CONSTANT, ELEMENTWISE, MASTER, RANK_LOCAL, SAME, SAVED
from shardopt.layouts.learnt import LearntCodec
from shardopt.layouts.tracked import Tracked
from shardopt.presentation.choice import Choice
from shardopt.presentation.identity import Identity
from shardopt.presentation.presentation import Presentation
from shardopt.presentation.side_storage import side_storage

__all__ = ["Inventory", "Part"]


@dataclass(slots=True)
class Part:
    """One inner optimizer with the presentation it steps in.

    Attributes:
        inner: the optimizer.
        presentation: shows it its parameters.
        choice: of the presentation.
        layouts: declared of its state.
        constant_digests: of the attributes that are declared constant, when it was wrapped.
        codec: takes its quantised state apart; None when nothing is known of such.
    """

    inner: torch.optim.Optimizer
    presentation: Presentation
    choice: Choice
    layouts: Mapping[str, str] = field(default_factory=dict)
    constant_digests: dict[str, str] = field(default_factory=dict)
    codec: Codec | None = field(init=False)
    _held_at_first: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.codec = codec_of(self.inner)
        self._held_at_first = held_in(self.inner, objects=False)

    @property
    def saved_attributes(self) -> list[str]:
        """Attributes that are part of the state: declared, seen to be changed by steps, or changed since."""
        declared = {name.removeprefix(ATTRIBUTE) for name, layout in self.layouts.items() if layout == SAVED}
        # Of the classes that are known it is known that they keep none; torch notes things of its own there.
        known = (self.codec, spec_of(self.inner), whole_spec_of(self.inner)) != (None, None, None)
        moved: set[str] = set() if known else changed(self._held_at_first, held_in(self.inner, objects=False))
        own = () if self.codec is None else self.codec.attributes(self.inner)
        return sorted({*declared, *self.choice.attributes, *moved, *own} - {*self.constants})

    @property
    def constants(self) -> list[str]:
        """Attributes that are declared never to change."""
        return sorted(name.removeprefix(ATTRIBUTE) for name, layout in self.layouts.items() if layout == CONSTANT)

    @property
    def elementwise(self) -> list[str]:
        """Entries that are element-wise: declared, or seen in a probe."""
        declared = (name for name, layout in self.layouts.items() if layout in (ELEMENTWISE, MASTER))
        return sorted({*declared, *self.choice.entries})

    @property
    def common(self) -> set[str]:
        """Entries that are the same on every rank: declared, or seen in a probe."""
        return {*(name for name, layout in self.layouts.items() if layout == SAME), *self.choice.common}

    def is_scratch(self, key: str) -> bool:
        """Whether an item of a group is none of its values."""
        return self.codec is not None and self.codec.is_scratch(key)

    def side_storage(self, saved: Container[int]) -> list[str]:
        """What is kept where no state dict has it, a sentence each; ``saved`` are ids of parameters."""
        tables = () if self.codec is None else self.codec.constants(self.inner)
        return side_storage(self.inner, saved, known={*self.saved_attributes, *self.constants, *tables})


@dataclass(slots=True)
class Inventory:
    """The wrapper's parts and parameters, in the order of their groups.

    Attributes:
        parts: inner optimizers with their presentations.
        world_size: number of ranks that hold the parameters.
        models: the modules that name the parameters.
        own_index: this rank's place among the ranks, if each keeps state of its own for parameters that are not
            sharded; None if that state is the same on all of them.
        place: this rank's place among the ranks.
        identity: tells whether the models still hold these parameters.
        tracked: all parameters.
        by_fqn: the same by name.
        by_id: the same by the object.
        has_plain: whether some of them are not sharded.
    """

    parts: list[Part]
    world_size: int
    models: Sequence[nn.Module] = ()
    own_index: int | None = None
    place: int = 0
    identity: Identity = field(init=False)
    tracked: list[Tracked] = field(default_factory=list)
    by_fqn: dict[str, Tracked] = field(default_factory=dict)
    by_id: dict[int, Tracked] = field(default_factory=dict)
    has_plain: bool = False

    def __post_init__(self) -> None:
        self.identity = Identity(self.models)
        for part in self.parts:
            part.presentation.identity = self.identity
            part.presentation.own_plain = self.own_index is not None

    @property
    def is_spread(self) -> bool:
        """Whether no rank can describe all of the state: one keeps some alone, or blocks of shards may differ."""
        return self.world_size > 1 and any(
            part.choice.compute in ("owner", "replicated") or part.codec is not None for part in self.parts
        )

    def check(self, tracked: Sequence[Tracked]) -> None:
        """Checks that parameters can be added; changes nothing.

        Raises:
            NamingError: a parameter is in two places, or two have one name.
            PlacementError: state that a parameter has already has no known place.
            PresentationError: a presentation cannot show them together.
        """
        self.refuse_twice(tracked)
        for index, part in enumerate(self.parts):
            part.presentation.check_new([item for item in tracked if item.optimizer == index])

    def add(self, tracked: Sequence[Tracked]) -> None:
        """Takes in parameters that ``check`` has found to be good, and shows them to their presentations."""
        for index, part in enumerate(self.parts):
            part.presentation.register([item for item in tracked if item.optimizer == index])
        self.identity.add(tracked)
        self.tracked.extend(tracked)
        self.has_plain |= not all(isinstance(item.param, DTensor) for item in tracked)
        self.by_fqn.update((item.fqn, item) for item in tracked)
        self.by_id.update((id(item.param), item) for item in tracked)

    def refuse_twice(self, tracked: Sequence[Tracked]) -> None:
        """Checks that new parameters are new, and each of them there once.

        Raises:
            NamingError: a parameter is in two places, or two have one name.
        """
        seen = {fqn: item.param for fqn, item in self.by_fqn.items()}
        twice: list[str] = []
        shared: list[str] = []
        for item in tracked:
            if item.fqn in seen:
                (twice if seen[item.fqn] is item.param else shared).append(item.fqn)
            seen.setdefault(item.fqn, item.param)
        problems: list[str] = []
        if twice:
            problems.append(f"{twice}: a parameter may be in one group of one optimizer only.")
        if shared:
            problems.append(f"{shared}: another parameter has this name already; give each a name of its own.")
        if problems:
            raise NamingError("\n".join(problems))

    def refuse_side_storage(self) -> None:
        """Checks that the wrapped optimizers keep what their steps read in state and groups. For saves and loads.

        Raises:
            PlacementError: one keeps tensors, or an optimizer with state, in its attributes; all of them are listed.
        """
        problems = [problem for part in self.parts for problem in part.side_storage(self.by_id)]
        if problems:
            raise PlacementError("\n".join(problems))

    def check_groups(self) -> None:
        """Checks that groups and models still hold the parameters they were registered with. For saves and loads.

        Raises:
            PresentationError: a parameter was added, removed, replaced or given data of another kind behind the
                wrapper's back.
        """
        for part in self.parts:
            part.presentation.check_groups()
        self.identity.check()

    def groups(self) -> list[dict[str, Any]]:
        """The groups of all inner optimizers: their own dicts, in order."""
        return [group for part in self.parts for group in part.inner.param_groups]

    def part_of(self, tracked: Tracked) -> Part:
        """The part whose optimizer updates the parameter."""
        return self.parts[tracked.optimizer]

    def state_of(self, tracked: Tracked) -> dict[str, Any] | None:
        """The parameter's live state dict, or None when it has none; never creates one."""
        return self.part_of(tracked).inner.state.get(tracked.param) or None

    def rank_local(self, tracked: Tracked) -> set[str]:
        """Entries of a sharded parameter that are declared to be each rank's own."""
        if tracked.has_whole_state or not isinstance(tracked.param, DTensor):
            return set()
        return {name for name, layout in self.part_of(tracked).layouts.items() if layout == RANK_LOCAL}

    def codec_of(self, tracked: Tracked) -> Codec | None:
        """How the parameter's state is quantised; None when it is not, or each rank's own."""
        return None if self.is_per_rank(tracked) else self.part_of(tracked).codec

    def subject(self, tracked: Tracked) -> Subject:
        """The parameter, for a codec."""
        return Subject(self.part_of(tracked).inner, self.groups()[tracked.group], tracked.state_like)

    def quantised_entries(self, tracked: Tracked) -> tuple[str, ...]:
        """Entries of the parameter that may be quantised."""
        codec = self.codec_of(tracked)
        return () if codec is None else codec.entries(self.subject(tracked))

    def quantised(self, tracked: Tracked) -> dict[str, Blocks | Tensor]:
        """The entries of the parameter that may be quantised, taken apart, those that are there."""
        codec, state = self.codec_of(tracked), self.state_of(tracked)
        if codec is None or state is None:
            return {}
        subject = self.subject(tracked)
        read = {name: codec.read(subject, state, name) for name in codec.entries(subject)}
        return {name: value for name, value in read.items() if value is not None}

    def unquantised(self, tracked: Tracked) -> dict[str, Any]:
        """The parameter's live state without what its codec takes apart."""
        state, codec = self.state_of(tracked) or {}, self.codec_of(tracked)
        if codec is None:
            return state
        parts = {part for name in self.quantised_entries(tracked) for part in codec.parts(name)}
        return {name: value for name, value in state.items() if name not in parts and not codec.is_scratch(name)}

    def plain_state(self, tracked: Tracked) -> dict[str, Any]:
        """The parameter's live state as plain tensors and values, quantised entries as their codes and scales."""
        apart = {
            name: [value.codes, value.scales] if isinstance(value, Blocks) else value
            for name, value in self.quantised(tracked).items()
        }
        return {**self.unquantised(tracked), **apart}

    def keeps_nothing(self, tracked: Tracked) -> bool:
        """Whether the optimizer makes no state of this rank's part of the parameter, which has no elements."""
        box = tracked.state_box
        return box is not None and not box.volume and isinstance(self.codec_of(tracked), LearntCodec)

    def known_entries(self, tracked: Tracked, group: dict[str, Any]) -> tuple[str, ...] | None:
        """Element-wise entries the class keeps under the group's options; None when the class is unknown."""
        spec = spec_of(self.part_of(tracked).inner)
        return None if spec is None else spec.entries(group)

    def is_known(self, tracked: Tracked) -> bool:
        """Whether it is known what the class keeps for the parameter."""
        return spec_of(self.part_of(tracked).inner) is not None

    def usual_entries(self, tracked: Tracked, group: dict[str, Any]) -> tuple[str, ...]:
        """Element-wise entries that have a key in every portable state: known of the class, or seen in a probe."""
        known = self.known_entries(tracked, group)
        return tuple(self.part_of(tracked).elementwise) if known is None else known

    def known_scalars(self, tracked: Tracked) -> tuple[str, ...]:
        """Entries beside these that the class keeps with any state; none when the class is unknown."""
        spec = spec_of(self.part_of(tracked).inner)
        return () if spec is None else spec.scalars

    def derived(self, tracked: Tracked) -> frozenset[str]:
        """Entries that the optimizer makes of the parameter where a checkpoint lacks them."""
        spec = spec_of(self.part_of(tracked).inner)
        return frozenset() if spec is None else spec.derived

    def has_own_memory(self, tracked: Tracked) -> bool:
        """Whether the tensors of state that the optimizer has are all it can have."""
        spec = spec_of(self.part_of(tracked).inner)
        return spec is not None and spec.in_place

    def is_per_rank(self, tracked: Tracked) -> bool:
        """Whether the parameter's state is each rank's own."""
        return self.own_index is not None and not isinstance(tracked.param, DTensor)

    def optional_entries(self, tracked: Tracked) -> tuple[str, ...]:
        """Element-wise entries that may be there: left from before an option was changed, or seen in a probe."""
        part = self.part_of(tracked)
        spec = spec_of(part.inner)
        return tuple(part.elementwise) if spec is None else (*spec.optional, *part.elementwise)

    def initial_state(self, tracked: Tracked, group: dict[str, Any]) -> dict[str, Any]:
        """The state that a new optimizer has for the parameter before its first step, made anew; often none."""
        spec = spec_of(self.part_of(tracked).inner)
        return {} if spec is None or spec.initial is None else spec.initial(group, tracked.state_like)

    def scalar_device(self, tracked: Tracked, group: dict[str, Any], entry: str) -> torch.device:
        """Where the optimizer keeps a new 0-d entry: torch hosts step counters unless its kernel needs them."""
        spec = spec_of(self.part_of(tracked).inner)
        beside = (
            group.get("fused") or group.get("capturable") or (spec is not None and spec.scalars_on_parameter_device)
        )
        return tracked.local.device if beside or (spec is None and entry != "step") else torch.device("cpu")

    def refuse_stray_state(self) -> list[str]:
        """Checks for state that belongs to no parameter of any group.

        Returns:
            One sentence for each tensor key that is in no group: it is left out of checkpoints.

        Raises:
            PlacementError: state is keyed on something that is neither a tensor nor a name.
        """
        left_out: list[str] = []
        for part in self.parts:
            for key in part.inner.state:
                if isinstance(key, Tensor):
                    if id(key) not in self.by_id:
                        left_out.append(
                            f"{type(part.inner).__name__} holds state for a tensor of shape {tuple(key.shape)} that is "
                            "in none of its groups; it is not saved."
                        )
                elif not isinstance(key, str):
                    raise PlacementError(
                        f"{type(part.inner).__name__} keeps state under {key!r}, which is neither a parameter nor a "
                        "name; nothing says where it belongs. Keep it per parameter, or in a parameter group."
                    )
        return left_out
