"""Runs of many optimizers on one topology: train, save, train on; load, train on. And the same run unsharded.

The jobs run in the rank pool's workers. They return what each rank holds, as numpy arrays with their places;
`assemble` puts the ranks' parts together in the test's process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from shardopt import ShardedStateOptimizer
from shardopt.geometry import Box, missing
from shardopt.torch_compat import local_box
from tests.ranks.topologies import TOPOLOGIES, Net
from tests.support.rules import Rule

Array = npt.NDArray[Any]

VOTE_TIMEOUT_S = 60.0
SAVED_AFTER = 3
STEPS = 6
# Set before the save, so that a load that keeps the fresh optimizer's lr (1/8) is seen.
SAVED_LR = 1 / 16
# Of a run that another checkpoint is loaded into.
STEPS_ELSEWHERE = (900, 901)


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box in the global array."""
    return tuple(slice(start, start + length) for start, length in zip(box.offset, box.size, strict=True))


@dataclass(repr=False)  # pytest would spell out every array of a failure
class Held:
    """What one rank holds of a run.

    Attributes:
        parts: weights and element-wise state by ``<fqn>`` and ``<fqn>/<entry>``: box and values.
        shapes: global shape of each.
        values: every other state entry, and every group value: type and exact value.
    """

    parts: dict[str, tuple[Box, Array]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Track:
    """One model on one topology (or unsharded, None), which one optimizer after another trains."""

    def __init__(self, topology: str | None, dtype: torch.dtype = torch.float32) -> None:
        self.model = Net().to(dtype)
        self.halves: tuple[str, ...] = ()
        if topology is not None:
            TOPOLOGIES[topology].place(self.model)
            self.halves = TOPOLOGIES[topology].halves
        self.sharded = topology is not None
        self.params = dict(self.model.named_parameters())
        self.boxes: dict[str, Box] = {}
        self.locals: dict[str, Tensor] = {}
        self._grads: dict[str, tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, dict[str, Tensor]] = {}
        for fqn, param in self.params.items():
            self._lay_out(fqn, param)
        self.start = {fqn: (self.boxes[fqn], array(local)) for fqn, local in self.locals.items()}

    def _lay_out(self, fqn: str, param: Tensor) -> None:
        if isinstance(param, DTensor):
            local = param.to_local().detach()
            self.boxes[fqn] = Box(*local_box(param))
            buffer = torch.empty_like(local)
            placements = [Partial()] if fqn in self.halves else param.placements
            grad = DTensor.from_local(
                buffer, param.device_mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        else:
            local = param.detach()
            self.boxes[fqn] = Box.whole(tuple(param.shape))
            buffer = grad = torch.empty_like(local)
        self.locals[fqn] = local
        if fqn != "odd.idle":
            self._grads[fqn] = (buffer, grad)

    def make(self, rule: Rule) -> torch.optim.Optimizer:
        """A fresh optimizer over the model: wrapped where the model is sharded."""
        optimizer = rule.build(self.params.values())
        return ShardedStateOptimizer(optimizer, self.model, vote_timeout=VOTE_TIMEOUT_S) if self.sharded else optimizer

    def put(self, parts: Mapping[str, tuple[Box, Array]]) -> None:
        """Sets the weights to this rank's parts of an earlier run."""
        for fqn, local in self.locals.items():
            box, values = parts[fqn]
            assert box == self.boxes[fqn]
            local.copy_(torch.from_numpy(values))

    def put_whole(self, weights: Mapping[str, Array]) -> None:
        """Sets the weights from global arrays."""
        self.put({fqn: (box, np.ascontiguousarray(weights[fqn][slices(box)])) for fqn, box in self.boxes.items()})

    def train(self, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
        """Takes these steps. Each has one global gradient for each parameter; a rank gets its part of it."""
        for step in steps:
            self.give_gradients(step)
            optimizer.step()
            optimizer.zero_grad()

    def give_gradients(self, step: int, *, scale: float = 1.0) -> None:
        """Sets this rank's part of the step's gradients."""
        parts = self._gradients(step)
        for fqn, (buffer, grad) in self._grads.items():
            torch.mul(parts[fqn], scale, out=buffer)
            self.params[fqn].grad = grad

    def _gradients(self, step: int) -> dict[str, Tensor]:
        if step not in self._parts:
            source = torch.Generator().manual_seed(1000 + step)
            whole = {fqn: torch.randn(param.shape, generator=source) for fqn, param in self.params.items()}
            self._parts[step] = {
                fqn: whole[fqn][slices(box)] / (2 if fqn in self.halves else 1) for fqn, box in self.boxes.items()
            }
        return self._parts[step]

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        """What this rank holds now, copied; read from the live objects and not through the wrapper's views."""
        result = Held()
        for fqn, param in self.params.items():
            entries = {fqn: self.locals[fqn]}
            for entry, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    entries[f"{fqn}/{entry}"] = value
                else:
                    result.values[f"{fqn}/{entry}"] = exact(value)
            for key, value in entries.items():
                result.parts[key] = (self.boxes[fqn], array(value))
                result.shapes[key] = tuple(param.shape)
                result.values[f"{key}/dtype"] = str(value.dtype)
        for index, group in enumerate(optimizer.param_groups):
            result.values.update(
                (f"group {index}/{key}", exact(value)) for key, value in group.items() if key != "params"
            )
        return result


def set_lr(optimizer: torch.optim.Optimizer) -> None:
    """What a scheduler does; in place where ``lr`` is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(SAVED_LR)
        else:
            group["lr"] = SAVED_LR


def array(value: Tensor) -> Array:
    """A copy; of bf16, which numpy has not, as fp32 of the same values."""
    return value.to(torch.float32 if value.dtype == torch.bfloat16 else value.dtype, copy=True).numpy()


def exact(value: Any) -> Any:
    """The value in a form whose ``==`` is bit-equality with type: signed zeros and NaN count."""
    if isinstance(value, Tensor):
        return ("tensor", str(value.dtype), value.numpy().tobytes())
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(exact, value))
    return (type(value).__name__, value)


@dataclass(repr=False)
class Whole:
    """What all ranks together hold: global arrays, and values that all of them share.

    Attributes:
        arrays: by key, with the parameter's global shape.
        values: as in `Held`.
        elements: of each rank's part, by key: they tell whether torch's vector kernels meet a tail.
    """

    arrays: dict[str, Array]
    values: dict[str, Any]
    elements: dict[str, tuple[int, ...]]


def assemble(ranks: Sequence[Held]) -> Whole:
    """Puts the ranks' parts together.

    Raises:
        AssertionError: ranks hold different keys or values, replicas differ, or an element is nobody's.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        assert list(other.parts) == list(first.parts), f"rank {rank} holds other keys than rank 0"
        assert other.values == first.values, f"rank {rank} holds other values than rank 0"
    arrays = {}
    for key, shape in first.shapes.items():
        parts = [rank.parts[key] for rank in ranks]
        hole = missing(Box.whole(shape), [box for box, _ in parts])
        assert hole is None, f"{key}: no rank holds {hole}"
        whole = np.zeros(shape, parts[0][1].dtype)
        for box, values in parts:
            assert values.shape == box.size, f"{key}: a part of shape {values.shape} in {box}"
            whole[slices(box)] = values
        for rank, (box, values) in enumerate(parts):
            assert whole[slices(box)].tobytes() == values.tobytes(), f"{key}: rank {rank} differs from its replica"
        arrays[key] = whole
    return Whole(arrays, first.values, {key: tuple(r.parts[key][1].size for r in ranks) for key in first.parts})


@dataclass(repr=False)
class Run:
    """One rank's part of a run: at the save or right after the load, and three steps later."""

    middle: Held
    end: Held


def batches(rules: Mapping[int, Rule]) -> Iterator[tuple[str, dict[int, Rule]]]:
    """The rules of one class at a time: they share one checkpoint, which saves most of the time."""
    for cls in dict.fromkeys(rule.cls for rule in rules.values()):
        yield cls.__name__, {index: rule for index, rule in rules.items() if rule.cls is cls}


def _checkpoint(optimizers: Mapping[int, torch.optim.Optimizer]) -> dict[str, Any]:
    return {f"optim{index}": optimizer for index, optimizer in optimizers.items()}


def save_job(topology: str, rules: Mapping[int, Rule], root: str, dtype: torch.dtype) -> dict[int, Run]:
    """Trains with every rule, saves each class to its directory under ``root``, and trains on."""
    track = Track(topology, dtype)
    result: dict[int, Run] = {}
    for name, batch in batches(rules):
        optimizers = {index: track.make(rule) for index, rule in batch.items()}
        middle: dict[int, Held] = {}
        for index, optimizer in optimizers.items():
            track.put(track.start)
            track.train(optimizer, range(SAVED_AFTER))
            set_lr(optimizer)
            middle[index] = track.held(optimizer)
        dcp.save(_checkpoint(optimizers), checkpoint_id=os.path.join(root, name))
        for index, optimizer in optimizers.items():
            track.put(middle[index].parts)
            track.train(optimizer, range(SAVED_AFTER, STEPS))
            result[index] = Run(middle[index], track.held(optimizer))
    return result


def resume_job(
    topology: str,
    rules: Mapping[int, Rule],
    root: str,
    how: str,
    weights: Mapping[int, Mapping[str, Array]],
    dtype: torch.dtype,
) -> dict[int, Run]:
    """Loads what `save_job` saved, on this topology, and trains on.

    Args:
        topology: of this run.
        rules: those that were saved, or some of them, by the same numbers.
        root: where.
        how: ``fresh`` or ``warm`` (the optimizer has already stepped elsewhere) by stock ``dcp.load``, or ``prepared``.
        weights: global arrays at the save, by rule; the checkpoints hold optimizers only.
        dtype: of the parameters.
    """
    track = Track(topology, dtype)
    result: dict[int, Run] = {}
    for name, batch in batches(rules):
        path = os.path.join(root, name)
        optimizers = {index: track.make(rule) for index, rule in batch.items()}
        if how == "warm":
            for optimizer in optimizers.values():
                track.train(optimizer, STEPS_ELSEWHERE)
        if how == "prepared":
            for index, optimizer in optimizers.items():
                optimizer.prepare_load(path, prefix=f"optim{index}").commit()
        else:
            dcp.load(_checkpoint(optimizers), checkpoint_id=path)
        for index, optimizer in optimizers.items():
            track.put_whole(weights[index])
            middle = track.held(optimizer)
            track.train(optimizer, range(SAVED_AFTER, STEPS))
            result[index] = Run(middle, track.held(optimizer))
    return result


def train_unsharded(rules: Mapping[int, Rule], dtype: torch.dtype) -> dict[int, tuple[Whole, Whole]]:
    """The same runs with the bare optimizer on the plain model: after the third step, and after the last."""
    track = Track(None, dtype)
    result: dict[int, tuple[Whole, Whole]] = {}
    for index, rule in rules.items():
        track.put(track.start)
        optimizer = track.make(rule)
        track.train(optimizer, range(SAVED_AFTER))
        set_lr(optimizer)
        middle = assemble([track.held(optimizer)])
        track.train(optimizer, range(SAVED_AFTER, STEPS))
        result[index] = (middle, assemble([track.held(optimizer)]))
    return result


def gathered_job(topology: str, rule: Rule) -> tuple[Held, dict[str, Array]]:
    """Trains, and returns this rank's parts beside what torch itself gathers."""
    track = Track(topology)
    optimizer = track.make(rule)
    track.train(optimizer, range(SAVED_AFTER))
    views: dict[str, Tensor] = dict(track.params)
    views |= {key.removeprefix("state."): value for key, value in optimizer.sharded_state().items()}
    full = {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in views.items()}
    # A copy: on one rank the full tensor is the live memory.
    return track.held(optimizer), {key: array(value.detach()) for key, value in full.items()}
