"""Parameters of every kind that SwapAdamW takes, their gradients, and AdamW in float64 to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["DoubleAdamW", "bits", "gradient", "odd_parameters", "same_bits", "state_of"]

SIZES = (*range(68), 4099, 40_003)


def odd_parameters(dtype: torch.dtype = torch.float32, *, sizes: Sequence[int] = SIZES) -> list[nn.Parameter]:
    """Of all small sizes, past one block of the kernel, and of shapes and memory that a flat view cannot hide."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    views = [
        draw(),
        draw(3, 5),
        draw(50)[7:44],  # starts at an odd offset
        draw(5, 9).t(),
        draw(2, 3, 4, 2, 3, 2),
        draw(2, 3, 4, 2, 3, 2).permute(3, 0, 5, 1, 4, 2),
        draw(6, 12)[:, 2:9],  # rows with gaps between them
        draw(3, 0, 2),
    ]
    return [nn.Parameter(one) for one in (*map(draw, sizes), *views)]


def gradient(param: Tensor, step: int, index: int) -> Tensor | None:
    """Of one parameter in one step: missing now and then, sometimes all zeros, small and large."""
    # Every 13th parameter misses every third step, so counters differ; some are zero for many steps.
    if index % 13 == 5 and step % 3 == 1:
        return None
    generator = torch.Generator().manual_seed(1000 * step + index)
    whole = torch.randn(param.shape, generator=generator) * 10.0 ** ((index % 7) - 3)
    if index % 11 == 3 and 20 < step < 60:
        whole.zero_()
    # As autograd makes them: in the memory order of their parameter.
    return torch.empty_like(param, requires_grad=False).copy_(whole)


@dataclass
class DoubleAdamW:
    """AdamW in float64, one loop over elements' arrays, from the paper: Loshchilov and Hutter, arXiv:1711.05101."""

    params: list[Tensor]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    steps: list[int] = field(default_factory=list)
    moments: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.params = [param.detach().double().clone() for param in self.params]
        self.steps = [0] * len(self.params)
        self.moments = [[torch.zeros_like(param) for _ in range(3)] for param in self.params]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        for index, (param, grad) in enumerate(zip(self.params, gradients, strict=True)):
            if grad is None:
                continue
            self.steps[index] += 1
            step, (beta1, beta2) = self.steps[index], self.betas
            wide = -grad.double() if self.maximize else grad.double()
            avg, square, most = self.moments[index]
            param *= 1 - self.lr * self.weight_decay
            avg.mul_(beta1).add_((1 - beta1) * wide)
            square.mul_(beta2).add_((1 - beta2) * wide * wide)
            torch.maximum(most, square, out=most)
            root = (most if self.amsgrad else square).sqrt() / math.sqrt(1 - beta2**step) + self.eps
            param -= self.lr / (1 - beta1**step) * avg / root


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        for a, b in zip(left, right, strict=True)
    )


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All state tensors, in the order of parameters and names."""
    return [
        optimizer.state[param][name]
        for group in optimizer.param_groups
        for param in group["params"]
        for name in sorted(optimizer.state[param])
    ]
