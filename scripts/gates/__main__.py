"""Runs release gates, breaks them on purpose, or writes their page.

    python -m scripts.gates run [--only R01,R02] [--allow-dirty] [--gpus N]
    python -m scripts.gates mutants [--only R01,R02]
    python -m scripts.gates page

Exits with 1 and a short list if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.gates.catalogue import CatalogueError, read
from scripts.gates.gpus import release_on_gpus
from scripts.gates.page import update
from scripts.gates.release import break_gates, release
from scripts.gates.tree import GateError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "mutants", "page"])
    parser.add_argument("--only", default="", help="ids of gates, separated by commas")
    parser.add_argument("--allow-dirty", action="store_true", help="also test a tree that is no commit")
    parser.add_argument("--gpus", type=int, help="run the gates of so many GPUs: 1, 2 or 4")
    options = parser.parse_args(arguments)
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    try:
        catalogue = read()
        if options.what == "page":
            print("\n".join(update(catalogue)) or "no evidence yet")
            return 0
        if options.what == "mutants":
            problems = break_gates(catalogue, only)
        elif options.gpus is not None:
            problems = release_on_gpus(catalogue, options.gpus, only, allow_dirty=options.allow_dirty)
        else:
            problems = release(catalogue, only, allow_dirty=options.allow_dirty)
    except (CatalogueError, GateError) as error:
        problems = str(error).splitlines()
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print("The gates have not passed.", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
