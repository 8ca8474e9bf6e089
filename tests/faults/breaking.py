"""How an operation is made to fail at a point of the table, on one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate

from shardopt.checkpoint.files import Writer
from shardopt.checkpoint.target import Targets
from shardopt.presentation.inventory import Inventory
from tests.faults.kinds import DIFFERS
from tests.faults.stage import Stage
from tests.support.models import local_tensor

__all__ = ["broken", "replaced"]

_OFFER = sys.modules["shardopt.staging.offer"]
_OPTIMIZER = sys.modules["shardopt.optimizer"]
_PRESENCE = sys.modules["shardopt.staging.presence"]

Act = Callable[[], None]


@contextmanager
def broken(stage: Stage, operation: str, point: str, kind: str, act: Act, *, faulty: bool) -> Iterator[None]:
    """Inside, the operation does ``act`` at the point, or has there what the kind says, on the rank at fault.

    Args:
        stage: this rank's.
        operation: of the table.
        point: of the table.
        kind: of the table.
        act: raises, or lets this process be killed or stopped, and then goes on.
        faulty: whether it is this rank.
    """
    if (operation, point) == ("step", "overflow"):
        stage.optimizer.grad_scale, stage.optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(faulty))
    if (operation, point) == ("step", "half"):
        stage.optimizer.grad_scale, stage.optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    if not faulty:
        yield
        return
    value = (_DIFFERENCES if kind == DIFFERS else _VALUES).get((operation, point))
    if value is not None:
        undo = value(stage)
        yield
        undo()
    elif (operation, point) in _HOOKS:
        handle = _HOOKS[operation, point](stage)(lambda *_: act())
        yield
        handle.remove()
    elif (operation, point) in _SEAMS:
        owner, name, after = _SEAMS[operation, point](stage)
        with replaced(owner, name, act, after=after):
            yield
    else:
        _SLOTS[operation, point](stage, act)
        yield


@contextmanager
def replaced(owner: Any, name: str, act: Act, *, after: bool = False) -> Iterator[None]:
    """Inside, a function of a module, class or object does ``act`` before, or after, what it does."""
    genuine, own = getattr(owner, name), name in vars(owner)

    def replacement(*args: Any, **options: Any) -> Any:
        if not after:
            act()
        result = genuine(*args, **options)
        if after:
            act()
        return result

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, genuine)
        else:
            delattr(owner, name)


class _UsersPath(os.PathLike[str]):
    """Code of the user's that is asked for a path."""

    def __init__(self, path: str, act: Act) -> None:
        self.path = path
        self.act = act

    def __fspath__(self) -> str:
        self.act()
        return self.path


class _BrokenPlan:
    """The last thing of a load to be put in place."""

    def __init__(self, act: Act) -> None:
        self.commit = act


def _between_groups(stage: Stage, act: Act) -> None:
    inner = stage.inner
    genuine = inner._init_group

    def init_group(group: dict[str, Any], *rest: Any) -> Any:
        if group is inner.param_groups[1]:
            del inner._init_group
            act()
        return genuine(group, *rest)

    inner._init_group = init_group


def _closure(stage: Stage, act: Act) -> None:
    stage.closure = act


def _saving(stage: Stage, act: Act) -> None:
    stage.extra.saving = act


def _loading(stage: Stage, act: Act) -> None:
    stage.extra.loading = act


def _path(stage: Stage, act: Act) -> None:
    stage.path, stage.target = _UsersPath(stage.path, act), _UsersPath(stage.target, act)


def _last_of_plan(stage: Stage, act: Act) -> None:
    plan: Any = stage.prepared._plan
    plan.groups.append(_BrokenPlan(act))


def _check_identity(stage: Stage, act: Act) -> None:
    genuine = stage.prepared._check_identity

    def check() -> None:
        act()
        genuine()

    stage.prepared._check_identity = check


# Places at which a user's code is asked, and the attribute of the stage that holds it.
_SLOTS: dict[tuple[str, str], Callable[[Stage, Act], None]] = {
    ("step", "closure"): _closure,
    ("step", "update"): _between_groups,
    ("commit", "check"): _check_identity,
    ("commit", "copy"): _last_of_plan,
    ("save", "path"): _path,
    ("load", "path"): _path,
    ("save", "collect"): _saving,
    ("load", "plan"): _saving,
    ("load", "commit"): _loading,
}

_HOOKS: dict[tuple[str, str], Callable[[Stage], Callable[[Callable[..., None]], Any]]] = {
    ("step", "wrapper's pre-hook"): lambda stage: stage.optimizer.register_step_pre_hook,
    ("step", "inner pre-hook"): lambda stage: stage.inner.register_step_pre_hook,
    ("scaled step", "pre-hook"): lambda stage: stage.inner.register_step_pre_hook,
    ("step", "post-hook"): lambda stage: stage.inner.register_step_post_hook,
    ("state_dict", "pre-hook"): lambda stage: stage.optimizer.register_state_dict_pre_hook,
    ("state_dict", "post-hook"): lambda stage: stage.optimizer.register_state_dict_post_hook,
    ("save", "optimizer"): lambda stage: stage.optimizer.register_state_dict_pre_hook,
    ("load", "optimizer"): lambda stage: stage.optimizer.register_load_state_dict_pre_hook,
    ("dcp.save", "optimizer"): lambda stage: stage.optimizer.register_state_dict_pre_hook,
    ("dcp.load", "optimizer"): lambda stage: stage.optimizer.register_state_dict_pre_hook,
    ("dcp.load", "load hook"): lambda stage: stage.optimizer.register_load_state_dict_pre_hook,
}

# Functions that are replaced: owner, name, and whether the failure comes after the genuine one.
_SEAMS: dict[tuple[str, str], Callable[[Stage], tuple[Any, str, bool]]] = {
    ("construct", "naming"): lambda stage: (stage.model, "named_modules", False),
    ("construct", "check"): lambda _: (Inventory, "check", False),
    ("add_param_group", "naming"): lambda stage: (stage.model, "named_modules", False),
    ("add_param_group", "inner"): lambda stage: (stage.inner, "add_param_group", True),
    ("step", "preflight"): lambda stage: (stage.presentation, "preflight", False),
    ("first step", "presence"): lambda _: (_PRESENCE, "gradients_of", False),
    ("unscale", "gradients"): lambda stage: (stage.presentation, "local_gradients", False),
    ("state_dict", "export"): lambda _: (_OFFER, "describe", False),
    ("prepare_load", "reading"): lambda _: (_OPTIMIZER, "read_checkpoint", False),
    ("prepare_load", "checking"): lambda _: (_OPTIMIZER, "prepare", False),
    ("prepare_load of a dict", "checking"): lambda _: (_OPTIMIZER, "prepare", False),
    ("save", "local plan"): lambda _: (dcp.DefaultSavePlanner, "create_local_plan", False),
    ("save", "plan"): lambda _: (dcp.DefaultSavePlanner, "create_global_plan", False),
    ("save", "write"): lambda _: (Writer, "write_data", False),
    ("save", "finish"): lambda _: (Writer, "finish", False),
    ("load", "open"): lambda _: (dcp.FileSystemReader, "read_metadata", False),
    ("load", "read"): lambda _: (Targets, "read", False),
    ("dcp.save", "write"): lambda _: (dcp.FileSystemWriter, "write_data", False),
    ("dcp.load", "read"): lambda _: (dcp.FileSystemReader, "read_data", False),
}

Undo = Callable[[], None]


def _option(name: str, value: Any) -> Callable[[Stage], Undo]:
    def give(stage: Stage) -> Undo:
        stage.options[name] = value
        return stage.options.clear

    return give


def _attribute(name: str, value: Callable[[Stage], Any]) -> Callable[[Stage], Undo]:
    def give(stage: Stage) -> Undo:
        setattr(stage, name, value(stage))
        return lambda: None

    return give


def _group_value(stage: Stage) -> Undo:
    group = stage.inner.param_groups[0]
    before = group["weight_decay"]
    group["weight_decay"] = before + 1.0
    return lambda: group.update(weight_decay=before)


def _gradient(make: Callable[[DTensor], torch.Tensor]) -> Callable[[Stage], Undo]:
    def give(stage: Stage) -> Undo:
        param: Any = stage.model.up.weight
        param.grad = make(param)
        return lambda: None

    return give


def _half(stage: Stage) -> Undo:
    presentation = stage.presentation
    presentation.local_gradients = lambda: iter([("up.weight", torch.zeros(1, dtype=torch.float16))])
    return lambda: delattr(presentation, "local_gradients")


def _replicated(param: DTensor) -> DTensor:
    """Zeros of the parameter's shape, whole on every rank."""
    return DTensor.from_local(torch.zeros(param.shape), param.device_mesh, [Replicate()], run_check=False)


def _strange_state(inner: torch.optim.Optimizer) -> None:
    param: Any = inner.param_groups[0]["params"][0]
    inner.state[param] = {"exp_avg": _replicated(param)}


def _strange_state_of_new(stage: Stage) -> Undo:
    param: Any = stage.group[0]
    stage.inner.state[param] = {"exp_avg": _replicated(param)}
    return lambda: stage.inner.state.pop(param)


def _odd_key(stage: Stage) -> Undo:
    state: dict[Any, Any] = stage.state
    state[1] = "not a string's"
    return lambda: state.pop(1)


def _unreadable(stage: Stage) -> Undo:
    stage.state["step"] = object()
    return lambda: stage.state.update(step=1)


def _moved(stage: Stage) -> Undo:
    stage.optimizer._note_change()
    return lambda: None


_VALUES: dict[tuple[str, str], Callable[[Stage], Undo]] = {
    ("construct", "options"): _option("vote_timeout", -1),
    ("construct", "state"): _attribute("adapt", lambda _: _strange_state),
    ("add_param_group", "state"): _strange_state_of_new,
    ("step", "gradients"): _gradient(lambda param: torch.zeros(param.shape)),
    ("step", "half"): _half,
    ("unscale", "half"): _half,
    ("prepare_load", "options"): _option("finite", "never"),
    ("prepare_load", "no directory"): _attribute("path", lambda stage: os.path.join(stage.directory, "none")),
    ("commit", "moved"): _moved,
    ("save", "arguments"): _odd_key,
    ("save", "value"): _unreadable,
    ("load", "arguments"): _option("finite", "never"),
    ("load", "dict"): _odd_key,
}


def _without_gradient(stage: Stage) -> Undo:
    stage.model.up.weight.grad = None
    return lambda: None


def _overflown(stage: Stage) -> Undo:
    local_tensor(stage.inner.param_groups[0]["params"][0].grad).view(-1)[:1] = float("inf")
    return lambda: None


_DIFFERENCES: dict[tuple[str, str], Callable[[Stage], Undo]] = {
    ("construct", "options"): _option("consensus", "checkpoint"),
    ("add_param_group", "naming"): _attribute("group", lambda stage: [stage.model.scale]),
    ("step", "gradients"): _gradient(_replicated),
    ("step", "overflow"): lambda _: lambda: None,
    ("scaled step", "overflow"): _overflown,
    ("first step", "missing"): _without_gradient,
    ("state_dict", "pre-hook"): _group_value,
    ("prepare_load", "options"): _option("strict", False),
    ("prepare_load", "another"): _attribute("path", lambda stage: os.path.join(stage.directory, "other")),
    ("save", "arguments"): _attribute("target", lambda stage: os.path.join(stage.directory, "elsewhere")),
    ("save", "optimizer"): _group_value,
    ("load", "arguments"): _option("strict", False),
    ("load", "plan"): _attribute("path", lambda stage: os.path.join(stage.directory, "other")),
}
