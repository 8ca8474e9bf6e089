"""Rules that are right unsharded, written in ways that a wrapper may not expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer


class Rule(Optimizer):
    """Each parameter moves against its gradient, scaled to the gradient's norm: whole parameters are needed."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group)

    def direction(self, param: Tensor, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        param.add_(self.direction(param, grad), alpha=-group["lr"])


class AssignsData(Rule):
    """Gives the parameter new memory, as much hand-written code does."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        param.data = param.data - group["lr"] * self.direction(param, grad)


class ReadsAttribute(Rule):
    """Scales by what the user has written on the parameter."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        param.add_(self.direction(param, grad), alpha=-group["lr"] * getattr(param, "lr_scale", 1.0))


class LooksAtRequiresGrad(Rule):
    """Leaves frozen parameters alone."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if param.requires_grad:
            super().update(param, grad, group)


class KeepsList(Rule):
    """Has noted its parameters when it was made."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, lr)
        self.noted = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for param in self.noted:
            if param.grad is not None:
                self.update(param, param.grad, self.param_groups[0])


class SharesState(Rule):
    """Parameters of a group share one tensor, the sum of all norms so far."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            others = [self.state[one] for one in group["params"] if self.state.get(one)]
            state["total"] = others[0]["total"] if others else torch.zeros(1)
        state["total"] += grad.norm()
        param.add_(grad / state["total"], alpha=-group["lr"])


class ChangesForm(Rule):
    """State appears late, grows, changes its dtype and disappears."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        step = state["step"]
        state.setdefault("norms", []).append(grad.norm())
        if step == 2:
            state["late"] = grad.clone()
        if step == 3:
            state["late"] = state["late"].double()
        if step == 5:
            del state["late"]
        late = state["late"].float() if "late" in state else 0
        param.add_(grad / (torch.stack(state["norms"]).sum() + 1) + late, alpha=-group["lr"])


class CoupledChangesForm(ChangesForm):
    """The same, with all parameters coupled."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 1 / (1 + sum(float(grad.norm()) for grad in grads))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad * scale, group)


class ZeroesGradients(Rule):
    """Does its own zero_grad."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step()
        self.zero_grad()


class CountsInAttribute(Rule):
    """Has a counter of its own, and no state."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def direction(self, param: Tensor, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1) / self.count


class LargeOnes(Optimizer):
    """Element-wise, but for tensors of 1024 elements and more, which it scales by their norm; as 8-bit rules do."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm = param.grad.norm() if param.numel() >= 1024 else 1.0
                    param.add_(param.grad / norm, alpha=-group["lr"])


class ReadsPrevious(Rule):
    """Keeps a copy of what the parameter was."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "previous" not in state:
            state["previous"] = param.detach().clone()
        moved = (param - state["previous"]).norm()
        state["previous"].copy_(param)
        param.add_(self.direction(param, grad), alpha=-group["lr"] * (1 + float(moved)))
