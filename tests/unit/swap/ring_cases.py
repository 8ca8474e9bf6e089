"""Training by AdamW whose state streams through a ring on a simulated device, and the same on the host alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from shardopt.swap.backend import Stream
from shardopt.swap.chunks import Chunk, Part, cut_chunks, plan_layout
from shardopt.swap.host_kernel import HYPER, ROW, DtypeCode, MasterKind, Table, adamw_hyper, adamw_rows
from shardopt.swap.ring import Entries, Ring
from shardopt.swap.simulated_launch import HostLaunch
from shardopt.swap.simulator import SimBackend
from shardopt.swap.spans import spans_of
from shardopt.swap.step_tables import table_room
from tests.unit.swap.swap_cases import bits

__all__ = [
    "ALL",
    "FIRST",
    "KINDS",
    "Result",
    "Scenario",
    "Step",
    "Streamed",
    "Work",
    "drawn",
    "plain_steps",
    "serial",
    "streamed",
]

# Entries of different widths, and random bits, which depend on where an element is.
KINDS: dict[str, dict[str, torch.dtype]] = {
    "fp32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "bf16": {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "max_exp_avg_sq": torch.bfloat16,
        "master_lo": torch.int16,
    },
}
BLOCK = 32
SEED = 5
# Of the fp32 kind 96 elements, of the other one 96 too.
CHUNK_BYTES = 96 * 8
# A parameter of several chunks, one that shares its chunk, odd ones; of each kind.
SIZES = (130, 40, 65)
MORE_SIZES = (70,)


# Which parameters have a gradient: all, or the first of each kind.
ALL = (True,) * 8
FIRST = (True, True, *(False,) * 6)


def bytes_of(kind: str) -> int:
    return sum(dtype.itemsize for dtype in KINDS[kind].values())


@dataclass(frozen=True)
class Step:
    """One step, or what is done between steps.

    Attributes:
        has: which parameters have a gradient.
        lr, scale, skip: of the step.
        then: what comes after it: ``"save"``, ``"load"``, ``"group"`` (a new one) or nothing.
    """

    has: tuple[bool, ...]
    lr: float
    scale: float
    skip: bool
    then: str


@dataclass(frozen=True)
class Scenario:
    seed: int
    depth: int
    budget_bytes: int
    steps: tuple[Step, ...]


def drawn(seed: int) -> Scenario:
    """A scenario by chance: sparse or full gradients, any depth, with and without a budget."""
    chance = random.Random(seed)
    count = 2 * (len(SIZES) + len(MORE_SIZES))
    often = chance.choice((0.3, 0.8, 1.0))
    thens = chance.choice((("", "", "save"), ("", "", "save", "load", "group"), ("",)))
    steps = tuple(
        Step(
            tuple(chance.random() < often for _ in range(count)),
            lr=chance.choice((1e-3, 3e-2)),
            scale=chance.choice((1.0, 0.25)),
            skip=chance.random() < 0.1,
            then=chance.choice(thens),
        )
        for _ in range(chance.randint(3, 7))
    )
    return Scenario(seed, chance.randint(1, 4), chance.choice((0, 0, 1024, 2048, 1 << 20)), steps)


def plain_steps(count: int, has: tuple[bool, ...] = ALL) -> tuple[Step, ...]:
    """Steps with nothing between them."""
    return (Step(has, lr=1e-3, scale=1.0, skip=False, then=""),) * count


@cache
def drawn_values(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@dataclass
class Model:
    """Parameters, gradients and state of one run. Nothing is freed while it lives: the simulator knows addresses."""

    seed: int
    params: list[Tensor] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    grads: list[list[Tensor]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    slabs: list[Tensor] = field(default_factory=list)
    chunks: list[tuple[Chunk, int]] = field(default_factory=list)
    entries: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, sizes: Sequence[int]) -> None:
        """A group: parameters of both kinds, and their state."""
        first, new = len(self.params), [(kind, size) for size in sizes for kind in KINDS]
        for kind, size in new:
            value = self.draw(len(self.params), 0, size)
            self.params.append(value.bfloat16() if kind == "bf16" else value)
            self.kinds.append(kind)
            self.counts.append(0)
            # Two of each, so that addresses differ from step to step; of both dtypes.
            dtype = torch.bfloat16 if kind == "bf16" else torch.float32
            self.grads.append([torch.zeros(size, dtype=dtype) for _ in range(2)])
        parts = [Part(kind, spans_of((size,), (1,), (0,), (size,), indexed=True)) for kind, size in new]
        layout = plan_layout([part.kind for part in parts], [part.numel for part in parts])
        memory = {
            kind: {name: torch.zeros(layout.lengths[kind], dtype=dtype) for name, dtype in entries.items()}
            for kind, entries in KINDS.items()
        }
        self.slabs += [slab for entries in memory.values() for slab in entries.values()]
        sizes_of = {kind: bytes_of(kind) for kind in KINDS}
        for chunk in cut_chunks(parts, layout, element_bytes=sizes_of, chunk_bytes=CHUNK_BYTES, block=BLOCK):
            self.chunks.append((chunk, first))
            entries = memory[str(chunk.kind)]
            self.entries.append({name: slab[chunk.start : chunk.end] for name, slab in entries.items()})

    def draw(self, index: int, step: int, size: int) -> Tensor:
        return drawn_values(self.seed * 10_000 + step * 100 + index, size).clone()

    def rows(self, number: int, has: Sequence[bool], step: int) -> Table:
        """The rows of a chunk that have a gradient; of moments and master they say the offset in the chunk."""
        chunk, first = self.chunks[number]
        of = chunk.rows["param"] + first
        there = np.array([has[index] for index in of], np.bool_)
        cut, of = chunk.rows[there], of[there]
        rows = np.zeros(len(cut), ROW)
        for row, one, index in zip(rows, cut, of.tolist(), strict=True):
            param, grad = self.params[index], self.grads[index][step % 2]
            row["param"] = param.data_ptr() + one["param_offset"] * param.element_size()
            row["grad"] = grad.data_ptr() + one["dense_offset"] * grad.element_size()
            row["param_dtype"] = DtypeCode.BF16 if param.dtype == torch.bfloat16 else DtypeCode.FP32
            row["grad_dtype"] = DtypeCode.BF16 if grad.dtype == torch.bfloat16 else DtypeCode.FP32
        is_bf16 = chunk.kind == "bf16"
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"):
            rows[name] = cut["offset"]
        for name in ("numel", "index_start", "index_run", "index_stride"):
            rows[name] = cut[name]
        rows["stream"] = rows["hyper"] = of
        rows["moment_dtype"] = DtypeCode.BF16 if is_bf16 else DtypeCode.FP32
        rows["master_kind"] = MasterKind.REMAINDER16 if is_bf16 else MasterKind.NONE
        return rows

    def hypers(self, has: Sequence[bool], one: Step) -> Table:
        if not one.skip:
            self.counts = [count + there for count, there in zip(self.counts, has, strict=False)]
        return np.array(
            [
                adamw_hyper(lr=one.lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=max(count, 1))
                for count in self.counts
            ],
            HYPER,
        )

    def loaded(self, step: int) -> list[Tensor]:
        """State of some checkpoint: small numbers, which second moments and remainders may be, too."""
        return [self.draw(index, 50 + step, len(slab)).abs().to(slab.dtype) for index, slab in enumerate(self.slabs)]


@dataclass
class Result:
    """All numbers that a run has made: what it saved, what forward passes saw, and what there was in the end."""

    saved: list[list[Tensor]] = field(default_factory=list)
    seen: list[list[Tensor]] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)

    def differs(self, other: Result) -> bool:
        ours, theirs = (
            [bits(tensor) for tensors in (*one.saved, *one.seen, one.state) for tensor in tensors]
            for one in (self, other)
        )
        return len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs))


@dataclass
class Work:
    """A launch of anything."""

    name: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    run: Callable[[], object]


def backward(model: Model, number: int) -> Work:
    """Writes this step's gradients."""
    values = [model.draw(index, 1 + number, len(grads[0])) for index, grads in enumerate(model.grads)]
    grads = [grads[number % 2] for grads in model.grads]
    return Work("backward", [], grads, lambda: torch._foreach_copy_(grads, values))


def forward(model: Model, result: Result) -> Work:
    """Reads all parameters, as they are when it runs."""
    params = list(model.params)
    seen = [torch.empty_like(param) for param in params]
    result.seen.append(seen)
    return Work("forward", params, seen, lambda: torch._foreach_copy_(seen, params))


def serial(scenario: Scenario) -> Result:
    """The scenario with nothing but the host kernel."""
    model, result = Model(scenario.seed), Result()
    model.add(SIZES)
    for number, step in enumerate(scenario.steps):
        backward(model, number).run()
        hypers = model.hypers(step.has, step)
        for chunk, entries in enumerate(model.entries):
            rows = model.rows(chunk, step.has, number)
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"):
                entry = entries.get("master_lo" if name == "master" else name)
                rows[name] = 0 if entry is None else entry.data_ptr() + rows[name] * entry.element_size()
            if len(rows) and not step.skip:
                adamw_rows(rows, hypers, seed=SEED, grad_scale=step.scale, num_threads=1)
        forward(model, result).run()
        if step.then == "save":
            result.saved.append([slab.clone() for slab in model.slabs])
        if step.then == "load":
            for slab, value in zip(model.slabs, model.loaded(number), strict=True):
                slab.copy_(value)
        if step.then == "group" and len(model.params) < len(step.has):
            result.saved.append([slab.clone() for slab in model.slabs])
            model.add(MORE_SIZES)
    result.state = [*model.slabs, *model.params]
    return result


class Streamed:
    """The scenario on a device.

    Attributes:
        backend: the device.
        model: on it, but for its slabs.
        result: so far.
        ring: of the state.
        unfinished: launches of each step that are still to run.
    """

    def __init__(self, scenario: Scenario, backend: SimBackend) -> None:
        self.scenario = scenario
        self.backend = backend
        self.model = Model(scenario.seed)
        self.model.add(SIZES)
        self.result = Result()
        self.ring = self._ring()
        self.unfinished: list[int] = []

    def _ring(self) -> Ring:
        model = self.model
        num_rows = sum(len(chunk.rows) for chunk, _ in model.chunks)
        return Ring(
            self.backend,
            model.entries,
            table_bytes=table_room([num_rows * ROW.itemsize, len(model.params) * HYPER.itemsize, 8]),
            depth=self.scenario.depth,
            budget_bytes=self.scenario.budget_bytes,
        )

    def step(self, number: int, step: Step) -> None:
        """Backward pass, update, and the forward pass after it."""
        self.update(number, step)
        self.backend.launch(forward(self.model, self.result), Stream.COMPUTE)

    def update(self, number: int, step: Step) -> None:
        """Backward pass and update."""
        self.backend.launch(backward(self.model, number), Stream.COMPUTE)
        hypers = self.model.hypers(step.has, step)
        rows = [self.model.rows(chunk, step.has, number) for chunk in range(len(self.model.chunks))]
        ends = np.cumsum([one.nbytes for one in rows]).tolist()
        self.unfinished.append(sum(1 for one in rows if len(one)))

        def launch(chunk: int, entries: Entries, tables: Sequence[Tensor]) -> Work:
            # A row's stream is the number of its parameter.
            indices = sorted({int(index) for index in rows[chunk]["stream"]})
            own = HostLaunch(
                name=f"step {number} of chunk {chunk}",
                rows=tables[0][ends[chunk] - rows[chunk].nbytes : ends[chunk]],
                hypers=tables[1],
                scalars=tables[2],
                entries=entries,
                params=[self.model.params[index] for index in indices],
                grads=[self.model.grads[index][number % 2] for index in indices],
                seed=SEED,
            )

            def run() -> None:
                own.run()
                self.unfinished[number] -= 1

            return Work(own.name, own.reads, own.writes, run)

        chunks = [chunk for chunk, one in enumerate(rows) if len(one)]
        scalars = np.array([step.scale, step.skip], np.float32)
        self.ring.step(chunks, [np.concatenate(rows), hypers, scalars], launch)

    def save(self) -> list[Tensor]:
        """The state as the host sees it."""
        self.ring.drain()
        for slab in self.model.slabs:
            self.backend.host_reads(slab)
        return [slab.clone() for slab in self.model.slabs]

    def then(self, number: int, step: Step) -> None:
        """What comes after the step."""
        if step.then == "save":
            self.result.saved.append(self.save())
        if step.then == "load":
            self.ring.drain()
            for slab, value in zip(self.model.slabs, self.model.loaded(number), strict=True):
                self.backend.host_writes(slab)
                slab.copy_(value)
            self.ring.host_changed()
        if step.then == "group" and len(self.model.params) < len(step.has):
            # Whoever makes another plan may look at what is there.
            self.result.saved.append(self.save())
            self.model.add(MORE_SIZES)
            self.ring = self._ring()

    def run(self) -> Result:
        """All of it."""
        for number, step in enumerate(self.scenario.steps):
            self.step(number, step)
            self.then(number, step)
        state = self.save()
        self.backend.finish()
        self.result.state = [*state, *self.model.params]
        return self.result


def streamed(scenario: Scenario, backend: SimBackend) -> Result:
    return Streamed(scenario, backend).run()
