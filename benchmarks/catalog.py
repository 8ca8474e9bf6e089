"""Runs every optimizer of torch.optim and pytorch_optimizer under the wrapper, and writes docs/optimizers.md.

    python benchmarks/catalog.py                # all, and the page
    python benchmarks/catalog.py AdamW Muon     # some, and no page
    python benchmarks/catalog.py --false-local  # only: is what auto calls local equal to the whole, for 200 steps?

Each class trains two models for 30 steps: unsharded, which is the oracle; under fully_shard on 2 ranks in a
ShardedStateOptimizer, with dcp.save after 13, resumed on 2, 4 and 1; and the same without the wrapper, as torch
documents it. Gradients are the oracle's own bits at equal weights, so only the optimizer can make a difference.
What is special about a class is in benchmarks/catalogue/protocols.py. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the pool of ranks, which the tests have

from benchmarks.catalogue.false_local import false_locals
from benchmarks.catalogue.page import markdown, read_results, samples
from benchmarks.catalogue.protocols import find
from benchmarks.catalogue.standing import (
    bare_words,
    bit_equal,
    count,
    resumed_words,
    worst,
    wrapped_words,
)
from benchmarks.catalogue.survey import Entry, survey
from benchmarks.harness.bars import Bar, print_bars
from benchmarks.harness.results import LOCAL_RESULTS, record
from tests.support.ranks import RankPool

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "optimizers.md"
_MOST_SECONDS = 0.5


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes, in any case; all if none is given")
    parser.add_argument("--compute", default="auto", help="presentation to ask the wrapper for")
    parser.add_argument("--skip-bare", action="store_true", help="do not run the bare optimizers on DTensors")
    parser.add_argument("--false-local", action="store_true", help="only look for classes wrongly called local")
    parser.add_argument("--write", type=Path, help=f"page to write; {_PAGE.name} when all classes are run with auto")
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "catalog.jsonl", help="file that gets the results")
    return parser.parse_args()


def run_all(names: Sequence[str], compute: str, *, bare: bool) -> list[Entry]:
    """Runs the classes, one after the other, and prints a line for each."""
    entries: list[Entry] = []
    with RankPool(4) as pool:
        for name in names:
            entry = survey(pool, name, compute, bare=bare)
            entries.append(entry)
            print(_line(entry), flush=True)
    return entries


def _line(entry: Entry) -> str:
    name = entry.name.removeprefix("pytorch_optimizer.")
    if entry.unsharded and not entry.refused:
        return f"{name:26}does not run unsharded: {entry.unsharded[:80]}"
    off = worst(entry)
    cells = [
        ("" if entry.chosen.asked == "auto" else "*") + entry.chosen.compute if entry.chosen else "-",
        f"{entry.chosen.seconds:.2f} s" if entry.chosen else "-",
        "-" if off is None else f"{off:.0e}",
        "bits" if bit_equal(entry) else "-",
        resumed_words(entry),
        bare_words(entry) if entry.bare else "-",
    ]
    widths = (12, 9, 8, 6, 28, 30)
    line = f"{name:26}" + "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    words = wrapped_words(entry)
    problem = next((verdict.detail for verdict in entry.wrapped.values() if verdict.detail), "")
    return f"{line}{entry.seconds:5.1f} s" + (f"\n    {words}: {problem}" if words not in ("ok", "refused") else "")


def bars_of(entries: Sequence[Entry]) -> list[Bar]:
    """Prints the counts and all names behind them; the bars."""
    counts = count(entries)
    print(f"\n{counts.unsharded} run unsharded; by presentation: {dict(counts.by_compute)}")
    print(f"plain FSDP2: {counts.bare_ok} ok, {dict(counts.bare_words)}")
    lists = {
        "do not run unsharded": counts.not_unsharded,
        "refused, as they have to be": counts.refused,
        "refused all the same": counts.refused_too,
        "to be refused, and not": counts.not_refused,
        "not within the bound, or not resumed": counts.failing,
        "owner or replicated, with other bits": counts.inexact,
        "resumed on 2 with other bits": counts.resumed_otherwise,
    }
    for title, members in lists.items():
        if members:
            print(f"{title} ({len(members)}): {', '.join(member.rpartition('.')[2] for member in members)}")
    print()
    zero = {
        "classes not as unsharded within 1e-4": [*counts.failing, *counts.refused_too],
        "owner or replicated with other bits": counts.inexact,
        "resumed on 2 with other bits": counts.resumed_otherwise,
        "to be refused, and not": counts.not_refused,
    }
    bars = [Bar(name=name, value=len(members), limit=0, at_least=False) for name, members in zero.items()]
    times = [entry.chosen.seconds for entry in entries if entry.chosen]
    if times:
        middle = statistics.median(times)
        bars.append(Bar(name="time to wrap, median", value=middle, limit=_MOST_SECONDS, at_least=False, unit=" s"))
    return bars


def look_for_false_locals(names: Sequence[str]) -> int:
    """Prints what is called local and is not; the exit status."""
    num_local, wrong = false_locals(names)
    for line in wrong:
        print(line)
    return print_bars(
        [Bar(name=f"false locals, of {num_local} that auto calls local", value=len(wrong), limit=0, at_least=False)]
    )


def main() -> int:
    """Runs, records, prints, writes; the exit status."""
    arguments = read_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    begin = time.perf_counter()
    names = find(arguments.names)
    if arguments.false_local:
        return look_for_false_locals(names)
    entries = run_all(names, arguments.compute, bare=not arguments.skip_bare)
    config = {"compute": arguments.compute, "pytorch_optimizer": version("pytorch_optimizer")}
    record(arguments.out, "catalog", config, samples(entries))
    everything = not arguments.names and arguments.compute == "auto" and not arguments.skip_bare
    page = arguments.write or (_PAGE if everything else None)
    if page is not None:
        line, recorded = read_results(arguments.out)
        page.write_text(markdown(recorded, line), encoding="utf-8")
    bars = bars_of(entries)
    print(f"{len(entries)} classes in {time.perf_counter() - begin:.0f} s\n")
    return print_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
