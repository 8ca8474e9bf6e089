"""For authors of codecs: what a codec says is compared with what its optimizer does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardopt.geometry import Box
from shardopt.layouts.codec import Blocks, Codec, Form, Subject
from shardopt.layouts.learnt import LearntCodec
from shardopt.layouts.quantised import Piece, Stored, apart, memory_of, values_of

__all__ = ["check_codec"]

_Make = Callable[[list[Tensor]], torch.optim.Optimizer]

_STEPS = 3


def check_codec(
    codec: Codec,
    make: _Make,
    *,
    sizes: Sequence[int] = (1, 255, 256, 1000, 4095, 4096, 4097, 8192, 10_000),
    examples: int = 3,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Tries a codec out on small parameters, each stepped by itself, with random gradients.

    Checks, for every size and entry: that the optimizer keeps what ``form`` says; that ``read`` copies and changes
    nothing; that what ``write`` makes of it steps on with the same bits; that a whole and its parts mean the same; and
    that values which are quantised stay where they were to within one step of the codes.

    Args:
        codec: the codec.
        make: makes an optimizer of a list of parameters.
        sizes: numbers of elements that are tried; choose those around the optimizer's own limits.
        examples: how many times each size is tried.
        dtype: of the parameters.

    Raises:
        AssertionError: the codec or the optimizer does something else; every finding is listed.
        ValueError: there are no sizes.
    """
    if not sizes or min(sizes) < 1 or examples < 1:
        raise ValueError(f"sizes={list(sizes)!r}, examples={examples!r}: expected numbers of 1 or more.")
    found: dict[str, list[tuple[int, int]]] = {}
    for size in sizes:
        for seed in range(examples):
            for problem in dict.fromkeys(_Trial(codec, make, size, seed, dtype).problems()):
                found.setdefault(problem, []).append((size, seed))
    if found:
        said = [_said(problem, tries) for problem, tries in found.items()]
        raise AssertionError("\n".join([f"{type(codec).__name__}:", *said]))


def _said(problem: str, tries: Sequence[tuple[int, int]]) -> str:
    """What was found and where: the first place, which is enough to see it again, and all sizes."""
    (size, seed), sizes = tries[0], sorted({size for size, _ in tries})
    others = f" ({len(tries)} tries, of sizes {', '.join(map(str, sizes))})" if len(tries) > 1 else ""
    return f"{size} elements, example {seed}: {problem}{others}"


class _Trial:
    def __init__(self, codec: Codec, make: _Make, size: int, seed: int, dtype: torch.dtype) -> None:
        self._codec = codec
        self._make = make
        self._generator = torch.Generator().manual_seed(1000 * size + seed)
        # Matrices too: what is made flat does not fit them.
        shape = (size // 2, 2) if seed % 2 and size % 2 == 0 else (size,)
        self._param = torch.nn.Parameter(self._drawn(size).to(dtype).view(shape))
        self._optimizer = make([self._param])

    def problems(self) -> Iterator[str]:
        """What is not as it must be."""
        before = self._state_of(self._optimizer, self._param)
        if before is not None and any(self._read(self._optimizer, before, name) is not None for name in self._entries):
            yield "read finds state before the first step"
        if not self._entries:
            yield "entries names nothing"
        for _ in range(_STEPS):
            self._step(self._optimizer, self._param, self._drawn(self._param.numel()))
        state = self._optimizer.state[self._param]
        named = {part for name in self._entries for part in self._codec.parts(name)}
        forgotten = sorted(
            key
            for key, one in state.items()
            if isinstance(one, Tensor) and one.dim() and key not in named and not self._codec.is_scratch(key)
        )
        if forgotten:
            yield f"state keeps tensors {forgotten} that no entry has among its parts"
        for name in self._entries:
            try:
                yield from (f"{name!r}: {found}" for found in self._entry_problems(state, name))
            # Whatever a codec raises is a finding.
            except Exception as error:
                yield f"{name!r}: {type(error).__name__}: {error}"
        yield from self._continuation_problems()

    @property
    def _entries(self) -> tuple[str, ...]:
        return self._codec.entries(_subject(self._optimizer, self._param))

    @property
    def _attributes(self) -> list[str]:
        return [name for name in self._codec.attributes(self._optimizer) if name in vars(self._optimizer)]

    def _entry_problems(self, state: dict[str, Any], name: str) -> Iterator[str]:
        snapshot = copy.deepcopy({key: value for key, value in state.items() if type(value) is Tensor})
        value = self._read(self._optimizer, state, name)
        if value is None:
            yield "it is not there after a step"
            return
        if any(not _same(state[key], kept) for key, kept in snapshot.items()):
            yield "read has changed the state"
        held = {address for one in state.values() for address in memory_of(one)}
        own = [value] if isinstance(value, Tensor) else [value.codes, value.scales]
        if any(one is not None and one.numel() and one.data_ptr() not in held for one in own):
            yield "read gives a copy, and a load would fill that"
        form = self._codec.form(_subject(self._optimizer, self._param), name)
        if isinstance(value, Tensor):
            if not isinstance(form, torch.dtype) or form != value.dtype:
                yield f"the optimizer keeps {value.dtype} where form says {form}"
            return
        # What is learnt from gradients nobody can say before.
        learns = isinstance(self._codec, LearntCodec)
        if not isinstance(form, Form) or not (learns or form.is_like(value.form)):
            yield f"the optimizer keeps {value.form} where form says {form}"
            return
        yield from self._block_problems(value)

    def _block_problems(self, value: Blocks) -> Iterator[str]:
        size, form = self._param.numel(), value.form
        every = Box((0,), (size,))
        codes = 0 if value.codes is None else value.codes.numel() * form.per_byte
        if value.scales.numel() != -(-size // form.block) or codes not in (0, size):
            yield f"{codes} codes and {value.scales.numel()} scales, for blocks of {form.block}"
            return
        whole = self._meaning(value, every)
        cut = size // 3
        parts = [self._meaning(value, box) for box in (Box((0,), (cut,)), Box((cut,), (size - cut,)))]
        if not _same(torch.cat(parts), whole):
            yield "parts mean something else than the whole"
        given = whole.clone().view(self._param.shape)
        once = self._codec.quantise(given, form)
        if not _same(given.reshape(-1), whole):
            yield "quantise has written to the values it was given"
        if once.scales.numel() != value.scales.numel() or (once.codes is None) != (value.codes is None):
            yield f"quantise makes {once.scales.numel()} scales, and the optimizer keeps {value.scales.numel()}"
            return
        if not once.form.is_like(form):
            yield f"quantise makes {once.form} where {form} was asked for"
            return
        allowed = self._meaning(Blocks(replace(form, codes=None), None, once.scales), every) * _widest_step(form)
        # And one rounding of the scale.
        off = (self._meaning(once, every) - whole).abs() - allowed * (1 + 1e-6) - whole.abs() * 1e-6
        if off.max() > 0:
            yield "quantise moves values by more than one step of the codes"
        if not _same(whole, self._meaning(value, every)):
            yield "quantise has written to live state"

    def _continuation_problems(self) -> Iterator[str]:
        """Whether an optimizer that is put together from what was read steps on with the same bits."""
        param = torch.nn.Parameter(self._param.detach().clone())
        other = self._make([param])
        state = self._optimizer.state[self._param]
        parts = {part for name in self._entries for part in self._codec.parts(name)}
        left_out = {*parts, *filter(self._codec.is_scratch, state)}
        rest = {key: copy.deepcopy(value) for key, value in state.items() if key not in left_out}
        other.state[param].update(rest)
        vars(other).update({name: copy.deepcopy(vars(self._optimizer)[name]) for name in self._attributes})
        if isinstance(self._codec, LearntCodec):
            table = self._codec.table(self._optimizer)
            self._codec.adopt(other, None if table is None else table.clone())
        for name in self._entries:
            value = self._read(self._optimizer, state, name)
            if value is not None:
                copied = value.clone() if isinstance(value, Tensor) else _copied(value)
                strange = self._codec.write(_subject(other, param), name, copied).keys() - set(self._codec.parts(name))
                if strange:
                    yield f"{name!r}: write makes {sorted(strange)}, which parts does not name"
                other.state[param].update(self._codec.write(_subject(other, param), name, copied))
        lost = sorted(key for key in state.keys() ^ other.state[param].keys() if not self._codec.is_scratch(key))
        if lost:
            yield f"state {lost} is either in the optimizer or in what write has made, and not in both"
            return
        for _ in range(_STEPS):
            gradient = self._drawn(param.numel())
            self._step(self._optimizer, self._param, gradient)
            try:
                self._step(other, param, gradient)
            except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
                yield f"an optimizer that was put together from what read gives does not step: {error}"
                return
        if not _same(param.detach(), self._param.detach()):
            yield "an optimizer that was put together from what read gives steps on otherwise"

    def _meaning(self, value: Blocks, box: Box) -> Tensor:
        frame = Box((0,), (self._param.numel(),))
        codes = None if value.codes is None else apart(value.codes, value.form.per_byte)[box.offset[0] : box.end[0]]
        return values_of(box, codes, [Piece(frame, Stored(value.form, frame, value.scales.reshape(-1)))])

    def _read(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], name: str) -> Blocks | Tensor | None:
        return self._codec.read(_subject(optimizer, self._param), state, name)

    @staticmethod
    def _state_of(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any] | None:
        # Not by index, which would make one.
        return optimizer.state.get(param)

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, param: Tensor, gradient: Tensor) -> None:
        param.grad = gradient.to(param.dtype).view(param.shape)
        optimizer.step()

    def _drawn(self, size: int) -> Tensor:
        """Of very different sizes, as gradients are."""
        sizes = torch.empty(size).uniform_(-4, 0, generator=self._generator)
        return torch.randn(size, generator=self._generator) * 10**sizes


def _subject(optimizer: torch.optim.Optimizer, param: Tensor) -> Subject:
    return Subject(optimizer, optimizer.param_groups[0], param.detach())


def _widest_step(form: Form) -> float:
    """Of the numbers that codes stand for, the widest gap between two neighbours; 0 without codes."""
    if form.codes is None:
        return 0.0
    numbers = form.table
    if numbers is None:
        # In memory of their own, since not every type of a byte can be made of numbers.
        numbers = torch.arange(256, dtype=torch.uint8).view(form.codes).float()
    numbers = numbers[numbers.isfinite()].unique()
    return float(numbers.diff().max())


def _copied(value: Blocks) -> Blocks:
    return Blocks(value.form, None if value.codes is None else value.codes.clone(), value.scales.clone())


def _same(one: Any, other: Any) -> bool:
    """Bit for bit, NaNs too."""
    if type(one) is not type(other):
        return False
    if type(one) is not Tensor:
        # A class of its own says what its copy is.
        return True
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8) if one.dim() else one.reshape(1).view(torch.uint8),
        other.contiguous().view(torch.uint8) if other.dim() else other.reshape(1).view(torch.uint8),
    )
