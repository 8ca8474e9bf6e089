"""Jobs that save and load with ``shardopt.save`` and ``shardopt.load``, and break them. Run by the rank pool."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import shardopt
from shardopt.checkpoint.files import Writer
from shardopt.checkpoint.target import Targets
from tests.ranks.refusals import SHAPE, make, train
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import build
from tests.support.ranks import reached, wait_until_reached
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot

LONG_S = 60.0  # no test comes near it, so that who waits for it fails by the job's deadline
SHORT_S = 2.0


class LocalError(Exception):
    """One that cannot be pickled, nor made in another process."""

    def __init__(self, one: object, *, two: object) -> None:
        super().__init__(f"{one} {two}")
        self.lock = threading.Lock()


KINDS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "raises": (lambda: ValueError("on purpose"), "ValueError: on purpose"),
    "unpicklable": (lambda: LocalError("one", two="two"), "LocalError: one two"),
    "interrupted": (KeyboardInterrupt, "KeyboardInterrupt"),
    "checkpoint": (lambda: CheckpointException("of dcp", {}), "CheckpointException"),
}


class Extra:
    """A user's own state: a tensor, and on demand an error or a point at which the rank is stopped or killed."""

    def __init__(self, number: float) -> None:
        self.tensor = torch.full((3,), number)
        self.number = number
        self.saving: Callable[[], None] = lambda: None
        self.loading: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        self.saving()
        return {"tensor": self.tensor, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loading()
        self.number = state["number"]


def parts(seed: int, steps: tuple[int, ...], number: float) -> dict[str, Any]:
    """A training run as a dict for a checkpoint."""
    model = build("fsdp", SHAPE, seed=seed)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    train(optimizer, model, steps)
    return {
        "model": model,
        "optim": optimizer,
        "scheduler": scheduler,
        "extra": Extra(number),
        "step": int(number),
        "nested": {"list": [1, number], "plain": torch.full((2,), number), "deep": {"text": f"{number}"}},
    }


def everything(state: dict[str, Any]) -> dict[str, Any]:
    """All values of it, whole. Collective."""
    values = {**gathered(state["optim"], state["model"]), **gathered_parameters(state["model"])}
    values["scheduler"] = {k: v for k, v in state["scheduler"].state_dict().items() if not k.startswith("_")}
    values["extra"] = state["extra"].state_dict()
    return {**values, "step": state["step"], "nested": state["nested"]}


SAVE = {
    "shardopt": lambda state, path: shardopt.save(state, path),
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path),
}
LOAD = {
    "shardopt": lambda state, path: shardopt.load(state, path),
    "dcp": lambda state, path: dcp.load(state, checkpoint_id=path),
}


def save_all(path: str, how: str, steps: tuple[int, ...], number: float) -> dict[str, Any]:
    state = parts(0, steps, number)
    SAVE[how](state, path)
    return everything(state)


def places(state: dict[str, Any]) -> list[int]:
    """Addresses of live memory that a load must keep."""
    optimizer, model = state["optim"], state["model"]
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), state["extra"].tensor, state["nested"]["plain"]]
    tensors += [value for entries in optimizer.state.values() for value in entries.values()]
    locals_ = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return [number for one, local in zip(tensors, locals_, strict=True) for number in (id(one), local.data_ptr())]


def load_all(path: str, how: str, expected: dict[str, Any], *, warm: bool = True) -> tuple[list[str], bool]:
    """How what was loaded differs from what was saved, and whether all live memory is the same as before."""
    state = parts(7, (5,) if warm else (), 9.0)
    before = places(state)
    LOAD[how](state, path)
    return value_differences(expected, everything(state)), places(state) == before


@contextlib.contextmanager
def broken(point: str, kind: str, state: dict[str, Any], path: str) -> Iterator[None]:
    """On this rank, lets a save or load fail at a point, without changing shardopt where that can be."""
    fail = failing(KINDS[kind][0])
    if point == "collect":
        state["extra"].saving = fail
        yield
        state["extra"].saving = lambda: None
    elif point == "commit":
        state["extra"].loading = fail
        yield
        state["extra"].loading = lambda: None
    elif point == "full disk":
        # As on a full disk, a file cannot grow: Python ignores the signal and raises EFBIG.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    elif point == "finish":
        os.mkdir(os.path.join(path, ".metadata.tmp"))
        yield
        os.rmdir(os.path.join(path, ".metadata.tmp"))
    else:
        owner, method = POINTS[point]
        genuine = getattr(owner, method)
        setattr(owner, method, lambda *_, **__: fail())
        yield
        setattr(owner, method, genuine)


POINTS: dict[str, tuple[Any, str]] = {
    "local plan": (dcp.DefaultSavePlanner, "create_local_plan"),
    "global plan": (dcp.DefaultSavePlanner, "create_global_plan"),
    "write": (Writer, "write_data"),
    "read": (Targets, "read"),
    "open": (dcp.FileSystemReader, "read_metadata"),
}


def failing(make_error: Callable[[], BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise make_error()

    return fail


def caught(operation: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, str, dict[str, Any]]:
    """Type, text, and what a verdict says of what it raises; CheckpointException is a BaseException."""
    try:
        operation(*args, **options)
    except BaseException as error:
        found = {name: getattr(error, name) for name in ("failures", "missing", "problems") if hasattr(error, name)}
        found["cause"] = "" if error.__cause__ is None else f"{type(error.__cause__).__name__}: {error.__cause__}"
        found["operation"] = getattr(error, "operation", "")
        found["traceback"] = "".join(traceback.format_exception(error))
        return type(error).__name__, str(error), found
    return "nothing", "", {}


def works(state: dict[str, Any], path: str) -> None:
    """The group, a step, and a save and load are well after a failure."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    train(state["optim"], state["model"], (8,))
    shardopt.save(state, path, timeout_s=LONG_S)
    fresh = parts(3, (), 0.0)
    shardopt.load(fresh, path, timeout_s=LONG_S)
    assert value_differences(everything(state), everything(fresh)) == []


def fail_save(directory: str, bad: int, point: str, kind: str, expected: dict[str, Any]) -> dict[str, Any]:
    """A save over a good checkpoint that fails on one rank: what it raises here, and what is there afterwards."""
    path = os.path.join(directory, "good")
    state = parts(0, (0, 1, 2), 5.0)
    files = sorted(os.listdir(path))
    before = snapshot(state["optim"], state["model"])
    dist.barrier()
    with broken(point, kind, state, path) if dist.get_rank() == bad else contextlib.nullcontext():
        error = caught(shardopt.save, state, path, timeout_s=LONG_S)
    changes = before.diff(snapshot(state["optim"], state["model"]))
    dist.barrier()
    left = sorted(os.listdir(path))
    old, _ = load_all(path, "shardopt", expected)
    dist.barrier()
    works(state, path)
    return {
        "error": error,
        "changes": changes,
        "new files": sorted(set(left) - set(files)),
        "old": old,
        "gone": sorted(set(files) - set(left)),
    }


def small_values(state: dict[str, Any]) -> str:
    """All of it but model and optimizer, written down."""
    rest = (state[key] for key in ("step", "nested"))
    return repr([*rest, state["scheduler"].state_dict(), state["extra"].tensor, state["extra"].number])


def fail_load(path: str, bad: int, point: str, kind: str) -> dict[str, Any]:
    """A load that fails on one rank: what it raises here, and what it changed."""
    state = parts(7, (5,), 9.0)
    before, rest = snapshot(state["optim"], state["model"]), small_values(state)
    with broken(point, kind, state, path) if dist.get_rank() == bad else contextlib.nullcontext():
        error = caught(shardopt.load, state, path, timeout_s=LONG_S)
    changes = before.diff(snapshot(state["optim"], state["model"]))
    found = {"error": error, "changes": changes + [rest] * (small_values(state) != rest)}
    if point == "commit":
        found["step"] = caught(train, state["optim"], state["model"], (6,))
        found["save"] = caught(shardopt.save, state, path + "-half", timeout_s=LONG_S)
        shardopt.load(state, path, timeout_s=LONG_S)
    works(state, path + "-after")
    return found


def stopped(directory: str, bad: int, point: str) -> dict[str, Any]:
    """A save or load in which a rank is stopped or killed at a point; the others are on time."""
    path = os.path.join(directory, "good")
    loads = point in ("read", "load collect")
    state = parts(7, (5,), 9.0)
    shardopt.load(parts(3, (), 0.0), path, timeout_s=LONG_S)  # the ranks have met, which takes longer
    before = snapshot(state["optim"], state["model"])
    if dist.get_rank() == bad:
        if point in POINTS:
            owner, method = POINTS[point]
            genuine = getattr(owner, method)

            def stop_first(*args: Any, **options: Any) -> Any:
                setattr(owner, method, genuine)
                result = genuine(*args, **options)
                reached("ready")
                return result

            setattr(owner, method, stop_first)
        else:
            state["extra"].saving = lambda: reached("ready")
    operation = shardopt.load if loads else shardopt.save
    error = caught(operation, state, path, timeout_s=SHORT_S)
    changes = before.diff(snapshot(state["optim"], state["model"]))
    return {"error": error, "changes": changes, "state": state}


def stopped_and_back(directory: str, bad: int, point: str) -> dict[str, Any]:
    found = stopped(directory, bad, point)
    reached("given up")
    wait_until_reached("given up", count=dist.get_world_size())
    state = found.pop("state")
    state["extra"].saving = lambda: None
    works(state, os.path.join(directory, "good"))
    return found


def killed(directory: str, bad: int, point: str) -> dict[str, Any]:
    found = stopped(directory, bad, point)
    del found["state"]
    return found


def stopped_in_commit(path: str, bad: int) -> dict[str, Any]:
    """A rank is stopped half way in the commit and comes back; what every rank may do then, and after a good load."""
    state = parts(7, (5,), 9.0)
    shardopt.load(parts(3, (), 0.0), path, timeout_s=LONG_S)
    if dist.get_rank() == bad:
        state["extra"].loading = lambda: reached("ready")
    found = {"error": caught(shardopt.load, state, path, timeout_s=SHORT_S)}
    state["extra"].loading = lambda: None
    reached("given up")
    wait_until_reached("given up", count=dist.get_world_size())
    found["step"] = caught(train, state["optim"], state["model"], (6,))
    shardopt.load(state, path, timeout_s=LONG_S)
    works(state, path + "-after")
    return found
