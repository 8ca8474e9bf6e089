"""An optimizer that keeps its momentum in 8 bits, and the codec that makes its state portable.

python examples/own_codec.py        # tries the codec out, as its author would
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import shardopt
from shardopt.testing import check_codec


class Momentum8(torch.optim.Optimizer):
    """SGD with momentum in int8: a scale for each ``block`` elements; fp32 for less than ``smallest`` of them."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, block: int = 64, smallest: int = 128) -> None:
        super().__init__(params, {"lr": lr, "block": block, "smallest": smallest})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; without a closure."""
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    small = param.numel() < group["smallest"]
                    state["momentum"] = torch.zeros_like(param, dtype=torch.float32 if small else torch.int8)
                    if not small:
                        state["scale"] = torch.zeros(-(-param.numel() // group["block"]))
                momentum = state["momentum"]
                if "scale" in state:
                    momentum = dequantised(momentum, state["scale"], group["block"])
                momentum = momentum.mul_(0.9).add_(param.grad)
                param.sub_(momentum, alpha=group["lr"])
                if "scale" in state:
                    codes, scale = quantised(momentum, group["block"])
                    state["momentum"].copy_(codes)
                    state["scale"].copy_(scale)


def quantised(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes in the shape of the values, and a scale for each block."""
    blocks = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % block)).view(-1, block)
    scale = blocks.abs().amax(1) / 127
    codes = (blocks / scale.clamp_min(1e-30)[:, None]).round().to(torch.int8)
    return codes.view(-1)[: values.numel()].view(values.shape), scale


def dequantised(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """fp32."""
    return codes.float() * scale.repeat_interleave(block)[: codes.numel()].view(codes.shape)


# --8<-- [start:codec]
class Momentum8Codec(shardopt.Codec):
    """How ``Momentum8`` keeps its state."""

    name = "momentum8"

    def entries(self, subject: shardopt.Subject) -> tuple[str, ...]:
        return ("momentum",)

    def parts(self, entry: str) -> tuple[str, ...]:
        return "momentum", "scale"

    def read(self, subject: shardopt.Subject, state: Mapping[str, Any], entry: str) -> Any:
        if "scale" not in state:
            return state.get("momentum")
        form = shardopt.Form(block=subject.group["block"], codes=torch.int8)
        return shardopt.Blocks(form, state["momentum"], state["scale"])

    def form(self, subject: shardopt.Subject, entry: str) -> shardopt.Form | torch.dtype:
        if subject.shard.numel() < subject.group["smallest"]:
            return torch.float32
        return shardopt.Form(block=subject.group["block"], codes=torch.int8)

    def quantise(self, values: Tensor, form: shardopt.Form) -> shardopt.Blocks:
        return shardopt.Blocks(form, *quantised(values, form.block))

    def write(self, subject: shardopt.Subject, entry: str, value: Any) -> Mapping[str, Any]:
        if isinstance(value, Tensor):
            return {"momentum": value}
        return {"momentum": value.codes.view(subject.shard.shape), "scale": value.scales.reshape(-1)}


shardopt.register_codec(Momentum8, Momentum8Codec())
# --8<-- [end:codec]


if __name__ == "__main__":
    check_codec(Momentum8Codec(), Momentum8, sizes=[1, 127, 128, 130, 1000])
    print("the codec is right for all sizes that were tried")
