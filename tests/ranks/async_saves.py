"""Jobs that save in the background with everything live changed before the first byte is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from shardopt import ShardedStateOptimizer
from tests.support.gather import gathered, gathered_parameters
from tests.support.models import Shape, SmallModel, Topology, build, set_gradients
from tests.support.raw_values import value_differences

SHAPE = Shape(rows=(1, 3), width=3, hidden=5)
VOTE_TIMEOUT_S = 30.0
_GATE_S = 60.0

STAGERS: dict[str, Callable[[], AsyncStager | None]] = {
    "torch's default": lambda: None,
    "shared memory": lambda: DefaultStager(_options(use_shared_memory=True)),
    "in a thread": lambda: DefaultStager(_options(use_async_staging=True)),
    "blocking": lambda: BlockingAsyncStager(),
    # A FileSystemWriter is a BlockingAsyncStager; the example in async_save's docstring passes one.
    "the writer": lambda: None,
}


def _options(**chosen: bool) -> StagingOptions:
    off = dict.fromkeys(("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy"), False)
    return StagingOptions(**{**off, **chosen})


class GatedPlanner(dcp.DefaultSavePlanner):
    """Planning, and so all reading and writing, waits until the file ``gate`` exists, in whatever process it happens.

    A gated writer would not do: every FileSystemWriter is a BlockingAsyncStager too, and would stage.
    """

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Called when a save begins."""
        deadline = time.monotonic() + _GATE_S
        while not os.path.exists(self.gate):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.gate} was not opened")
            time.sleep(0.005)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class ReusedStager(DefaultStager):
    """Torch 2.11's own closes what it copies with after every save, and so fails at the next."""

    def __init__(self, config: StagingOptions) -> None:
        super().__init__(config)
        self._state_dict_stager.close = _keep_open


def _keep_open() -> None:
    pass


def make(topology: Topology) -> tuple[ShardedStateOptimizer, SmallModel]:
    """A model, and a wrapped AdamW with a float lr in one group and a tensor lr in the other."""
    model = build(topology, SHAPE)
    params = list(model.parameters())
    groups = [{"params": params[:3], "lr": torch.tensor(0.25)}, {"params": params[3:], "weight_decay": 0.5}]
    return ShardedStateOptimizer(torch.optim.AdamW(groups, lr=0.125), model, vote_timeout=VOTE_TIMEOUT_S), model


def train(optimizer: ShardedStateOptimizer, model: SmallModel, steps: Sequence[int], *, without: Sequence[str]) -> None:
    """Takes these steps."""
    for step in steps:
        set_gradients(model, step, without=without)
        optimizer.step()
        optimizer.zero_grad()


def everything(optimizer: ShardedStateOptimizer, model: nn.Module) -> dict[str, Any]:
    """Collective. State, group values and weights, whole."""
    return {**gathered(optimizer, model), **gathered_parameters(model)}


def change_everything(optimizer: ShardedStateOptimizer, model: nn.Module) -> None:
    """Changes every weight, state tensor and tensor lr in place, and replaces every other group value."""
    with torch.no_grad():
        for param in model.parameters():
            _local(param).add_(1)
            for value in optimizer.state[param].values():
                _local(value).add_(1)
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, Tensor):
                value.add_(1)
            elif key != "params":
                group[key] = ("changed", value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def finish_staging(response: Any) -> Future[Any]:
    """Waits until the caller may change its tensors; the future of the whole save."""
    if isinstance(response, Future):
        return response
    response.staging_completion.result()
    return response.upload_completion


def save_then_change(topology: Topology, root: str, executor: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Saves with each stager, changes everything live before writing begins, and compares the file with the call.

    Returns:
        By stager what a fresh optimizer and model that load the file hold otherwise than was live at the call.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        optimizer, model = make(topology)
        train(optimizer, model, (0, 1), without=("scale",))
        found[name] = _one_save(optimizer, model, topology, os.path.join(root, name), executor, STAGERS[name]())
    return found


def _one_save(
    optimizer: ShardedStateOptimizer,
    model: SmallModel,
    topology: Topology,
    path: str,
    executor: str,
    stager: AsyncStager | None,
) -> list[str]:
    at_call = everything(optimizer, model)
    gate = Path(f"{path}.open")
    response = dcp.async_save(
        {"model": model, "optim": optimizer},
        checkpoint_id=path,
        storage_writer=dcp.FileSystemWriter(path) if path.endswith("the writer") else None,
        planner=GatedPlanner(str(gate)),
        async_checkpointer_type=AsyncCheckpointerType[executor],
        async_stager=stager,
    )
    upload = finish_staging(response)
    change_everything(optimizer, model)
    assert not upload.done(), "the save was over before anything was changed, so this shows nothing"
    if dist.get_rank() == 0:
        gate.touch()
    upload.result()
    changed = everything(optimizer, model)
    assert len(value_differences(at_call, changed)) >= len(at_call), "not everything was changed"
    fresh, fresh_model = make(topology)
    dcp.load({"model": fresh_model, "optim": fresh}, checkpoint_id=path)
    return value_differences(at_call, everything(fresh, fresh_model))


def second_save_with_a_caching_blocking_stager(topology: Topology, root: str) -> None:
    """Two saves of the optimizer alone: with plain tensors in it, this stager wants pinned memory, so a device."""
    optimizer, model = make(topology)
    train(optimizer, model, (0,), without=())
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    for name in ("first", "second"):
        path = os.path.join(root, name)
        dcp.async_save({"optim": optimizer}, checkpoint_id=path, async_stager=stager).result()


def two_saves_with_one_stager(topology: Topology, root: str, executor: str) -> list[list[str]]:
    """Three saves through one DefaultStager, which keeps its copies; state appears and changes in between."""
    stager = ReusedStager(_options(use_shared_memory=executor == "PROCESS"))
    optimizer, model = make(topology)
    found = [_one_save(optimizer, model, topology, os.path.join(root, "none yet"), executor, stager)]
    optimizer, model = make(topology)
    train(optimizer, model, (0,), without=("scale", "kernel"))
    paths = [os.path.join(root, name) for name in ("first", "second")]
    seen = []
    for path in paths:
        seen.append(everything(optimizer, model))
        finish_staging(
            dcp.async_save(
                {"model": model, "optim": optimizer},
                checkpoint_id=path,
                async_checkpointer_type=AsyncCheckpointerType[executor],
                async_stager=stager,
            )
        ).result()
        train(optimizer, model, range(1, 12), without=("scale",))  # from "step 1" to "step 12": a longer manifest
    for path, expected in zip(paths, seen, strict=True):
        fresh, fresh_model = make(topology)
        dcp.load({"model": fresh_model, "optim": fresh}, checkpoint_id=path)
        found.append(value_differences(expected, everything(fresh, fresh_model)))
    assert len(value_differences(seen[0], seen[1])) > sum(key.startswith("state.") for key in seen[0])
    return found


def all_in_a_process(topology: Topology, root: str) -> tuple[dict[str, list[str]], list[list[str]]]:
    """Both kinds of saves with the executor that starts a process, which is started once."""
    return save_then_change(topology, root, "PROCESS", list(STAGERS)), two_saves_with_one_stager(
        topology, root, "PROCESS"
    )
