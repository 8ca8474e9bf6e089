"""The two models every optimizer of the catalogue trains, and their data.

Model ``a`` has a large matrix and a vector of 5,001 elements, which no number of ranks divides; model ``b`` has a
convolution of 3 rows, an embedding, a square projection, a norm and biases. Both end in a pair of low-rank factors,
which one of the rules takes alone. Nothing is drawn from the global generator.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS", "ConvModel", "MatrixModel", "TrainedModel", "gradients_of_step"]

_NUM_BATCHES = 8
_RANK = 8
_SEED = 20250511


class TrainedModel(nn.Module):
    """A model with its own data: 8 batches, of which step ``s`` takes batch ``s % 8``."""

    down: nn.Parameter  # [8, inputs]
    up: nn.Parameter  # [outputs, 8]

    def loss(self, step: int) -> Tensor:
        """The step's loss, 0-d."""
        raise NotImplementedError

    def _factors(self, inputs: int, outputs: int) -> None:
        self.down = nn.Parameter(torch.empty(_RANK, inputs))
        self.up = nn.Parameter(torch.empty(outputs, _RANK))

    def _fill(self, seed: int) -> None:
        """Values of the size that usual initializations give; no element, bias or norm starts at exactly 0 or 1."""
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in self.named_parameters():
                fan_in = param[0].numel() if param.dim() > 1 else 25
                param.copy_(torch.randn(param.shape, generator=source) / fan_in**0.5)
                if name == "norm.weight":
                    param.add_(1.0)


class MatrixModel(TrainedModel):
    """``mix`` is 160 x 192, ``offsets`` has 5,001 elements."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(160, 192))
        self.offsets = nn.Parameter(torch.empty(5001))
        self._factors(160, 12)
        self._fill(seed)
        source = torch.Generator().manual_seed(_SEED)
        self.inputs = torch.randn(_NUM_BATCHES, 16, 192, generator=source)
        self.features = torch.randn(_NUM_BATCHES, 16, 5001, generator=source)
        self.targets = torch.randn(_NUM_BATCHES, 16, 12, generator=source)

    def loss(self, step: int) -> Tensor:
        """Mean squared error."""
        batch = step % _NUM_BATCHES
        hidden = torch.tanh(self.inputs[batch] @ self.mix.T)  # [16, 160]
        shift = self.features[batch] @ self.offsets / 5001**0.5  # [16]
        return functional.mse_loss(hidden @ self.down.T @ self.up.T + shift[:, None], self.targets[batch])


class ConvModel(TrainedModel):
    """A convolution, an embedding, a projection, a norm, a linear layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        # 3 rows: on 4 ranks the last one holds nothing of it.
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.embed = nn.Embedding(20, 24)
        self.q_proj = nn.Linear(24, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self._factors(24, 10)
        self.head = nn.Linear(3, 10)
        self._fill(seed)
        source = torch.Generator().manual_seed(_SEED + 1)
        self.images = torch.randn(_NUM_BATCHES, 16, 3, 6, 6, generator=source)
        self.tokens = torch.randint(20, (_NUM_BATCHES, 16, 5), generator=source)
        self.labels = torch.randint(10, (_NUM_BATCHES, 16), generator=source)

    def loss(self, step: int) -> Tensor:
        """Cross entropy."""
        batch = step % _NUM_BATCHES
        seen = torch.tanh(self.conv(self.images[batch])).mean((2, 3))  # [16, 3]
        read = self.norm(torch.tanh(self.q_proj(self.embed(self.tokens[batch]))).mean(1))  # [16, 24]
        return functional.cross_entropy(read @ self.down.T @ self.up.T + self.head(seen), self.labels[batch])


MODELS: Mapping[str, type[MatrixModel] | type[ConvModel]] = {"a": MatrixModel, "b": ConvModel}


def gradients_of_step(model: TrainedModel, step: int, *, create_graph: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The step's loss and its gradients, in the order of ``model.parameters()``; touches no ``.grad``.

    Args:
        model: not sharded.
        step: which batch.
        create_graph: keep the graph of the gradients, for rules that differentiate them.
    """
    with torch.enable_grad():
        loss = model.loss(step)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
    return loss.detach(), [gradient.contiguous() for gradient in gradients]
