"""A checkpoint that does not fit is an error on every rank, says why, and leaves everything as it was."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import refusals
from tests.ranks.refusals import SHAPE, STEPS_SAVED, Attempt
from tests.support.models import Shape
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences
from tests.support.tamper import cut_chunks, rewritten, with_manifest

STATE = "optim.state.up.weight.exp_avg"
TORCHS = "CheckpointException"
EVERY = "LoadError"
SOME = "LoadError or RankFailureError"


@dataclass(frozen=True)
class Case:
    """One checkpoint that must be refused.

    Attributes:
        make: writes it from the directory of good ones: (directory, target, world size).
        stock: what ``dcp.load`` raises, and what its text must match; None: not tried.
        path: the same of ``prepare_load(path)``.
        options: of the optimizer that loads.
    """

    make: Callable[[Path, Path, int], None]
    stock: tuple[str, str] | None
    path: tuple[str, str] | None
    options: dict[str, Any] = field(default_factory=dict)


def truncated(directory: Path, target: Path, world_size: int) -> None:
    shutil.copytree(directory / "good", target)
    for file in target.glob("*.distcp"):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])


def one_truncated(directory: Path, target: Path, world_size: int) -> None:
    shutil.copytree(directory / "good", target)
    file = target / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def empty_directory(directory: Path, target: Path, world_size: int) -> None:
    target.mkdir()


def foreign_file(directory: Path, target: Path, world_size: int) -> None:
    target.write_bytes(b"PK\3\4 not a checkpoint")


def foreign_metadata(directory: Path, target: Path, world_size: int) -> None:
    target.mkdir()
    (target / ".metadata").write_bytes(b"not a pickle")


def copied(name: str) -> Callable[[Path, Path, int], None]:
    return lambda directory, target, world_size: shutil.copytree(directory / name, target) and None


def model_only(directory: Path, target: Path, world_size: int) -> None:
    with rewritten(directory / "good", target) as tensors:
        for key in [key for key in tensors if key.startswith("optim.")]:
            del tensors[key]


def changed(key: str, change: Callable[[torch.Tensor], Any] | None) -> Callable[[Path, Path, int], None]:
    def make(directory: Path, target: Path, world_size: int) -> None:
        with rewritten(directory / "good", target) as tensors:
            if change is None:
                del tensors[key]
            else:
                tensors[key] = change(tensors[key])

    return make


def manifest(change: Callable[[Any], Any]) -> Callable[[Path, Path, int], None]:
    def make(directory: Path, target: Path, world_size: int) -> None:
        with rewritten(directory / "good", target) as tensors:
            with_manifest(tensors, change)

    return make


def set_in(tree: Any, value: Any, *keys: Any) -> Any:
    inner = tree
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return tree


def drop_parameter(tree: Any) -> Any:
    del tree["parameters"]["scale"]
    for group in tree["groups"]:
        group["members"] = [name for name in group["members"] if name != "scale"]
    return tree


def hole(directory: Path, target: Path, world_size: int) -> None:
    cut_chunks(directory / "good", target, STATE, keep=lambda chunks: chunks[:-1])


def small_hole(directory: Path, target: Path, world_size: int) -> None:
    def keep(chunks: list[Any]) -> list[Any]:
        # The first chunk says that it ends one column early.
        first, *others = sorted(chunks, key=lambda chunk: tuple(chunk.offsets))
        first.sizes = torch.Size((first.sizes[0], first.sizes[1] - 1))
        return [first, *others]

    cut_chunks(directory / "good", target, STATE, keep=keep)


def manifest_hole(directory: Path, target: Path, world_size: int) -> None:
    cut_chunks(directory / "good", target, "optim.manifest", keep=lambda chunks: [])


def no_files(directory: Path, target: Path, world_size: int) -> None:
    shutil.copytree(directory / "good", target)
    alone = target.with_name(f"{target.name}.rank{world_size - 1}")
    shutil.copytree(directory / "good", alone)
    for file in alone.glob("*.distcp"):
        file.unlink()


def other_directory(directory: Path, target: Path, world_size: int) -> None:
    shutil.copytree(directory / "good", target)
    shutil.copytree(directory / "later", target.with_name(f"{target.name}.rank1"))


def both(kind: str, pattern: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (kind, pattern), (kind, pattern)


MISSING = r"Missing key in checkpoint state_dict: optim\."

CASES: dict[str, Case] = {
    "truncated": Case(truncated, (TORCHS, "ranks:"), (EVERY, "truncated: reading the checkpoint failed: ")),
    "one truncated": Case(one_truncated, (TORCHS, "ranks:"), (SOME, "one truncated: reading the checkpoint failed: ")),
    "empty directory": Case(
        empty_directory, (TORCHS, r"metadata"), (EVERY, r"reading the checkpoint failed: FileNotFoundError: .*metadata")
    ),
    "foreign file": Case(
        foreign_file,
        (TORCHS, r"Not a directory|metadata is None"),
        (EVERY, r"foreign file: reading the checkpoint failed: NotADir"),
    ),
    "foreign metadata": Case(
        foreign_metadata, (TORCHS, r"metadata"), (EVERY, r"reading the checkpoint failed: UnpicklingError")
    ),
    "without shardopt": Case(
        copied("stock"), (TORCHS, MISSING), (EVERY, r"no optimizer of shardopt is saved here \(no 'manifest' among its")
    ),
    "model only": Case(model_only, (TORCHS, MISSING), (EVERY, r"no optimizer of shardopt is saved here")),
    "smaller model": Case(
        copied("smaller"),
        (TORCHS, MISSING + r"state\.heads\.1"),
        (EVERY, r"heads.1.weight: this optimizer updates it, the checkpoint does not have it"),
    ),
    "larger model": Case(
        copied("larger"),
        *both(EVERY, r"heads.2.weight: the checkpoint has it, this optimizer does not update it"),
    ),
    "wider model": Case(
        copied("wider"),
        *both(EVERY, r"up.weight: saved with shape \(6, 3\), this model has \(5, 3\)"),
    ),
    "missing key": Case(
        changed(STATE, None),
        (TORCHS, MISSING + r"state\.up\.weight\.exp_avg\."),
        (EVERY, r"the manifest names 1 entries that the checkpoint does not have: state\.up\.weight\.exp_avg\."),
    ),
    "missing manifest": Case(
        changed("optim.manifest", None),
        (TORCHS, MISSING + "manifest"),
        (EVERY, r"no optimizer of shardopt is saved here"),
    ),
    "parameter not in manifest": Case(
        manifest(drop_parameter),
        *both(EVERY, r"scale: this optimizer updates it, the checkpoint does not have it"),
    ),
    "wrong shape": Case(
        changed(STATE, lambda one: torch.cat([one, one])),
        *both(EVERY, r"up.weight: state 'exp_avg' was saved with shape \(10, 3\), this model has \(5, 3\)"),
    ),
    "wrong dims": Case(
        changed(STATE, lambda one: one.reshape(-1)),
        *both(EVERY, r"up.weight: state 'exp_avg' was saved with shape \(15,\), this model has \(5, 3\)"),
    ),
    "wrong dtype": Case(
        changed(STATE, lambda one: one.double()),
        *both(SOME, r"up.weight: state 'exp_avg' is stored as float64, and the manifest says float32"),
    ),
    "wrong dtype in manifest": Case(
        manifest(lambda tree: set_in(tree, "bfloat16", "parameters", "up.weight", "entries", "exp_avg", "dtype")),
        *both(SOME, r"up.weight: state 'exp_avg' is stored as float32, and the manifest says bfloat16"),
    ),
    "narrow model": Case(
        copied("bfloat16"),
        *both(EVERY, r"up.weight: state 'exp_avg' was saved as bfloat16, this optimizer keeps float32"),
    ),
    "pickled": Case(
        changed(STATE, lambda one: [1.0]),
        (EVERY, r"up.weight: state 'exp_avg' is not stored as a tensor but as a pickled list"),
        (EVERY, r"1 entries are not stored as tensors but pickled: state.up.weight.exp_avg\. They were not written by"),
    ),
    "wrong class": Case(
        manifest(lambda tree: set_in(tree, "torch.optim.adam.Adam", "optimizers", 0, "class")),
        *both(
            EVERY,
            r"\(scale, kernel, up.weight, .*\) were saved by torch.optim.adam.Adam; this optimizer is torch.*W",
        ),
    ),
    "amsgrad not wanted": Case(
        copied("amsgrad"),
        (EVERY, r"up.weight: state 'max_exp_avg_sq' is in the checkpoint, but .* prepare_load\(path\)"),
        None,
    ),
    "amsgrad not saved": Case(copied("good"), (TORCHS, MISSING + r"state\..*max_exp_avg_sq"), None, {"amsgrad": True}),
    "hole": Case(
        hole,
        *both(SOME, r"up.weight: state 'exp_avg': the box at \(\d, 0\) of size \(\d, 3\) was not delivered"),
    ),
    "small hole": Case(
        small_hole,
        *both(SOME, r"up.weight: state 'exp_avg': the box at \(0, 2\) of size \(\d, 1\) was not delivered"),
    ),
    "manifest hole": Case(
        manifest_hole,
        *both(EVERY, r"manifest: the bytes from 0 to \d+ were not delivered"),
    ),
    "damaged manifest": Case(manifest(lambda tree: b"{" * 500), *both(EVERY, r"the manifest is not JSON \(")),
    "manifest of wrong dtype": Case(
        changed("optim.manifest", lambda one: one.float()),
        *both(EVERY, r"manifest: saved as torch.float32, expected bytes \(uint8\)"),
    ),
    "manifest of two dims": Case(
        changed("optim.manifest", lambda one: one[:100].reshape(10, 10)),
        *both(EVERY, r"manifest: saved with shape \(10, 10\), expected one dim of bytes"),
    ),
    "newer format": Case(
        manifest(lambda tree: set_in(tree, 2, "format")),
        *both(EVERY, r"the checkpoint has format 2, written by shardopt .*; this shardopt reads format 1: install"),
    ),
    "no files on the last rank": Case(
        no_files, (TORCHS, r"No such file or directory"), (SOME, r"reading the checkpoint failed: FileNotFoundError")
    ),
    "another checkpoint on rank 1": Case(
        other_directory,
        *both(
            "RankFailureError",
            r"prepare_load: ranks disagree: they read different checkpoints, .*alike are ranks? 0(, 2-3)? / rank 1\.",
        ),
    ),
}

SAVED: dict[str, tuple[Shape, dict[str, Any], tuple[int, ...]]] = {
    "good": (SHAPE, {}, STEPS_SAVED),
    "later": (SHAPE, {}, (*STEPS_SAVED, 2)),
    "amsgrad": (SHAPE, {"amsgrad": True}, STEPS_SAVED),
    "smaller": (Shape(rows=(1,), width=3, hidden=5), {}, STEPS_SAVED),
    "larger": (Shape(rows=(1, 3, 2), width=3, hidden=5), {}, STEPS_SAVED),
    "wider": (Shape(rows=(1, 3), width=3, hidden=6), {}, STEPS_SAVED),
    "bfloat16": (Shape(rows=(1, 3), width=3, hidden=5, dtype=torch.bfloat16), {}, STEPS_SAVED),
}

Results = dict[str, list[list[Attempt]]]


@pytest.fixture(scope="module", params=[2, 4])
def saved(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """World size, directory of checkpoints, whole states of the good ones."""
    directory = tmp_path_factory.mktemp(f"world{request.param}")
    save = refusals.save
    states = {name: ranks.run(request.param, save, str(directory / name), *how)[0] for name, how in SAVED.items()}
    ranks.run(request.param, refusals.save_without_shardopt, str(directory / "stock"))
    return request.param, directory, states


@pytest.fixture(scope="module")
def results(saved: Any, ranks: RankPool) -> Results:
    """Attempts by case, a list per rank. One job for all cases."""
    world_size, directory, states = saved
    for name, case in CASES.items():
        case.make(directory, directory / name, world_size)
    asked = [(name, case.options, ways(case)) for name, case in CASES.items()]
    per_rank = ranks.run(world_size, refusals.refuse_all, str(directory), asked, states["good"], deadline_s=300.0)
    return {name: [[one for one in rank if one.case == name] for rank in per_rank] for name in CASES}


def ways(case: Case) -> tuple[str, ...]:
    return tuple(how for how in ("stock", "path") if getattr(case, how) is not None)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_lifecycle_1f_refused_on_every_rank_and_nothing_changed_T3(name: str, results: Results) -> None:
    case, per_rank = CASES[name], results[name]
    for how in ways(case):
        kind, pattern = getattr(case, how)
        for warm in (False, True):
            tries = [one for rank in per_rank for one in rank if one.how == how and one.warm == warm]
            assert len(tries) == len(per_rank)
            assert [one.changes for one in tries] == [[] for _ in tries]
            kinds = {one.error_type for one in tries}
            assert kinds <= set(kind.split(" or ")), [one.error for one in tries]
            assert kind.split(" or ")[0] in kinds
            # Every rank's text says it: the failing ones in full, the others through the vote.
            for one in tries:
                assert re.search(pattern, one.error), one.error
            if kind == SOME:
                check_blame(tries)


def check_blame(tries: list[Attempt]) -> None:
    """Ranks without a problem of their own name those that have one."""
    failing = [rank for rank, one in enumerate(tries) if one.error_type == "LoadError"]
    for one in tries:
        if one.error_type == "RankFailureError":
            said = re.search(r"prepare_load failed on ranks? ([\d, -]+):", one.error)
            assert said, one.error
            assert expanded(said[1]) == failing


def expanded(text: str) -> list[int]:
    pairs = [[*map(int, part.split("-"))] for part in text.split(", ")]
    return [rank for pair in pairs for rank in range(pair[0], pair[-1] + 1)]


@pytest.mark.parametrize(("name", "wanted"), [("amsgrad", False), ("good", True)])
def test_a_path_asks_for_what_the_checkpoint_has(name: str, wanted: bool, saved: Any, ranks: RankPool) -> None:
    world_size, directory, states = saved
    for state in ranks.run(world_size, refusals.load_good, str(directory / name), {"amsgrad": wanted}, "path"):
        assert value_differences(states[name], state) == []


def test_the_cases_are_refused_for_what_was_done_to_them(saved: Any, ranks: RankPool, tmp_path: Path) -> None:
    world_size, directory, states = saved
    with rewritten(directory / "good", tmp_path / "same") as tensors:
        with_manifest(tensors, lambda tree: tree)
    for how in ("stock", "path"):
        for state in ranks.run(world_size, refusals.load_good, str(tmp_path / "same"), {}, how):
            assert value_differences(states["good"], state) == []
