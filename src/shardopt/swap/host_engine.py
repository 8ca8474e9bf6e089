"""The engine for parameters on the host: one call of the C++ kernel a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardopt.swap.engine import Engine, Step, number_of
from shardopt.swap.held import Held, Keeps, hold
from shardopt.swap.host_kernel import adamw_rows, first_touch
from shardopt.swap.table import StepTable

__all__ = ["HostEngine"]


class HostEngine(Engine):
    """Steps parameters on the host, in their memory and that of the state."""

    def __init__(self, keeps: Keeps, *, pin: bool, seed: int, num_threads: int | None) -> None:
        super().__init__(keeps, device=torch.device("cpu"), pin=pin, seed=seed, num_threads=num_threads)

    def hold(self, named: Sequence[tuple[str, Tensor]], amsgrad: Sequence[bool]) -> list[Held]:
        """Makes state whose pages are first touched by the threads that will step them."""
        new = hold(named, amsgrad, self.keeps, self.slabs, first_stream=self.num_streams)
        table = StepTable(new)
        first_touch(table.rows, num_threads=self.num_threads, names=table.names)
        return new

    def run(self, step: Step) -> None:
        """One pass over all parameters that have a gradient."""
        self.table.set_gradients(step.address, step.code, step.which, step.amsgrad)
        rows, names = self.table.chosen(step.has)
        scale = 1.0 / number_of(step.amp["grad_scale"]) if "grad_scale" in step.amp else 1.0
        adamw_rows(
            rows,
            step.hypers,
            seed=self.seed,
            grad_scale=scale * step.factor,
            num_threads=self.num_threads,
            names=names,
        )
