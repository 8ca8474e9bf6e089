"""The kit for authors of codecs finds nothing in what is right, and every kind of mistake in what is not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.own_codec import Momentum8, Momentum8Codec
from shardopt import Blocks, Form, Subject
from shardopt.layouts.codec import codec_of
from shardopt.layouts.learnt import LearntCodec
from shardopt.testing import check_codec
from tests.ranks.quantised_runs import make

SIZES = (1, 127, 128, 130, 1000)


def test_the_example_is_right() -> None:
    check_codec(Momentum8Codec(), Momentum8, sizes=SIZES)


class OtherLimit(Momentum8Codec):
    def form(self, subject: Subject, entry: str) -> Form | torch.dtype:
        return torch.float32 if subject.shard.numel() <= 128 else super().form(subject, entry)


class OtherBlock(Momentum8Codec):
    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Any:
        value = super().read(subject, state, entry)
        return (
            Blocks(Form(block=32, codes=torch.int8), value.codes, value.scales) if isinstance(value, Blocks) else value
        )


class Clears(Momentum8Codec):
    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Any:
        if "scale" in state:
            state["scale"].mul_(0.5)
        return super().read(subject, state, entry)


class LosesScales(Momentum8Codec):
    def write(self, subject: Subject, entry: str, value: Any) -> Mapping[str, Any]:
        made = dict(super().write(subject, entry, value))
        return {**made, "scale": torch.ones_like(made["scale"])} if "scale" in made else made


class LosesAnEntry(Momentum8Codec):
    def write(self, subject: Subject, entry: str, value: Any) -> Mapping[str, Any]:
        made = super().write(subject, entry, value)
        return {name: item for name, item in made.items() if name != "scale"}


class RoundsTwice(Momentum8Codec):
    def quantise(self, values: Tensor, form: Form) -> Blocks:
        return super().quantise(values * 1.1, form)


class Raises(Momentum8Codec):
    def quantise(self, values: Tensor, form: Form) -> Blocks:
        raise ValueError("no kernel for this size")


class Copies(Momentum8Codec):
    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Any:
        value = super().read(subject, state, entry)
        return Blocks(value.form, value.codes.clone(), value.scales.clone()) if isinstance(value, Blocks) else value


class MakesFlat(Momentum8Codec):
    def write(self, subject: Subject, entry: str, value: Any) -> Mapping[str, Any]:
        made = dict(super().write(subject, entry, value))
        return {**made, "momentum": made["momentum"].reshape(-1)}


class HidesAPart(Momentum8Codec):
    def parts(self, entry: str) -> tuple[str, ...]:
        return ("momentum",)


class WritesToValues(Momentum8Codec):
    def quantise(self, values: Tensor, form: Form) -> Blocks:
        made = super().quantise(values, form)
        values.zero_()
        return made


class NamesNothing(Momentum8Codec):
    def entries(self, subject: Subject) -> tuple[str, ...]:
        return ()


class SeesNothing(Momentum8Codec):
    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Any:
        return None


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (OtherLimit, "128 elements, example 0: 'momentum': the optimizer keeps Form"),
        (OtherBlock, "where form says"),
        (Clears, "read has changed the state"),
        (LosesScales, "steps on otherwise"),
        (LosesAnEntry, "state \\['scale'\\] is either"),
        (RoundsTwice, "more than one step"),
        (Raises, "ValueError: no kernel for this size"),
        (SeesNothing, "it is not there after a step"),
        (Copies, "read gives a copy"),
        (MakesFlat, "does not step|steps on otherwise"),
        (HidesAPart, "which parts does not name"),
        (WritesToValues, "quantise has written to the values it was given"),
        (NamesNothing, "entries names nothing"),
        (HidesAPart, "state keeps tensors \\['scale'\\] that no entry has"),
    ],
)
def test_a_mistake_is_found(codec: type[Momentum8Codec], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_codec(codec(), Momentum8, sizes=SIZES)


def test_what_is_found_of_every_size_is_said_once() -> None:
    with pytest.raises(AssertionError) as raised:
        check_codec(SeesNothing(), Momentum8, sizes=SIZES)
    lines = [line for line in str(raised.value).splitlines() if "it is not there after a step" in line]
    assert lines == [
        "1 elements, example 0: 'momentum': it is not there after a step (15 tries, of sizes 1, 127, 128, 130, 1000)"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_says_what_a_library_does_that_learns(dtype: torch.dtype) -> None:
    codec = codec_of(make("gefen-blocks", [torch.nn.Parameter(torch.zeros(1))]))
    assert isinstance(codec, LearntCodec)
    check_codec(codec, lambda params: make("gefen-blocks", params), dtype=dtype, sizes=(1, 7, 64, 301), examples=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        *("bnb-AdamW8bit", "bnb-Adam8bit", "bnb-Lion8bit", "bnb-RMSprop8bit", "bnb-Adagrad8bit", "bnb-AdamW"),
        *("ao-AdamW8bit", "ao-Adam8bit", "ao-AdamW4bit", "ao-AdamWFp8", "ao-_AdamW"),
    ],
)
def test_an_adapter_says_what_its_library_does(kind: str, dtype: torch.dtype) -> None:
    optimizer = make(kind, [torch.nn.Parameter(torch.zeros(1))])
    codec = codec_of(optimizer)
    assert codec is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_codec(codec, lambda params: make(kind, params), dtype=dtype, examples=1)
