"""What training scripts do between steps, with rules that need whole parameters, unsharded and wrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

import shardopt
from shardopt import ShardedStateOptimizer
from tests.ranks import odd_rules
from tests.ranks.trajectories import VOTE_TIMEOUT_S, Held, Track
from tests.ranks.whole_runs import weights_of

Optimizer = torch.optim.Optimizer


@dataclass
class Session:
    """A model, how its optimizers are wrapped, and where files go.

    Attributes:
        track: the model with its gradients.
        compute: of the wrapper.
    """

    track: Track
    compute: str

    def wrap(self, *inner: Optimizer) -> Any:
        """The optimizer itself where nothing is sharded."""
        if not self.track.sharded:
            return inner[0] if len(inner) == 1 else Both(inner)
        return ShardedStateOptimizer(list(inner), self.track.model, compute=self.compute, vote_timeout=VOTE_TIMEOUT_S)

    @property
    def params(self) -> dict[str, torch.nn.Parameter]:
        return self.track.params


class Both:
    """Several bare optimizers as one."""

    def __init__(self, inner: Sequence[Optimizer]) -> None:
        self.inner = inner

    def step(self) -> None:
        for one in self.inner:
            one.step()

    def zero_grad(self) -> None:
        for one in self.inner:
            one.zero_grad()


def rule(name: str) -> Callable[..., Optimizer]:
    return getattr(torch.optim, name, None) or pytorch_optimizer.load_optimizer(name)


def matrices(session: Session) -> list[Tensor]:
    return [p for p in session.params.values() if p.dim() == 2]


def vectors(session: Session) -> list[Tensor]:
    return [p for p in session.params.values() if p.dim() != 2]


def freezing(session: Session) -> None:
    params = session.params
    params["odd.row.weight"].requires_grad_(False)
    optimizer = session.wrap(rule("Adafactor")(list(params.values()), lr=0.1))
    for step in range(6):
        session.track.give_gradients(step)
        for fqn in ("odd.row.weight",) if step < 2 else ("even.column.weight",) if step < 4 else ():
            params[fqn].requires_grad_(False)
            params[fqn].grad = None
        optimizer.step()
        optimizer.zero_grad()
        for param in params.values():
            param.requires_grad_(True)


def adding_a_group(session: Session) -> None:
    params = session.params
    optimizer = session.wrap(rule("Adafactor")([params["even.column.weight"], params["odd.rows1"]], lr=0.1))
    session.track.train(optimizer, [0, 1])
    optimizer.add_param_group({"params": [params["odd.row.weight"], params["odd.rows2"]], "lr": 0.05})
    session.track.train(optimizer, [2, 3])


def two_optimizers(session: Session) -> None:
    optimizer = session.wrap(rule("Muon")(matrices(session), lr=0.02), torch.optim.AdamW(vectors(session), lr=0.1))
    session.track.train(optimizer, range(4))


def accumulating(session: Session) -> None:
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    for step in range(3):
        session.track.give_gradients(2 * step)
        held = {fqn: p.grad.clone() for fqn, p in session.params.items() if p.grad is not None}
        session.track.give_gradients(2 * step + 1)
        for fqn, p in session.params.items():
            if p.grad is not None:
                p.grad += held[fqn]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        # Gradients of zeros are gradients.
        optimizer.step()


def scheduling(session: Session) -> None:
    inner = rule("Adafactor")(list(session.params.values()), lr=0.1)
    optimizer = session.wrap(inner)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ],
        [3],
    )
    for step in range(6):
        session.track.train(optimizer, [step])
        schedule.step()


def tensor_lr(session: Session) -> None:
    optimizer = session.wrap(torch.optim.AdamW(list(session.params.values()), lr=torch.tensor(0.1)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        session.track.train(optimizer, [step])
        schedule.step()


def muon_tensor_lr(session: Session) -> None:
    optimizer = session.wrap(rule("Muon")(matrices(session), lr=torch.tensor(0.1)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        session.track.train(optimizer, [step])
        schedule.step()


def clipping(session: Session) -> None:
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    for step in range(3):
        session.track.give_gradients(step, scale=8.0)
        # The largest of all values is the same bits in any order of summation, so the factor is too.
        shardopt.clip_grad_norm_(list(session.params.values()), 0.5, float("inf"))
        optimizer.step()
        optimizer.zero_grad()


def memory_round_trip(session: Session) -> None:
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    session.track.train(optimizer, [0, 1])
    saved = copy.deepcopy(optimizer.state_dict())
    before = {fqn: local.clone() for fqn, local in session.track.locals.items()}
    session.track.train(optimizer, [8, 9])
    optimizer.load_state_dict(saved)
    for fqn, local in session.track.locals.items():
        local.copy_(before[fqn])
    session.track.train(optimizer, [2, 3])


def warm_start(session: Session) -> None:
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    session.track.train(optimizer, [0, 1])
    saved = copy.deepcopy(optimizer.state_dict())
    again = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.2))
    again.load_state_dict(saved)
    session.track.train(again, [2, 3])


def hooks(session: Session) -> None:
    inner = rule("Adafactor")(list(session.params.values()), lr=0.1)
    optimizer = session.wrap(inner)

    def halve(one: Optimizer, args: Any, kwargs: Any) -> None:
        for group in one.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)

    inner.register_step_pre_hook(halve)
    if session.track.sharded:
        optimizer.register_step_pre_hook(halve)
    else:
        inner.register_step_pre_hook(halve)
    session.track.train(optimizer, range(3))


def replicated_gradients(session: Session) -> None:
    """Gradients that are whole on every rank, beside sharded parameters."""
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    for step in range(3):
        session.track.give_gradients(step)
        for param in session.params.values():
            if isinstance(param.grad, DTensor):
                param.grad = param.grad.redistribute(placements=[Replicate()] * param.device_mesh.ndim)
        optimizer.step()
        optimizer.zero_grad()


def strange_memory(session: Session) -> None:
    """Gradients of plain parameters whose elements are not in order, or all the same one."""
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    for step in range(3):
        session.track.give_gradients(step)
        for fqn in ("odd.row.weight", "odd.rows3"):
            param = session.params[fqn]
            if isinstance(param.grad, DTensor):
                param.grad.to_local().fill_(1.0)
            else:
                param.grad = torch.ones(()).expand(param.shape) if step % 2 else torch.ones(param.shape).t().clone().t()
        optimizer.step()
        optimizer.zero_grad()


def scaling(session: Session) -> None:
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    scaler = shardopt.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(5):
        session.track.give_gradients(step, scale=float(scaler.scale(torch.ones(()))))
        if step == 2:
            grad = session.params["odd.rows2"].grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            assert local is not None
            local.fill_(float("inf"))
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def closures(session: Session) -> None:
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            session.track.give_gradients(step)
            return torch.tensor(1.5)

        assert float(optimizer.step(closure)) == 1.5


def no_gradients(session: Session) -> None:
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    optimizer.step()
    session.track.train(optimizer, [0])
    optimizer.step()
    for fqn in session.params:
        session.track.give_gradients(1)
        for other, param in session.params.items():
            if other != fqn:
                param.grad = None
        optimizer.step()


def changed_groups(session: Session) -> None:
    params = session.params
    optimizer = session.wrap(
        rule("Adafactor")([{"params": [params["odd.row.weight"]], "lr": 0.5}, {"params": vectors(session)}], lr=0.1)
    )
    for step in range(4):
        optimizer.param_groups[step % 2]["lr"] *= 0.5
        optimizer.param_groups[0]["weight_decay"] = 0.25
        session.track.train(optimizer, [step])


def coupled(session: Session) -> None:
    optimizer = session.wrap(rule("prodigy")(list(session.params.values()), lr=1.0))
    session.track.train(optimizer, [0, 1])
    session.track.give_gradients(2)
    session.params["odd.rows1"].grad = None
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    session.track.train(optimizer, [3])
    optimizer.load_state_dict(saved)
    session.track.train(optimizer, [3])


def averaging(session: Session) -> None:
    """Weights are written between steps, as averages of them are."""
    optimizer = session.wrap(rule("Adafactor")(list(session.params.values()), lr=0.1))
    session.track.train(optimizer, [0])
    kept = {fqn: local.clone() for fqn, local in session.track.locals.items()}
    session.track.train(optimizer, [1])
    for fqn, local in session.track.locals.items():
        local.copy_((local + kept[fqn]) / 2)
    session.track.train(optimizer, [2])


def clearing(session: Session) -> None:
    """A loop that relies on the rule's own zero_grad: what is there is added to, as a backward pass does."""
    optimizer = session.wrap(odd_rules.ZeroesGradients(list(session.params.values())))
    for step in range(3):
        left = {fqn: None if p.grad is None else p.grad.clone() for fqn, p in session.params.items()}
        session.track.give_gradients(step)
        for fqn, old in left.items():
            if old is not None:
                session.params[fqn].grad += old
        optimizer.step()


def sharing_between_ranks(session: Session) -> None:
    params = session.params
    optimizer = session.wrap(odd_rules.SharesState([params["odd.row.weight"], params["odd.column.weight"]]))
    session.track.train(optimizer, range(4))


def with_rule(session: Session, name: str) -> None:
    """Six steps of one of the odd rules; one parameter is frozen when it is wrapped, and not any more later."""
    for index, param in enumerate(session.params.values()):
        param.lr_scale = 2.0**-index  # type: ignore[attr-defined]
    session.params["odd.row.weight"].requires_grad_(False)
    optimizer = session.wrap(getattr(odd_rules, name)(list(session.params.values())))
    session.track.train(optimizer, range(2))
    session.params["odd.row.weight"].requires_grad_(True)
    session.track.train(optimizer, range(2, 6))


ODD = (
    "Rule",
    "AssignsData",
    "ReadsAttribute",
    "LooksAtRequiresGrad",
    "KeepsList",
    "SharesState",
    "ChangesForm",
    "CoupledChangesForm",
    "LargeOnes",
    "ReadsPrevious",
    "CountsInAttribute",
)

SCRIPTS: dict[str, Callable[[Session], None]] = {
    **{
        one.__name__: one
        for one in (
            freezing,
            adding_a_group,
            two_optimizers,
            accumulating,
            scheduling,
            tensor_lr,
            muon_tensor_lr,
            clipping,
            memory_round_trip,
            warm_start,
            hooks,
            replicated_gradients,
            strange_memory,
            scaling,
            closures,
            no_gradients,
            changed_groups,
            coupled,
            averaging,
            clearing,
            sharing_between_ranks,
        )
    },
    **{name: partial(with_rule, name=name) for name in ODD},
}


def script_job(topology: str | None, script: str, compute: str) -> Held:
    """This rank's parts of the weights after a script."""
    torch.set_num_threads(1)
    track = Track(topology)
    SCRIPTS[script](Session(track, compute))
    return weights_of(track)
