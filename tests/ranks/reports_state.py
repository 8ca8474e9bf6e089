"""Jobs on public reports of lost or invented optimizer state, and of ranks that differ. Run by the rank pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.fsdp import fully_shard

from shardopt import RankFailureError, ShardedStateOptimizer
from tests.ranks.refusals import SHAPE, make, train
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import Shape, SmallModel, Topology, backward, build, set_gradients
from tests.support.snapshot import snapshot

Values = dict[str, Any]


class FailingWriter(FileSystemWriter):
    """Its disk is full on rank 1, after the data has been written."""

    def write_data(self, *args: Any) -> Any:
        written = super().write_data(*args)
        if dist.get_rank() == 1:
            raise OSError("disk full")
        return written


def save_with_a_failing_writer(path: str) -> tuple[str, str, list[str], Values]:
    """Fails to save a second time; what was raised, what it changed, and the state it goes on with."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, [0])
    before = snapshot(optimizer, model)
    kind, text = "nothing", ""
    try:
        dcp.save({"optim": optimizer}, storage_writer=FailingWriter(f"{path}/failed"))
    except CheckpointException as error:
        kind, text = type(error).__name__, str(error)
    changes = before.diff(snapshot(optimizer, model))
    train(optimizer, model, [1])
    dcp.save({"optim": optimizer}, checkpoint_id=f"{path}/good")
    return kind, text, changes, gathered(optimizer, model)


def interrupted(error: BaseException, where: str, path: str) -> tuple[str, str, str, list[str]]:
    """Raises ``error`` on rank 1 in the middle of an operation.

    Returns:
        What every rank sees: type, text, and type of the cause; and what has changed. Afterwards a save works.
    """
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    train(optimizer, model, [0])
    saved = optimizer.state_dict()

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise error

    operations: dict[str, Callable[[], Any]] = {
        "step": lambda: optimizer.step(fail),
        "state_dict": optimizer.state_dict,
        "load": lambda: optimizer.load_state_dict(saved),
    }
    hooks = {
        "state_dict": optimizer.register_state_dict_pre_hook,
        "load": optimizer.register_load_state_dict_pre_hook,
    }
    handle = hooks[where](fail) if where in hooks else None
    before = snapshot(optimizer, model)
    kind, text, cause = "nothing", "", ""
    try:
        operations[where]()
    except BaseException as raised:
        kind, text, cause = type(raised).__name__, str(raised), type(raised.__cause__).__name__
    if handle is not None:
        handle.remove()
    changes = before.diff(snapshot(optimizer, model), ignore=["hooks.*", "attribute._prepared"])
    train(optimizer, model, [1])
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    return kind, text, cause, changes


def save_steps(path: str, steps: Sequence[int]) -> Values:
    """Trains and saves."""
    model = build("fsdp" if dist.get_world_size() > 1 else "plain", SHAPE)
    optimizer = make(model)
    train(optimizer, model, steps)
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    return gathered(optimizer, model)


def load_good(path: str) -> Values:
    """What a fresh optimizer holds after a stock load."""
    model = build("fsdp" if dist.get_world_size() > 1 else "plain", SHAPE, seed=7)
    optimizer = make(model)
    dcp.load({"optim": optimizer}, checkpoint_id=path)
    return gathered(optimizer, model)


FIRST_HALF = ("up.weight", "up.bias", "heads.0.weight", "kernel")


def second_half(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in model.named_parameters() if name not in FIRST_HALF)


def freeze(model: nn.Module, names: Iterable[str]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name not in names)


def go_on(optimizer: ShardedStateOptimizer, model: SmallModel) -> list[Values]:
    """State now; state and parameters after steps of everything."""
    found = [gathered(optimizer, model)]
    freeze(model, ())
    for step in range(4, 6):
        set_gradients(model, step)
        optimizer.step()
    return [*found, gathered(optimizer, model), gathered_parameters(model)]


def save_half_frozen(path: str) -> list[Values]:
    model = build("fsdp", SHAPE)
    freeze(model, second_half(model))
    optimizer = make(model)
    for step in range(2):
        set_gradients(model, step, without=second_half(model))
        optimizer.step()
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    return go_on(optimizer, model)


def load_half_frozen(path: str, topology: Topology, how: str) -> list[Values]:
    """The other half is frozen, and what was not has state already."""
    model = build(topology, SHAPE, seed=7)
    freeze(model, FIRST_HALF)
    optimizer = make(model)
    set_gradients(model, 9, without=FIRST_HALF)
    optimizer.step()
    optimizer.zero_grad()
    dcp.load({"model": model}, checkpoint_id=path)
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    else:
        optimizer.prepare_load(path).commit()
    return go_on(optimizer, model)


def modality_step(model: SmallModel, optimizer: ShardedStateOptimizer, step: int, seen_by: Sequence[int]) -> None:
    """One real step; only some ranks' batches have what ``heads.1`` is for, elsewhere its gradient is zero."""
    optimizer.zero_grad()
    inputs = torch.randn(4, SHAPE.width, generator=torch.Generator().manual_seed(step))
    outputs = model(inputs)
    seen = dist.get_rank() in seen_by
    # SHAPE has heads of 1 and of 3 rows.
    (outputs[:, :1].square().mean() + outputs[:, 1:].square().mean() * float(seen)).backward()
    optimizer.step()


def save_modality(path: str) -> list[Values]:
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    for step in range(2):
        modality_step(model, optimizer, step, seen_by=[1])
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    found = [gathered(optimizer, model)]
    modality_step(model, optimizer, 2, seen_by=[0])
    return [*found, gathered(optimizer, model), gathered_parameters(model)]


def load_modality(path: str, topology: Topology) -> list[Values]:
    model = build(topology, SHAPE, seed=7)
    optimizer = make(model)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=path)
    found = [gathered(optimizer, model)]
    if topology == "fsdp" and dist.get_world_size() == 2:
        modality_step(model, optimizer, 2, seen_by=[0])
        found += [gathered(optimizer, model), gathered_parameters(model)]
    return found


def save_never_used(path: str) -> list[Values]:
    """``heads.1`` has no gradient on any rank until after the save."""
    model = build("fsdp", SHAPE)
    optimizer = make(model)
    for step in range(2):
        set_gradients(model, step, without=("heads.1.weight", "heads.1.bias"))
        optimizer.step()
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    return go_on(optimizer, model)


def load_never_used(path: str, topology: Topology) -> list[Values]:
    model = build(topology, SHAPE, seed=7)
    optimizer = make(model)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=path)
    return go_on(optimizer, model)


def losses(model: SmallModel, optimizer: ShardedStateOptimizer, steps: Sequence[int]) -> list[bytes]:
    """The bits of the loss at each step."""
    found: list[bytes] = []
    for step in steps:
        optimizer.zero_grad()
        found.append(backward(model, step).numpy().tobytes())
        optimizer.step()
    return found


def save_losses(path: str, topology: Topology) -> list[bytes]:
    """Saves after step 2, and goes on to step 5."""
    model = build(topology, SHAPE)
    optimizer = make(model)
    found = losses(model, optimizer, range(3))
    if path:
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    return found + losses(model, optimizer, range(3, 6))


def load_losses(path: str, topology: Topology, how: str) -> list[bytes]:
    """Steps 3 to 5, after a load with the gradients of a backward pass in place."""
    model = build(topology, SHAPE, seed=7)
    optimizer = make(model)
    backward(model, 8)
    dcp.load({"model": model}, checkpoint_id=path)
    if how == "stock":
        dcp.load({"optim": optimizer}, checkpoint_id=path)
    else:
        optimizer.prepare_load(path).commit()
    return losses(model, optimizer, range(3, 6))


class OneMoment(torch.optim.Optimizer):
    """The update of Lion: the sign of a mean, and one moment under a name that no other class has."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("only_moment", torch.zeros_like(param))
                    param.sub_((moment * 0.75 + param.grad * 0.25).sign() * float(group["lr"]))
                    moment.mul_(0.5).add_(param.grad, alpha=0.5)


class Factored(torch.optim.Optimizer):
    """The state of Adafactor: rows and columns, which have other shapes than the parameter."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() == 2:
                    self.state[param]["row_factor"] = param.grad.square().mean(dim=1)
                    self.state[param]["col_factor"] = param.grad.square().mean(dim=0)


RULES: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one moment": OneMoment,
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.9),
    "factored": Factored,
}


def of_rule(rule: str, model: nn.Module) -> ShardedStateOptimizer:
    compute = "dtensor" if rule in ("one moment", "factored") else "auto"
    return ShardedStateOptimizer(RULES[rule](model.parameters()), model, compute=compute)


def save_rule(rule: str, topology: Topology, path: str) -> list[Values] | str:
    """State at the save, and state and parameters later; or why it cannot be saved."""
    model = build(topology, SHAPE)
    optimizer = of_rule(rule, model)
    train(optimizer, model, range(2))
    try:
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    except RankFailureError as error:
        return str(error)
    return go_on(optimizer, model)


def load_rule(rule: str, topology: Topology, path: str) -> list[Values]:
    model = build(topology, SHAPE, seed=7)
    optimizer = of_rule(rule, model)
    dcp.load({"model": model}, checkpoint_id=path)
    optimizer.prepare_load(path).commit()
    return go_on(optimizer, model)


class Adapted(nn.Module):
    """A linear layer, with two small matrices beside it or without them."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(5, 3)
        if adapters:
            self.lora_a = nn.Linear(5, 2, bias=False)
            self.lora_b = nn.Linear(2, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        raise AssertionError("never run")


def adapted(adapters: bool, trains: str = "") -> tuple[Adapted, ShardedStateOptimizer]:
    """Collective. Sharded; the optimizer has the parameters whose names begin with ``trains``."""
    model = Adapted(adapters)
    if dist.get_world_size() > 1:
        fully_shard(model)
    params = [param for name, param in model.named_parameters() if name.startswith(trains)]
    return model, ShardedStateOptimizer(torch.optim.AdamW(params, lr=0.125), model)


def adapted_steps(model: Adapted, optimizer: ShardedStateOptimizer, count: int) -> None:
    for step in range(count):
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                param.grad = torch.full_like(param, 1.0 + step + index)
        optimizer.step()


def save_adapted(path: str) -> tuple[Values, Values]:
    """A checkpoint of the base alone, and one of the adapters alone."""
    held: list[Values] = []
    for name, adapters, trains in (("base", False, "base"), ("lora", True, "lora")):
        model, optimizer = adapted(adapters, trains)
        adapted_steps(model, optimizer, 2)
        dcp.save({"optim": optimizer}, checkpoint_id=f"{path}/{name}")
        held.append(gathered(optimizer, model))
    return held[0], held[1]


def load_adapted(path: str, which: str, added: bool) -> tuple[dict[str, list[str]], str, Values, Values]:
    """Loads one of them into base and adapters.

    Args:
        path: holds both.
        which: checkpoint to load.
        added: whether the adapters' group was added after wrapping.

    Returns:
        Names in the report, its text, the state after the load, and after a step.
    """
    model, optimizer = adapted(True, "base" if added else "")
    if added:
        optimizer.add_param_group({"params": [model.lora_a.weight, model.lora_b.weight], "lr": 0.25})
    prepared = optimizer.prepare_load(f"{path}/{which}", strict=False)
    prepared.commit()
    names = {key: list(getattr(prepared.report, key)) for key in ("missing", "unused", "fresh")}
    loaded = gathered(optimizer, model)
    adapted_steps(model, optimizer, 1)
    return names, str(prepared.report), loaded, gathered(optimizer, model)


DRIFTING = Shape(rows=(1, 3), width=3, hidden=5, ignored=("scale",))


def gradients_on_one_rank(name: str, seen: int, path: str) -> tuple[str, str, list[str]]:
    """Steps with a gradient of one parameter on rank 1 only, after ``seen`` steps with it everywhere; then saves.

    Returns:
        What the save raised, its text, and what that changed.
    """
    model = build("fsdp", DRIFTING)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model, vote_timeout=30.0)
    for step in range(seen):
        set_gradients(model, step)
        optimizer.step()
    set_gradients(model, seen, without=() if dist.get_rank() == 1 else (name,))
    optimizer.step()
    before = snapshot(optimizer, model)
    kind, text = "nothing", ""
    try:
        dcp.save({"optim": optimizer}, checkpoint_id=path)
    except RankFailureError as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, before.diff(snapshot(optimizer, model))
