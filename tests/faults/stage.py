"""What a fault happens to: a training run, a twin without faults, a good checkpoint, and every operation on them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import shardopt
from shardopt import ShardedStateOptimizer
from tests.support.models import Shape, SmallModel, build, local_tensor, set_gradients
from tests.support.raw_values import value_differences

__all__ = ["LONG_S", "SHORT_S", "Caught", "Stage", "caught"]

LONG_S = 20.0  # no live cell comes near it: who waits for it has missed a failure
SHORT_S = 2.0
SHAPE = Shape(rows=(1, 3), width=3, hidden=5)  # on 4 ranks the last one holds no element of anything
SPARE = ("kernel", "scale")  # in no group, so that there is something to add
SCALE = 1024.0


class Extra:
    """A user's own state, which does on demand what the cell is about."""

    def __init__(self) -> None:
        self.number = 1.0
        self.saving: Callable[[], None] = _nothing
        self.loading: Callable[[], None] = _nothing

    def state_dict(self) -> dict[str, Any]:
        self.saving()
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loading()
        self.number = state["number"]


def _nothing() -> None:
    return


@dataclass(frozen=True, kw_only=True)
class Caught:
    """What an operation raised on this rank, in plain values.

    Attributes:
        kind: the class's name; empty if it raised nothing.
        text: what it says.
        cause: class and text of its ``__cause__``, or empty.
        operation: of a verdict.
        failures: of a verdict: the ranks that failed.
        missing: of a verdict.
        disagree: of a verdict: the ranks by what they hold.
        seconds: how long the operation took.
    """

    kind: str = ""
    text: str = ""
    cause: str = ""
    operation: str = ""
    failures: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    disagree: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0


def caught(operation: Callable[[], object]) -> Caught:
    """Calls it, and says what it raised; ``CheckpointException`` and ``KeyboardInterrupt`` too."""
    start = time.monotonic()
    try:
        operation()
    except BaseException as error:
        cause = error.__cause__
        return Caught(
            kind=type(error).__name__,
            text=str(error),
            cause="" if cause is None else f"{type(cause).__name__}: {cause}",
            operation=getattr(error, "operation", ""),
            failures=tuple(getattr(error, "failures", ())),
            missing=tuple(getattr(error, "missing", ())),
            disagree=tuple(getattr(error, "disagree", {}).values()),
            seconds=time.monotonic() - start,
        )
    return Caught(seconds=time.monotonic() - start)


@dataclass
class Stage:
    """One rank's part. Collective to make, with a deadline no fault has.

    Attributes:
        directory: shared; holds the checkpoints ``good`` and ``other``.
        timeout_s: of the operations.
        options: further arguments of the operation.
        path: what is loaded.
        target: where a save goes.
        group: parameters to add.
        closure: of the step.
        adapt: what a new optimizer goes through before it is wrapped.
    """

    directory: str
    timeout_s: float
    extra: Extra = field(default_factory=Extra)
    options: dict[str, Any] = field(default_factory=dict)
    closure: Callable[[], Any] | None = None
    adapt: Callable[[torch.optim.Optimizer], None] = lambda _: None
    steps: int = 0

    def __post_init__(self) -> None:
        self.model, self.optimizer = self._pair("every-step")
        self.twin_model, self.twin = self._pair("off")
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "extra": self.extra, "step": 1}
        self.group: list[Tensor] = [self.model.kernel]
        self.target: str | os.PathLike[str] = os.path.join(self.directory, "target")
        self.good = os.path.join(self.directory, "good")
        self.path: str | os.PathLike[str] = self.good
        for _ in range(2):
            self.step_both()
        self.saved = [local_tensor(param).clone() for param in self.twin_model.parameters()]
        # Saves nobody loads are left out where each cell has new processes.
        for name in ("good", "target", *(["other"] if self.timeout_s > SHORT_S else [])):
            shardopt.save(self.state, os.path.join(self.directory, name), timeout_s=LONG_S)
        # The first load of a process takes longer than the deadline of a cell.
        shardopt.load(self.state, self.good, timeout_s=LONG_S)
        self.prepared = self.optimizer.prepare_load(self.good)
        self.filled: dict[str, Any] = {}
        self.set_up("")

    def _pair(self, consensus: str) -> tuple[SmallModel, ShardedStateOptimizer]:
        model = build("fsdp", SHAPE)
        return model, ShardedStateOptimizer(self.adamw(model), model, consensus=consensus, vote_timeout=LONG_S)

    def adamw(self, model: SmallModel) -> torch.optim.AdamW:
        """A new optimizer of two groups, without the spare parameters."""
        params = [param for name, param in model.named_parameters() if name not in SPARE]
        groups = [{"params": params[:2], "lr": torch.tensor(0.25)}, {"params": params[2:], "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=0.125)

    @property
    def inner(self) -> Any:
        """The wrapped optimizer."""
        return self.optimizer.optimizers[0]

    @property
    def presentation(self) -> Any:
        """How it is shown its parameters."""
        return self.optimizer._inventory.parts[0].presentation

    def set_up(self, operation: str) -> None:
        """Collective. What an operation is given, anew."""
        self.options = {}
        self.closure = None
        self.adapt = lambda _: None
        self.extra.saving = self.extra.loading = _nothing
        self.state["step"] = 1
        self.state.pop(1, None)  # type: ignore[call-overload]
        self.path, self.target = self.good, os.path.join(self.directory, "target")
        self.group = [self.model.kernel]
        self.unwrapped = self.adamw(self.model)
        set_gradients(self.model, 100, without=SPARE)
        if operation in ("unscale", "scaled step"):
            self._scale_gradients(SCALE)
            self.scaler = shardopt.GradScaler("cpu", init_scale=SCALE)
            self.scaler.scale(torch.ones(1))
        elif operation == "commit":
            self.prepared = self.optimizer.prepare_load(self.good)
        elif operation == "prepare_load of a dict":
            self.filled = {"optim": self.optimizer.state_dict()}
            dcp.load(self.filled, checkpoint_id=self.good)
        elif operation == "first step":
            inner = self.adamw(self.model)
            self.new = ShardedStateOptimizer(inner, self.model, vote_timeout=LONG_S)

    def _scale_gradients(self, factor: float) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)

    @contextmanager
    def deadlines(self) -> Iterator[None]:
        """The operations' own deadline, in votes of the optimizers."""
        with ExitStack() as stack:
            for optimizer in [self.optimizer, *([self.new] if hasattr(self, "new") else [])]:
                stack.enter_context(optimizer._scope.within(self.timeout_s))
            yield

    def perform(self, operation: str) -> object:
        """Collective. The operation."""
        return getattr(self, "_" + operation.replace(" ", "_").replace(".", "_"))()

    def _construct(self) -> object:
        self.adapt(self.unwrapped)
        return ShardedStateOptimizer(self.unwrapped, self.model, **{"vote_timeout": self.timeout_s, **self.options})

    def _add_param_group(self) -> None:
        self.optimizer.add_param_group({"params": self.group})

    def _step(self) -> None:
        self.optimizer.step(self.closure)

    def _first_step(self) -> None:
        self.new.step()

    def _unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def _scaled_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _state_dict(self) -> object:
        return self.optimizer.state_dict()

    def _prepare_load(self) -> object:
        return self.optimizer.prepare_load(self.path, **self.options)

    def _prepare_load_of_a_dict(self) -> object:
        return self.optimizer.prepare_load(self.filled["optim"])

    def _commit(self) -> None:
        self.prepared.commit()

    def _save(self) -> None:
        shardopt.save(self.state, self.target, timeout_s=self.timeout_s)

    def _load(self) -> object:
        return shardopt.load(self.state, self.path, timeout_s=self.timeout_s, **self.options)

    def _dcp_save(self) -> None:
        dcp.save({"model": self.model, "optim": self.optimizer}, checkpoint_id=os.path.join(self.directory, "dcp"))

    def _dcp_load(self) -> None:
        dcp.load({"model": self.model, "optim": self.optimizer}, checkpoint_id=self.good)

    @property
    def scale(self) -> float:
        """Of the scaler, which is halved where a step was skipped."""
        return self.scaler.get_scale() / SCALE if hasattr(self, "scaler") else 1.0

    @property
    def without(self) -> list[str]:
        """Parameters that had no gradient on any rank in the new optimizer's first step."""
        return (self.new._stepping.presence.without or []) if hasattr(self, "new") else []

    def mend(self) -> None:
        """Collective. Loads the good checkpoint, into the twin too."""
        shardopt.load(self.state, self.good, timeout_s=LONG_S)
        with torch.no_grad():
            for param, saved in zip(self.twin_model.parameters(), self.saved, strict=True):
                local_tensor(param).copy_(saved)
        self.twin.prepare_load(self.good).commit()

    def step_both(self) -> list[str]:
        """Collective. A correct step; how it differs from that of the twin, in any bit of weights and state."""
        self.steps += 1
        for model, optimizer in ((self.model, self.optimizer), (self.twin_model, self.twin)):
            set_gradients(model, self.steps, without=SPARE)
            optimizer.step()
        return self.differences()

    def differences(self) -> list[str]:
        """How weights and state differ from those of the twin, in any bit."""
        return value_differences(_values(self.twin_model, self.twin), _values(self.model, self.optimizer))

    def reduced(self) -> float:
        """Collective. The group still works: the number of its ranks."""
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()


def _values(model: SmallModel, optimizer: ShardedStateOptimizer) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    values: dict[str, Any] = {name: local_tensor(param) for param, name in names.items()}
    for param, entries in optimizer.state.items():
        values |= {f"{names[param]}.{key}": local_tensor(value) for key, value in entries.items()}
    return values
