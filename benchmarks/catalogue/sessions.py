"""One model while optimizers train it: unsharded, or under ``fully_shard``, with gradients that are the same bits.

FSDP2 averages the gradients of its ranks, in an order that depends on their number. So that a run on N ranks can be
compared with an unsharded one bit for bit, gradients come another way here: every rank gathers the whole weights, does
what the unsharded run does with them, and keeps its own rows of each gradient. The loop is closed, each gradient
depends on all earlier updates, and what remains to differ is the optimizer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.catalogue.models import TrainedModel, gradients_of_step

__all__ = ["SEED", "Session", "ShardedSession", "Weights", "seed_step"]

SEED = 7000
"""Of the global generators when an optimizer is wrapped."""

Weights = Mapping[str, npt.NDArray[np.float32]]


def seed_step(step: int) -> None:
    """Seeds every global generator for one step, the same on all ranks.

    As ``compute="replicated"`` does it when an optimizer is wrapped under ``SEED``, so that rules that draw random
    numbers can be compared bit for bit; and in a resumed run of the bare optimizer as in one that goes on, since to
    restore generators is not the optimizer's task.
    """
    digest = hashlib.blake2b(f"{SEED} {step}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Session:
    """An unsharded model."""

    def __init__(self, model: TrainedModel) -> None:
        self.model = model

    def weights(self) -> Weights:
        """Copies of the whole weights by name."""
        return {name: param.detach().numpy().copy() for name, param in self.model.named_parameters()}

    def backward(self, step: int, *, create_graph: bool = False) -> Tensor:
        """Sets every ``.grad`` to the step's gradient at the present weights; the loss."""
        loss, gradients = gradients_of_step(self.model, step, create_graph=create_graph)
        for param, gradient in zip(self.model.parameters(), gradients, strict=True):
            param.grad = gradient
        return loss


class ShardedSession(Session):
    """A model that ``fully_shard`` has sharded over all ranks, with an unsharded twin on every rank. Collective."""

    def __init__(self, model: TrainedModel, twin: TrainedModel) -> None:
        super().__init__(model)
        fully_shard(model)
        self._twin = Session(twin)
        self._params: list[DTensor] = []
        self._wholes: list[nn.Parameter] = list(twin.parameters())
        for param in model.parameters():
            assert isinstance(param, DTensor), "fully_shard shards every parameter"
            self._params.append(param)
        world = dist.get_world_size()
        # rows[param][rank]: fully_shard gives out rows as torch.chunk does; ranks past the last chunk hold none.
        self._rows = [_chunks(whole.shape[0], world) for whole in self._wholes]
        volumes = [self._volume(rank) for rank in range(world)]
        self._sent = torch.zeros(max(volumes))
        self._received = [torch.zeros(max(volumes)) for _ in range(world)]

    def weights(self) -> Weights:
        """Collective. Copies of the whole weights by name."""
        self._gather()
        return self._twin.weights()

    def backward(self, step: int, *, create_graph: bool = False) -> Tensor:
        """Collective. Sets every ``.grad`` to this rank's rows of the step's gradient; the loss.

        ``create_graph`` is of no use here: a rank's rows of a gradient are no function of its rows of the weights.
        """
        self._gather()
        loss, gradients = gradients_of_step(self._twin.model, step)
        for param, gradient, rows in zip(self._params, gradients, self._rows, strict=True):
            mine = gradient[rows[dist.get_rank()]].clone()
            param.grad = DTensor.from_local(
                mine, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        return loss

    def _volume(self, rank: int) -> int:
        return sum(whole[rows[rank]].numel() for whole, rows in zip(self._wholes, self._rows, strict=True))

    def _gather(self) -> None:
        # One collective for all parameters: a full_tensor() each would take most of the time on 4 ranks.
        with torch.no_grad():
            mine = torch.cat([param.to_local().detach().reshape(-1) for param in self._params])
            self._sent[: mine.numel()].copy_(mine)
            dist.all_gather(self._received, self._sent)
            for rank, flat in enumerate(self._received):
                start = 0
                for whole, rows in zip(self._wholes, self._rows, strict=True):
                    part = whole[rows[rank]]
                    part.copy_(flat[start : start + part.numel()].view_as(part))
                    start += part.numel()


def _chunks(rows: int, world: int) -> list[slice]:
    sizes = [len(chunk) for chunk in torch.arange(rows).chunk(world)]
    sizes += [0] * (world - len(sizes))
    stops = np.cumsum(sizes).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
