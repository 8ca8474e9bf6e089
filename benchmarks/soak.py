"""Trains, saves, kills, breaks and resumes at random, and compares with runs that are neither sharded nor interrupted.

    python benchmarks/soak.py --minutes 20 --seed 1
    python benchmarks/soak.py --seed 1 --episode 17      # that one again
    python benchmarks/soak.py --prove                    # that it can fail

An episode is one training run: a model of odd shapes, an optimizer, and two to four legs. Each leg is a job on a layout
of its own (FSDP on 1 to 4 ranks, HSDP, tensor parallelism) with a presentation of its own; it loads what the last one
saved, trains, saves, goes on, and is lost, or one of its ranks is killed in a step or in a save. On the way operations
fail on one rank: then every rank must get an error that names it, nothing may have changed, and the group must work.

Before a leg loads, what the ranks hold is spoilt. After the load, at each save and at the end all weights, state and
group values are compared, bit for bit, with the oracle: the same model and data with the bare optimizer on one process.
Kernels of fused and bf16 rules round the end of a tensor otherwise than its middle; their oracle updates the pieces
that the ranks had. Quantised state depends on how it is cut: it is compared only from a save to the next load, and only
if both have the same layout and presentation; its weights and group values always are.

Gradients are made up: there is no forward or backward pass, so that no collective of FSDP's own runs. The gradient of
an element is made of the step and of that element's weight, so it is the same on every layout, and an error in one step
is in all later ones. A difference, a hang or an unexpected error prints the command that runs the episode again, and
the exit status is 1.

--prove runs shardopt with eight faults put in, one after the other; each must be found in two minutes, in a way that it
can fail, in episodes that pass without it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the pool of ranks, which the tests have

from benchmarks.harness.results import LOCAL_RESULTS, record
from benchmarks.soaking.driving import Failure, Ran, run_episode
from benchmarks.soaking.episode import Episode, draw
from benchmarks.soaking.proving import prove
from benchmarks.soaking.rules import RULES
from benchmarks.soaking.sabotage import SABOTAGE
from tests.support.ranks import RankPool

# Torch 2.11 keeps each job's process groups alive, with threads.
_JOBS_OF_A_POOL = 40


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="no episode begins after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", type=int, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="the episode to begin with")
    parser.add_argument("--rules", nargs="+", default=[], choices=list(RULES), help="only these optimizers")
    parser.add_argument(
        "--patience", type=float, default=2.0, help="times that ranks wait longer; more on a busy machine"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument(
        "--prove", nargs="*", metavar="FAULT", choices=list(SABOTAGE), help="show that faults in shardopt are found"
    )
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / "soak.jsonl", help="file that gets the results")
    return parser.parse_args()


def numbers(arguments: argparse.Namespace) -> Iterator[int]:
    """Of the episodes to run."""
    if arguments.episode is not None:
        yield arguments.episode
        return
    end, number = time.monotonic() + 60 * arguments.minutes, arguments.first
    while time.monotonic() < end:
        yield number
        number += 1


def replay(arguments: argparse.Namespace, episode: Episode) -> str:
    """The command that runs an episode again."""
    rules = " --rules " + " ".join(f"'{rule}'" for rule in arguments.rules) if arguments.rules else ""
    drawn = f"--seed {episode.seed} --episode {episode.number}"
    return f"python benchmarks/soak.py {drawn} --patience {arguments.patience:g}{rules}"


def soak(pool: RankPool, arguments: argparse.Namespace) -> int:
    """Runs episodes; the exit status."""
    failures: list[str] = []
    total = Ran()
    for number in numbers(arguments):
        episode = draw(arguments.seed, number, rules=tuple(arguments.rules))
        told = {"seed": arguments.seed, "episode": number, "rule": episode.rule, "drawn": str(episode)}
        if pool.num_jobs >= _JOBS_OF_A_POOL:
            pool.renew()
        try:
            ran = run_episode(pool, episode, patience=arguments.patience)
        except Failure as failure:
            print(
                f"\nFAIL {number} ({failure.kind}): {episode}\n{failure}\nreplay: {replay(arguments, episode)}",
                flush=True,
            )
            record(arguments.out, "soak", told, {"failure": failure.kind, "what": str(failure)})
            failures.append(replay(arguments, episode))
            if not arguments.keep_going:
                break
            continue
        print(f"ok {number} in {ran.seconds:.1f} s, {ran.compared} compared: {episode}", flush=True)
        record(arguments.out, "soak", told, asdict(ran))
        for name, value in asdict(ran).items():
            setattr(total, name, getattr(total, name) + value)
        total.episodes += 1
    print(
        f"\n{total.episodes} episodes, {total.legs} legs, {total.faults} errors and {total.kills} kills: "
        f"{total.compared} tensors and values compared; {len(failures)} failures"
    )
    for command in failures:
        print(f"  {command}")
    return 1 if failures or not total.episodes else 0


def main() -> int:
    """Runs what is asked for; the exit status."""
    arguments = read_arguments()
    # OpenMP reads it when torch is loaded: in the workers.
    os.environ["OMP_NUM_THREADS"] = "1"
    with RankPool(4) as pool:
        if arguments.prove is not None:
            return prove(pool, arguments.out, arguments.patience, arguments.prove)
        return soak(pool, arguments)


if __name__ == "__main__":
    sys.exit(main())
