"""Writes the frozen checkpoint of the current format version, which later versions must be able to load.

    python scripts/make_golden.py DIRECTORY             # element-wise state: tests/golden/format1
    python scripts/make_golden.py DIRECTORY --kinds     # all other layouts: tests/golden/format1_kinds

Run it once for each format version, on the oldest supported torch, and commit what it wrote to tests/golden/. A frozen
checkpoint is never written anew: that it still loads is the test.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.golden.frozen import build, spell, train
from tests.golden.frozen_kinds import SHAPES, make, told
from tests.support.gather import gathered

RANKS = 2


def main() -> None:
    """Saves on two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="is made; must not exist")
    parser.add_argument("--kinds", action="store_true", help="every layout but the element-wise one")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(save, (store.port, str(directory), arguments.kinds), nprocs=RANKS)


def save(rank: int, port: int, directory: str, kinds: bool) -> None:
    """One rank's part."""
    warnings.simplefilter("error")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    expected = save_kinds(directory) if kinds else {"expected": save_elementwise(directory)}
    if rank == 0:
        for name, text in expected.items():
            (Path(directory) / f"{name}.json").write_text(text)
    dist.destroy_process_group()


def save_elementwise(directory: str) -> str:
    """Saves the first checkpoint; what it holds."""
    optimizer, model = build(RANKS)
    train(optimizer, model)
    dcp.save({"optim": optimizer}, checkpoint_id=directory)
    return spell(gathered(optimizer, model))


def save_kinds(directory: str) -> dict[str, str]:
    """Saves the second; what each optimizer of it holds."""
    made = {key: make(key, filled=True) for key in SHAPES}
    dcp.save({key: optimizer for key, (optimizer, _) in made.items()}, checkpoint_id=directory)
    return {key: told(optimizer, model, key) for key, (optimizer, model) in made.items()}


if __name__ == "__main__":
    main()
