"""Saves and loads among other checkpoints, beside other saves, and with listings that differ. Run by the rank pool."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardopt
from tests.ranks.checkpoint_functions import LONG_S, everything, parts
from tests.support.raw_values import value_differences

STEPS = {"step-1": (0,), "step-2": (0, 1), "step-10": (0, 1, 2)}


def one_of_several(root: str) -> dict[str, list[str]]:
    """Saves three checkpoints, of which newer ones are inside and beside older ones; how each differs once loaded."""
    places = {"step-1": "run", "step-2": os.path.join("run", "step-2"), "step-10": "step-10"}
    expected: dict[str, dict[str, Any]] = {}
    for number, (name, place) in enumerate(places.items()):
        state = parts(0, STEPS[name], float(number))
        shardopt.save(state, os.path.join(root, place), timeout_s=LONG_S)
        expected[name] = everything(state)
    found: dict[str, list[str]] = {}
    for name, place in reversed(places.items()):
        for how, load in LOADS.items():
            state = parts(7, (5,), 9.0)
            load(state, os.path.join(root, place))
            wanted = expected[name]
            if how == "path":
                wanted = {key: value for key, value in wanted.items() if key.startswith(("state.", "group."))}
            values = everything(state)
            found[f"{name}, {how}"] = value_differences(wanted, {key: values[key] for key in wanted})
    return found


LOADS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "shardopt": lambda state, path: shardopt.load(state, path, timeout_s=LONG_S),
    "path": lambda state, path: state["optim"].prepare_load(path).commit(),
}


def shuffled_listings(path: str) -> list[str]:
    """Ranks list the same directory in other orders, and the last one lists nothing; how what is loaded differs."""
    order = random.Random(dist.get_rank())
    is_last = dist.get_rank() == dist.get_world_size() - 1
    genuine = os.listdir, Path.iterdir

    def listed(names: Any) -> list[Any]:
        found = [] if is_last else list(names)
        order.shuffle(found)
        return found

    first, second, other = parts(0, (0,), 3.0), parts(0, (0, 1), 4.0), parts(7, (5,), 9.0)
    os.listdir = lambda *args: listed(genuine[0](*args))
    Path.iterdir = lambda self: iter(listed(genuine[1](self)))
    try:
        shardopt.save(first, path, timeout_s=LONG_S)
        shardopt.save(second, path, timeout_s=LONG_S)
        shardopt.load(other, path, timeout_s=LONG_S)
    finally:
        os.listdir, Path.iterdir = genuine
    return value_differences(everything(second), everything(other))


def beside_async(directory: str, own_groups: bool) -> list[str]:
    """Saves while two asynchronous ones of torch's are in flight; how what is loaded from each of them differs."""
    groups = [dist.new_group() for _ in range(2)] if own_groups else [None]
    state = parts(0, (0, 1), 4.0)
    expected = everything(state)
    futures = [
        dcp.async_save(
            {"model": state["model"], "optim": state["optim"]},
            checkpoint_id=os.path.join(directory, f"async{number}"),
            process_group=group,
        )
        for number, group in enumerate(groups)
    ]
    for name in ("ours", "ours again"):
        shardopt.save(state, os.path.join(directory, name), timeout_s=LONG_S)
    for future in futures:
        future.result()  # pyrefly: ignore[missing-attribute]
    differences: list[str] = []
    for name in sorted(os.listdir(directory)):
        other = parts(7, (), 9.0)
        wanted = other if name.startswith("ours") else {key: other[key] for key in ("model", "optim")}
        shardopt.load(wanted, os.path.join(directory, name), timeout_s=LONG_S)
        found = everything(other)
        keys = [key for key in expected if name.startswith("ours") or "." in key]
        differences += value_differences({key: expected[key] for key in keys}, {key: found[key] for key in keys})
    return differences
