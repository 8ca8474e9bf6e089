"""Finding out how a rule has to be shown its parameters, by running it on tiny ones, whole and in parts.

A rule that gives the same bits on parts of a tensor as on the whole one is element-wise as far as 24 steps can show.
That alone is not enough: rules that couple parameters begin to do so late, or with some gradients only. So three
witnesses have to agree before a rule counts as element-wise: the numbers, under two kinds of gradients; monotony: whole
parameters alone get the same bits too; and an audit of the operations, which sees a reduction before it has an effect.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardopt.errors import PresentationError
from shardopt.layouts.attributes import changed, held_in
from shardopt.layouts.declared import ATTRIBUTE
from shardopt.presentation.audit import OperationAudit
from shardopt.presentation.replica import make_replica
from shardopt.presentation.trial import TriedPart, TriedRun, first_difference
from shardopt.torch_compat import raw_step

__all__ = ["Finding", "probe"]

_Shapes = Sequence[tuple[int, ...]]

NUM_STEPS = 24
_SEED = 20250123

# By number of dimensions. Every half along every dim is a multiple of 64 elements: torch's vector loops round the rest
# of a tensor differently than its body. The two of a kind differ, for rules that look at shapes.
_SHAPES: dict[int, _Shapes] = {
    0: ((), ()),
    1: ((256,), (128,)),
    2: ((16, 32), (32, 16)),
    3: ((16, 8, 4), (8, 16, 4)),
    4: ((16, 8, 4, 2), (8, 16, 2, 4)),
}


_Regime = Callable[[int, Tensor, Tensor, int], Tensor | None]


# Some rules treat parameters from a number of elements on otherwise (8-bit ones, say, from 4,096). Halves of these have
# every such number up to the last between them and the whole.
_SIZES: dict[int, _Shapes] = {
    0: ((),),
    1: tuple((count,) for count in (1024, 2048, 4096, 8192, 16384)),
    2: tuple((count, 32) for count in (32, 64, 128, 256, 512)),
    3: tuple((count, 8, 4) for count in (32, 64, 128, 256, 512)),
    4: tuple((count, 8, 2, 2) for count in (32, 64, 128, 256, 512)),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe has found.

    Attributes:
        compute: the cheapest presentation that gives what an unsharded run gives.
        why_not: why the rule cannot be run on parts of parameters, in words; None when nothing speaks against it.
        why_not_owner: why it cannot be run on some parameters without the others.
        entries: state entries that have a number for each element of their parameter.
        draws: whether it draws random numbers.
        needs_closure: whether it does not run without a closure.
        attributes: of the optimizer, which hold plain values and were changed by steps.
        common: of an element-wise rule, state entries of another shape, which parts have as the whole has them.
    """

    compute: str
    why_not: str | None
    why_not_owner: str | None
    entries: frozenset[str] = frozenset()
    draws: bool = False
    attributes: frozenset[str] = frozenset()
    common: frozenset[str] = frozenset()
    needs_closure: bool = False


def probe(inner: torch.optim.Optimizer) -> Finding:
    """Finds out whether the rule is element-wise, or at least updates each parameter by itself.

    Runs replicas of the optimizer, with its options, on small parameters of the dimensions that it has. No effect on
    anything live, nor on random numbers.

    Raises:
        PresentationError: no replica can be made.
        Exception: the rule does not run on whole parameters either; what it raises.
    """
    with _undisturbed():
        return _Probe(inner).run()


class _Probe:
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        shapes_of: Mapping[int, Sequence[tuple[int, ...]]] = _SHAPES,
        *,
        constructs: bool = False,
    ) -> None:
        self._inner = inner
        self._constructs = constructs
        self._group_of: list[int] = []
        shapes: list[tuple[int, ...]] = []
        for index, group in enumerate(inner.param_groups):
            for dims in sorted({min(param.dim(), max(_SHAPES)) for param in group["params"]}):
                shapes += shapes_of[dims]
                self._group_of += [index] * len(shapes_of[dims])
        generator = torch.Generator().manual_seed(_SEED)
        self._params = [torch.randn(shape, generator=generator) for shape in shapes]
        self._noise = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(NUM_STEPS)]

    def run(self) -> Finding:
        everything = [TriedPart(index) for index in range(len(self._params))]
        closes = self._needs_closure(everything)
        if closes is not None:
            return closes
        entries: set[str] = set()
        tensors: set[str] = set()
        attributes: frozenset[str] = frozenset()
        why_not: str | None = None
        why_not_owner: str | None = None
        for name, regime in (("given", self._given), ("dependent", self._dependent)):
            whole = self._run(everything, regime)
            entries |= whole.elementwise()
            tensors |= whole.tensors()
            attributes |= whole.attributes()
            if whole.drew:
                why = "draws random numbers, which parts would draw in another order"
                return Finding("replicated", why, why, frozenset(entries), True, whole.attributes())
            if why_not is None:
                found = self._differs(whole, self._halves(), regime)
                why_not = found and f"is not element-wise: with {name} gradients parts of parameters {found}"
            if why_not_owner is None:
                found = self._differs(whole, self._owners(), regime)
                why_not_owner = found and f"couples parameters: with {name} gradients parameters alone {found}"
        if why_not_owner is not None:
            return Finding("replicated", why_not or why_not_owner, why_not_owner, frozenset(entries), False, attributes)
        mixing: list[str] = [] if why_not else self._audit(everything)
        if mixing:
            why_not = f"uses {', '.join(mixing[:5])}, which can mix elements"
        why_not = why_not or _Probe(self._inner, _SIZES, constructs=self._constructs).why_not_at_any_size()
        if why_not is not None:
            return Finding("owner", why_not, None, frozenset(entries), False, attributes)
        return Finding("local", None, None, frozenset(entries), False, attributes, frozenset(tensors - entries))

    def why_not_at_any_size(self) -> str | None:
        """Why the rule is not element-wise for larger parameters, in words; None when nothing speaks against it."""
        everything = [TriedPart(index) for index in range(len(self._params))]
        halves = [[self._half(index, 0, rank) for index in range(len(self._params))] for rank in range(2)]
        found = self._differs(self._run(everything, self._given), iter([halves]), self._given)
        return found and f"is not element-wise for larger parameters: parts of them {found}"

    def _needs_closure(self, everything: Sequence[TriedPart]) -> Finding | None:
        """What to make of a rule that runs with a closure only; None of one that runs without.

        Raises:
            Exception: it runs neither way; what it raises without.
        """
        try:
            self._run(everything, self._given)
        except Exception as error:
            self._constructs = True
            with suppress(Exception):
                self._run(everything, self._given)
                return None
            self._constructs = False
            try:
                run = self._run(everything, self._dependent, with_closure=True)
            except Exception:
                raise error from None
            why = "calls a closure, for the loss or for more gradients"
            return Finding(
                "replicated", why, why, frozenset(run.elementwise()), run.drew, run.attributes(), needs_closure=True
            )
        return None

    # Gradients. What a step's noise is cut to goes with the parameter it is for.

    def _given(self, step: int, noise: Tensor, param: Tensor, index: int) -> Tensor | None:
        if step == 2 and index == 0:
            return torch.zeros_like(noise)
        return None if step == 3 and index == 1 else noise * 10.0 ** (step % 4 - 2)

    def _dependent(self, step: int, noise: Tensor, param: Tensor, index: int) -> Tensor | None:
        # As of a loss that has its minimum at zero: some rules couple parameters only when they are on their way.
        return None if step == 6 and index == 1 else param / 2 + noise / 10

    # Ways to cut. A part is an index, a dim, where it starts and how long it is; dim None is the whole parameter.

    def _owners(self) -> Iterator[list[list[TriedPart]]]:
        count = len(self._params)
        yield [[TriedPart(index)] for index in range(count)]
        yield [[TriedPart(index) for index in range(count) if index % 2 == rank] for rank in range(2)]
        # One rank may own nothing.
        yield [[TriedPart(index) for index in range(count)], []]

    def _halves(self) -> Iterator[list[list[TriedPart]]]:
        dims = range(max(param.dim() for param in self._params))
        for dim in dims:
            yield [[self._half(index, dim, rank) for index in range(len(self._params))] for rank in range(2)]
        # The second rank holds nothing of the first parameter that can be cut.
        first = next((index for index, param in enumerate(self._params) if param.dim()), None)
        if first is not None:
            size = self._params[first].shape[0]
            yield [
                [
                    TriedPart(index, 0, rank * size, size * (1 - rank))
                    if index == first
                    else self._half(index, 0, rank)
                    for index in range(len(self._params))
                ]
                for rank in range(2)
            ]

    def _half(self, index: int, dim: int, rank: int) -> TriedPart:
        param = self._params[index]
        if dim >= param.dim():
            return TriedPart(index)
        size = param.shape[dim] // 2
        return TriedPart(index, dim, rank * size, size)

    # Runs.

    def _differs(self, whole: TriedRun, ways: Iterator[list[list[TriedPart]]], regime: _Regime) -> str | None:
        for ranks in ways:
            try:
                runs = [self._run(parts, regime) for parts in ranks]
            except Exception as error:
                return f"raise {type(error).__name__}: {str(error)[:120]}"
            found = next(filter(None, (first_difference(run, whole) for run in runs)), None)
            if found is not None:
                return found
        return None

    def _run(self, parts: Sequence[TriedPart], regime: _Regime, *, with_closure: bool = False) -> TriedRun:
        params = [nn.Parameter(part.of(self._params[part.index]).clone()) for part in parts]
        optimizer = self._replica(parts, params)
        held = held_in(optimizer, objects=True)
        torch.manual_seed(_SEED)
        before = _random_states()
        history: list[list[Tensor]] = []
        for step in range(NUM_STEPS):
            self._step(optimizer, parts, params, regime, step, with_closure)
            history.append([param.detach().clone() for param in params])
        groups: list[Mapping[str, Any]] = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        states = [optimizer.state.get(param) or {} for param in params]
        beside: dict[Any, Any] = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        now = held_in(optimizer, objects=True)
        beside |= {ATTRIBUTE + name: now[name] for name in changed(held, now)}
        return TriedRun(list(parts), history, states, groups, beside, drew=before != _random_states())

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[TriedPart],
        params: Sequence[nn.Parameter],
        regime: _Regime,
        step: int,
        with_closure: bool,
    ) -> None:
        def give_gradients() -> None:
            for part, param in zip(parts, params, strict=True):
                noise = part.of(self._noise[step][part.index])
                gradient = regime(step, noise, param.detach(), part.index)
                param.grad = None if gradient is None else gradient.clone()

        called = 0

        def closure() -> Tensor:
            nonlocal called
            called += 1
            give_gradients()
            return torch.stack([param.detach().square().sum() for param in params]).sum()

        if with_closure:
            raw_step(optimizer)(closure)
            if called == 0:
                raise PresentationError("it does not call its closure")
        else:
            give_gradients()
            raw_step(optimizer)()

    def _replica(self, parts: Sequence[TriedPart], params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        grouped: list[list[Tensor]] = [[] for _ in self._inner.param_groups]
        for part, param in zip(parts, params, strict=True):
            grouped[self._group_of[part.index]].append(param)
        return make_replica(self._inner, grouped, construct=self._constructs)

    def _audit(self, parts: Sequence[TriedPart]) -> list[str]:
        params = [nn.Parameter(param.clone()) for param in self._params]
        optimizer = self._replica(parts, params)
        audit = OperationAudit()
        for step in range(NUM_STEPS):
            for part, param in zip(parts, params, strict=True):
                param.grad = self._given(step, self._noise[step][part.index], param, part.index + 2)
            with audit:
                raw_step(optimizer)()
        return list(audit.mixing)


def _random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), kind, np.asarray(keys).tobytes(), *rest, random.getstate()


@contextmanager
def _undisturbed() -> Generator[None]:
    """Leaves the generators of torch, NumPy and Python as they were; one thread, for bits and for time."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            np.random.set_state(numpy_state)
            random.setstate(python_state)
