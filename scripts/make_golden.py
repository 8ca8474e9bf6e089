"""Writes the frozen checkpoint of the current format version, which later versions must be able to load.

    python scripts/make_golden.py DIRECTORY

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
from tests.support.gather import gathered

RANKS = 2


def main() -> None:
    """Saves on two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="is made; must not exist")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(save, (store.port, str(directory)), nprocs=RANKS)


def save(rank: int, port: int, directory: str) -> None:
    """One rank's part."""
    warnings.simplefilter("error")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    optimizer, model = build(RANKS)
    train(optimizer, model)
    dcp.save({"optim": optimizer}, checkpoint_id=directory)
    expected = gathered(optimizer, model)
    if rank == 0:
        (Path(directory) / "expected.json").write_text(spell(expected))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
