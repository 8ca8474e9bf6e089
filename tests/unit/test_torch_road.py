"""Torch's own functions for optimizer state, and torch.save: they change nothing, and lose nothing in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_road
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardopt import LoadError, ShardedStateOptimizer, ShardoptError
from tests.support.rules import Awkward, groups, state, train
from tests.support.snapshot import snapshot

SENTENCE = (
    r"^torch\.distributed\.checkpoint\.state_dict does not suit a ShardedStateOptimizer.*dcp\.save\(\{'optim': "
    r"optimizer\}, \.\.\.\) and dcp\.load.*prepare_load\(path\)\.commit\(\)\.$"
)

Call = Callable[[nn.Module, Any, dict[str, Any], StateDictOptions], Any]

CALLS: dict[str, Call] = {
    "get_optimizer_state_dict": lambda model, one, saved, options: torch_road.get_optimizer_state_dict(
        model, one, options=options
    ),
    "get_state_dict": lambda model, one, saved, options: torch_road.get_state_dict(model, one, options=options),
    "set_optimizer_state_dict": lambda model, one, saved, options: torch_road.set_optimizer_state_dict(
        model, one, saved, options=options
    ),
    # It loads the model first: here the values that the model has.
    "set_state_dict": lambda model, one, saved, options: torch_road.set_state_dict(
        model, one, model_state_dict=dict(model.state_dict()), optim_state_dict=saved, options=options
    ),
}


def refused(
    optimizer: ShardedStateOptimizer, model: Awkward, call: Call, *, outer: Any = None, **options: Any
) -> list[str]:
    """What a refused call, of the optimizer or of one around it, has changed."""
    twin = Awkward()
    plain = torch.optim.AdamW(twin.parameters())
    train(plain, twin, range(2))
    twin.give_gradients(0)
    saved = torch_road.get_optimizer_state_dict(twin, plain, options=StateDictOptions(**options))
    before = snapshot(optimizer, model)
    with pytest.raises(TypeError, match=SENTENCE):
        call(model, outer or optimizer, saved, StateDictOptions(**options))
    return before.diff(snapshot(optimizer, model))


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
@pytest.mark.parametrize("gradients", [False, True], ids=["no-gradients", "gradients"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "warm"])
@pytest.mark.parametrize("call", CALLS)
def test_torchs_functions_are_refused_and_change_nothing_T1_A1(
    call: str, steps: int, gradients: bool, options: dict[str, Any]
) -> None:
    model = Awkward()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125)), model)
    train(optimizer, model, range(steps))
    if gradients:
        model.give_gradients(steps)
    assert refused(optimizer, model, CALLS[call], **options) == []


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params: torch.optim.SGD(params, momentum=0.9, dampening=0.5),
    "SGD without state": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("call", CALLS)
def test_a_refused_look_leaves_no_trace_in_training_A1_A2(call: str, rule: str) -> None:
    runs = []
    for look in (False, True):
        model = Awkward()
        optimizer = ShardedStateOptimizer(RULES[rule](model.parameters()), model)
        if look:
            assert refused(optimizer, model, CALLS[call]) == []
        train(optimizer, model, range(3))
        runs.append(snapshot(optimizer, model))
    assert runs[0].diff(runs[1], identities=False) == []


def test_several_wrapped_optimizers_are_refused_too_T1() -> None:
    model = Awkward()
    first, *others = model.parameters()
    inners = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others)]
    optimizer = ShardedStateOptimizer(inners, model)
    for call in CALLS.values():
        assert refused(optimizer, model, call) == []


class Outer(torch.optim.Optimizer):
    """A trainer's own optimizer, that hands everything on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


class Asking(torch.optim.Optimizer):
    """The same, for whatever it is asked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__["optimizer"] = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


@pytest.mark.parametrize("outer", [Outer, Asking, lambda one: Outer(Asking(one))], ids=["property", "getattr", "two"])
@pytest.mark.parametrize("call", CALLS)
def test_a_trainers_optimizer_around_the_wrapper_is_refused_too_A1_A3(call: str, outer: Callable[[Any], Any]) -> None:
    model = Awkward()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.1), model)
    assert refused(optimizer, model, CALLS[call], outer=outer(optimizer)) == []


def test_anybody_else_may_read_the_state() -> None:
    model = Awkward()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = ShardedStateOptimizer(inner, model)
    assert optimizer.state is inner.state
    assert Outer(optimizer).state is inner.state
    assert Asking(optimizer).state is inner.state


def adamw(seed: int = 0, *, steps: int = 0) -> tuple[ShardedStateOptimizer, Awkward]:
    model = Awkward(seed)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125)), model)
    train(optimizer, model, range(steps))
    return optimizer, model


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
def test_torch_save_keeps_what_was_live_J8(steps: int, mmap: bool, tmp_path: Path) -> None:
    optimizer, model = adamw(steps=2)
    expected, its_groups = state(optimizer, model), groups(optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    kept = torch.load(tmp_path / "state.pt", weights_only=False, mmap=mmap)
    train(optimizer, model, range(2, 4))
    for loaded, its_model in (adamw(seed=1, steps=steps), adamw(seed=1, steps=steps)):
        # Twice, with steps between: what is loaded shares no memory with the file's dict either.
        loaded.load_state_dict(kept)
        assert state(loaded, its_model) == expected
        assert groups(loaded) == its_groups
        train(loaded, its_model, range(2, 3))
    optimizer.load_state_dict(kept)
    assert state(optimizer, model) == expected


def test_what_was_loaded_shares_no_memory_with_the_lender_J8() -> None:
    lender, its_model = adamw(steps=2)
    loaded, model = adamw(seed=1)
    loaded.load_state_dict(lender.state_dict())
    expected = state(lender, its_model), state(loaded, model)
    train(loaded, model, range(2, 3))
    assert state(lender, its_model) == expected[0]
    train(lender, its_model, range(3, 5))
    copied, its_copied = adamw(seed=1)
    copied.load_state_dict(saved := copy.deepcopy(loaded.state_dict()))
    train(loaded, model, range(3, 4))
    again, its_again = adamw(seed=1)
    again.load_state_dict(saved)
    assert state(again, its_again) == state(copied, its_copied)


def test_torch_save_of_a_state_dict_of_an_earlier_moment_is_refused_J8(tmp_path: Path) -> None:
    optimizer, model = adamw(steps=2)
    earlier = optimizer.state_dict()
    train(optimizer, model, range(2, 3))
    with pytest.raises(ShardoptError, match="since this state dict was made.*values of two moments would be mixed"):
        torch.save(earlier, tmp_path / "state.pt")
    # A copy that was made too late is no snapshot.
    with pytest.raises(LoadError, match="values of two moments would be mixed"):
        adamw()[0].load_state_dict(copy.deepcopy(earlier))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_save_of_what_was_read_is_refused(tmp_path: Path) -> None:
    dcp.save({"optim": adamw(steps=2)[0]}, checkpoint_id=tmp_path / "saved")
    filled = adamw()[0].state_dict()
    dcp.load({"optim": filled}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(ShardoptError, match=r"read into by a load.* Give it to load_state_dict\(\), and pickle the"):
        torch.save(filled, tmp_path / "state.pt")


def test_half_written_state_is_neither_lent_nor_pickled(tmp_path: Path) -> None:
    optimizer, _ = adamw(steps=2)
    optimizer._poison.set("step", ValueError("half"))
    sentence = "parameters and state may be half updated; load a good checkpoint"
    for loaded in (optimizer, adamw()[0]):
        for lent in (optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())):
            with pytest.raises(LoadError, match=sentence):
                loaded.load_state_dict(lent)
    with pytest.raises(ShardoptError, match=sentence):
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
