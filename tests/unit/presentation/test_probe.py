"""Whether a rule may run on parts of parameters: found out without a trace, and in doubt denied."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardopt import PresentationError, ShardedStateOptimizer
from shardopt.presentation import choice
from shardopt.presentation.probe import Finding, probe
from tests.support.rules import ELEMENTWISE
from tests.support.snapshot import snapshot


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    return probe(optimizer).why_not


class Rule(torch.optim.Optimizer):
    """A rule by a function of gradient, parameter and state; ``lr`` times what it returns is taken off."""

    def __init__(self, params: Any, update: Any = None, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.update(param.grad, param, self.state[param]), alpha=group["lr"])


class Coupled(Rule):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([grad.norm() for grad in grads]).norm() + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / total, alpha=group["lr"])


def sign(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    state["momentum"] = state.get("momentum", torch.zeros_like(param)).lerp(grad, 0.25)
    return state["momentum"].sign()


def normed(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    return grad / (grad.norm() + 1)


def late(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Looks at the whole tensor at its 12th step."""
    state["step"] = state.get("step", 0) + 1
    return grad * (1 + grad.mean()) if state["step"] == 12 else grad


def unseen(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Looks at the whole tensor, and acts on it where no probe comes to."""
    return grad * 2 if grad.mean() > 1e30 else grad


def hoarding(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Keeps what it does not use."""
    state["norm"] = grad.numel()
    return grad


def listed(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Keeps tensors in a list, where nothing says what they are."""
    state["listed"] = [grad.clone()]
    return grad


def sized(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Treats small tensors otherwise."""
    return grad.sign() if grad.numel() < 200 else grad


def noisy(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    return grad + torch.randn_like(grad)


def by_row(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
    """Element-wise for whoever cuts rows only."""
    return grad if grad.dim() < 2 else grad / (grad.abs().amax(dim=1, keepdim=True) + 1)


def model(*shapes: tuple[int, ...]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes or ((3, 2), (3,))])


@pytest.mark.parametrize("cls", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_torchs_own_element_wise_rules_are_found_to_be_that(cls: Any) -> None:
    assert why_not_elementwise(cls(model().parameters())) is None


@pytest.mark.parametrize(
    ("update", "why"),
    [
        (normed, "with given gradients parts of parameters get other bits than the whole at step 1"),
        (late, "get other bits than the whole at step 12"),
        (unseen, "uses mean, which can mix elements"),
        (sized, "get other bits than the whole"),
        (noisy, "draws random numbers"),
        (listed, "keep a state 'listed' that is no part"),
        (hoarding, "parts of parameters keep a state 'norm' that is no part of the whole one's"),
        (by_row, "get other bits than the whole at step 1"),
        (lambda grad, param, state: grad.reshape(-1)[0], "raise IndexError|get other bits"),
    ],
    ids=["normed", "late", "unseen", "sized", "noisy", "listed", "hoarding", "by row", "first element"],
)
def test_a_rule_that_is_not_is_told_why(update: Any, why: str) -> None:
    found = why_not_elementwise(Rule(model().parameters(), update))
    assert found is not None
    assert any(text in found for text in why.split("|"))


def test_a_rule_that_couples_parameters_is_not() -> None:
    assert "get other bits" in str(why_not_elementwise(Coupled(model().parameters())))


def test_an_element_wise_rule_of_a_users_own_is_wrapped_as_such() -> None:
    params = model()
    optimizer = ShardedStateOptimizer(Rule(params.parameters(), sign), params)
    assert "compute='local' because" in optimizer.explain()
    assert "gives the same bits on parts of tensors as on whole ones" in optimizer.explain()
    with pytest.raises(PresentationError, match=r"is not element-wise: with given gradients parts.*compute='owner'"):
        ShardedStateOptimizer(Rule(params.parameters(), normed), params, compute="local")
    whole = ShardedStateOptimizer(Rule(params.parameters(), normed), params)
    assert "compute='owner' because" in whole.explain()
    assert "not in parts: it is not element-wise: with given gradients parts" in whole.explain()


def test_a_rule_that_cannot_be_tried_is_refused_with_what_it_raises() -> None:
    params = model()
    with pytest.raises(PresentationError, match=r"could not be tried on small parameters \(TypeError: 'NoneType'"):
        ShardedStateOptimizer(Rule(params.parameters()), params)


def test_a_probe_leaves_no_trace() -> None:
    params = model()
    optimizer = Rule(params.parameters(), sign)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    handle = register_optimizer_step_pre_hook(lambda *_: called.append("global"))
    before = snapshot(optimizer, params)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()
    try:
        assert why_not_elementwise(optimizer) is None
        assert why_not_elementwise(Rule(params.parameters(), noisy)) is not None
    finally:
        handle.remove()
    assert before.diff(snapshot(optimizer, params)) == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()) == states[1:]
    assert called == []


def test_a_warm_up_that_begins_with_nothing_does_not_hide_what_a_rule_does() -> None:
    assert why_not_elementwise(Rule(model().parameters(), normed, lr=0.0)) is not None


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (2, 3, 4, 5), (1, 2, 1, 2, 1)], ids=str)
def test_parameters_of_any_number_of_dimensions_are_tried(shape: tuple[int, ...]) -> None:
    assert why_not_elementwise(Rule(model(shape).parameters(), sign)) is None


def test_options_of_each_group_are_tried_on_its_kind_of_parameters() -> None:
    def by_group(flag: bool) -> torch.optim.Optimizer:
        class Grouped(Rule):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                with torch.no_grad():
                    for group in self.param_groups:
                        for param in group["params"]:
                            assert (param.dim() == 2) == group["matrices"]
                            if param.grad is not None:
                                param.sub_(normed(param.grad, param, {}) if flag and group["matrices"] else param.grad)

        first, second = model()
        groups = [{"params": [first], "matrices": True}, {"params": [second], "matrices": False}]
        return Grouped(groups)

    assert why_not_elementwise(by_group(False)) is None
    assert why_not_elementwise(by_group(True)) is not None


def test_entries_of_which_each_element_has_its_own_are_learned() -> None:
    def update(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        state["one"] = torch.ones(1)
        state["count"] = state.get("count", 0) + 1
        return sign(grad, param, state)

    assert probe(Rule(model((), (3,), (3, 2)).parameters(), update)).entries == {"momentum"}


class Asks(torch.optim.SGD):
    """Needs its closure; adds the loss up under a name."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("no closure")
        self.state["loss"] = self.state.get("loss", 0.0) + float(closure())  # type: ignore[index, arg-type, operator]
        return super().step()


def test_a_rule_that_needs_a_closure_is_replicated() -> None:
    found = probe(Asks(model().parameters(), lr=0.1))
    assert found.compute == "replicated"
    assert "calls a closure" in str(found.why_not_owner)


class Averages(torch.optim.SGD):
    """Updates each parameter alone; keeps under a name something of all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.state["elements"] = sum(gradient.numel() for gradient in gradients)  # type: ignore[index, assignment]
        return super().step()


def test_state_under_a_name_that_parts_see_differently_is_replicated() -> None:
    found = probe(Averages(model().parameters(), lr=0.1))
    assert found.compute == "replicated"
    assert "another value of 'elements' in the state of the optimizer" in str(found.why_not_owner)


class Counts(torch.optim.SGD):
    """Counts in each group that has parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["count"] = group.get("count", 0) + 1
        return super().step()


def test_group_values_that_a_rank_without_parameters_does_not_advance_are_seen() -> None:
    found = probe(Counts(model().parameters(), lr=0.1))
    assert found.compute == "replicated"
    assert "another value of 'count' in their groups" in str(found.why_not_owner)


def test_a_finding_is_remembered_for_the_same_options_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def counted(inner: torch.optim.Optimizer) -> Finding:
        calls.append(inner.param_groups[0]["lr"])
        return probe(inner)

    monkeypatch.setattr(choice, "probe", counted)
    for lr in (0.1, 0.1, 0.2):
        params = model()
        ShardedStateOptimizer(Counts(params.parameters(), lr=lr), params)
    assert calls == [0.1, 0.2]


def test_a_rule_that_treats_larger_parameters_otherwise_is_not_element_wise() -> None:
    def halved(grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
        return grad * (0.5 if param.numel() >= 4096 else 1.0)

    found = why_not_elementwise(Rule([nn.Parameter(torch.ones(3, 2))], halved))
    assert found is not None
    assert "for larger parameters" in found
