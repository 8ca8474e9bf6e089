"""What does not fit of what torch's own functions saved is refused with its reasons, and nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardopt import LoadError, ShardedStateOptimizer
from tests.support.rules import ELEMENTWISE, Awkward, train
from tests.support.snapshot import snapshot
from tests.support.tamper import cut_chunks
from tests.unit.portable.torch_checkpoints import saved_state, trained, two_groups, wrapped

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def entry(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved["state"][name].update({key: value})


def rename(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"][0] = "other"
    saved["state"]["other"] = saved["state"].pop("matrix")


def positions(saved: dict[str, Any]) -> None:
    for group in saved["param_groups"]:
        group["params"] = [*range(len(group["params"]))]


class Marker:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


NESTED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "entry lost": (
        lambda saved: saved["state"]["matrix"].pop("exp_avg"),
        r"matrix: the checkpoint has its state \['exp_avg_sq', 'step'\] but not \['exp_avg'\], which .* columns of",
    ),
    "renamed": (
        rename,
        r"matrix: this optimizer updates it, the checkpoint does not have it.*\n.*other: the checkpoint",
    ),
    "state of nobody": (
        lambda saved: saved["state"].update(ghost={"step": torch.tensor(1.0)}),
        r"optim\.state\.ghost\.step: no parameter of the saved groups has this state",
    ),
    "saved twice": (
        lambda saved: saved["param_groups"][1]["params"].append("_orig_mod.matrix"),
        r"matrix: saved twice, as 'matrix' and '_orig_mod\.matrix'",
    ),
    "positions": (
        positions,
        r"param_groups\.0\.params: got \[0, 1, 2\], expected parameter names.*\n.*groups\.1\.params",
    ),
    "a shard": (
        entry("matrix", "exp_avg", torch.zeros(3, 3)),
        r"matrix: state 'exp_avg' was saved with shape \(3, 3\), the parameter has \(5, 3\)\. It looks like one rank's "
        r"shard.*the other shards are in no file.*has grown since, fresh=\['matrix'\] starts it anew",
    ),
    "a shard of one row": (
        lambda saved: saved["state"]["matrix"].update(exp_avg=torch.zeros(1, 3), exp_avg_sq=torch.zeros(1, 3)),
        r"'exp_avg' was .* looks like one rank's shard.*\n.*'exp_avg_sq' was .* looks like one rank's shard",
    ),
    "too large": (
        entry("matrix", "exp_avg", torch.zeros(9, 3)),
        r"matrix: state 'exp_avg' was saved with shape \(9, 3\), the parameter has \(5, 3\)\.$",
    ),
    "taken apart": (
        entry("matrix", "exp_avg", {"deep": torch.zeros(5, 3)}),
        r"matrix: state 'exp_avg\.deep' is a value that DCP has taken apart",
    ),
    "group taken apart": (
        lambda saved: saved["param_groups"][0].update(betas=[torch.tensor(0.5), torch.tensor(0.5)]),
        r"optim\.param_groups\.0\.betas\.0 is a value that DCP has taken apart",
    ),
    "object": (
        entry("matrix", "step", Path("x")),
        r"optim\.state\.matrix\.step is a pickle that is not read \(Unpickl",
    ),
    "pickled tensor": (
        entry("matrix", "step", (torch.zeros(2), 1)),
        r"matrix: state 'step' is a pickle with tensors in it; nothing says how they are sharded",
    ),
}


@pytest.mark.parametrize("case", NESTED)
def test_what_does_not_fit_is_named_and_changes_nothing(case: str, tmp_path: Path) -> None:
    plain, model = trained()
    saved = saved_state(plain, model, flat=False)
    change, problem = NESTED[case]
    change(saved)
    dcp.save({"model": model, "optim": saved}, checkpoint_id=tmp_path)
    refused(tmp_path, problem)


def refused(path: Path, problem: str) -> LoadError:
    for steps in (0, 1):
        optimizer, model = wrapped(steps=steps)
        model.give_gradients(steps)
        before = snapshot(optimizer, model)
        with pytest.raises(LoadError, match=problem) as caught:
            optimizer.prepare_load(path)
        assert before.diff(snapshot(optimizer, model)) == []
    return caught.value


@pytest.mark.parametrize(
    ("lost", "problem"),
    [
        ("matrix.exp_avg_sq", r"matrix: the checkpoint has its state \['exp_avg', 'step'\] but not \['exp_avg_sq'\]"),
        ("param_groups.matrix.betas", r"group 0: its parameters were saved with different 'betas': .*matrix"),
        ("param_groups.matrix.", r"optim\.state\.matrix\.\w+: no parameter of the saved groups has this state"),
        (".matrix.", r"matrix: this optimizer updates it, the checkpoint does not have it"),
    ],
    ids=["entry", "group value", "group", "parameter"],
)
def test_a_flattened_checkpoint_that_lacks_a_key_says_which_A9(lost: str, problem: str, tmp_path: Path) -> None:
    plain, model = trained()
    saved = {key: value for key, value in saved_state(plain, model, flat=True).items() if lost not in key}
    dcp.save({"model": model, "optim": saved}, checkpoint_id=tmp_path)
    refused(tmp_path, problem)


def test_every_problem_is_listed(tmp_path: Path) -> None:
    plain, model = trained()
    saved = saved_state(plain, model, flat=False)
    saved["state"]["matrix"]["exp_avg"] = torch.zeros(3, 3)
    saved["state"]["vector"].pop("exp_avg")
    saved["state"]["scalar"]["step"] = Path("x")
    dcp.save({"model": model, "optim": saved}, checkpoint_id=tmp_path)
    problems = refused(tmp_path, "cannot be loaded:").problems
    assert [problem.split()[0] for problem in problems] == ["vector:", "matrix:", "optim.state.scalar.step"]


def test_a_pickle_is_never_run_S2(tmp_path: Path) -> None:
    plain, model = trained()
    ran = tmp_path / "ran"
    for where in ("group", "members", "state"):
        saved = saved_state(plain, model, flat=False)
        target = saved["state"]["matrix"] if where == "state" else saved["param_groups"][0]
        target["params" if where == "members" else "extra"] = Marker(ran)
        dcp.save({"optim": saved}, checkpoint_id=tmp_path / where)
        assert not ran.exists()
        refused(tmp_path / where, r"is a pickle that is not read \(UnpicklingError")
        assert not ran.exists()


def test_a_model_of_another_shape_is_told_from_a_shard(tmp_path: Path) -> None:
    class Wider(Awkward):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.zeros(4, 3))

    model = Wider()
    plain = torch.optim.AdamW(model.parameters())
    train(plain, model, range(1))
    dcp.save({"model": model, "optim": saved_state(plain, model, flat=False)}, checkpoint_id=tmp_path)
    refused(tmp_path, r"matrix: saved with shape \(4, 3\), this model has \(5, 3\)")


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
def test_state_of_another_parameter_dtype_is_not_converted_in_silence_T8(
    steps: int, with_model: bool, tmp_path: Path
) -> None:
    plain, model = trained()
    saved = {"optim": saved_state(plain, model, flat=False)}
    dcp.save({**saved, "model": model} if with_model else saved, checkpoint_id=tmp_path)
    narrow = Awkward().bfloat16()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(two_groups(narrow)), narrow)
    train(optimizer, narrow, range(steps))
    with pytest.raises(LoadError, match="matrix: state 'exp_avg' was saved as float32, this optimizer keeps bfloat16"):
        optimizer.prepare_load(tmp_path)


def test_a_sharded_parameter_takes_no_whole_state(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = nn.Linear(3, 5)
    plain = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    plain.step()
    saved = saved_state(plain, model, flat=False)
    saved["state"]["weight"].update(exp_avg=torch.zeros(7), exp_avg_sq=torch.zeros(5, 1))
    saved["state"]["bias"].update(exp_avg=torch.zeros(3))
    dcp.save({"model": model, "optim": saved}, checkpoint_id=tmp_path)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(fully_shard(model, mesh=mesh).parameters()), model)
    with pytest.raises(LoadError) as caught:
        optimizer.prepare_load(tmp_path)
    first, *others = caught.value.problems
    where = "weight: state 'exp_avg' was saved with shape (7,), the parameter has (5, 3)"
    assert first == f"{where}, and nothing says how such a tensor is sharded."
    assert [problem.split(" was ")[0] for problem in others] == ["weight: state 'exp_avg_sq'", "bias: state 'exp_avg'"]
    assert all("It looks like one rank's shard" in problem for problem in others)


@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_an_incomplete_tensor_is_named(key: str, tmp_path: Path) -> None:
    dcp.save({"optim": saved_state(*trained(), flat=False)}, checkpoint_id=tmp_path / "whole")
    cut_chunks(tmp_path / "whole", tmp_path / "cut", f"optim.state.matrix.{key}", keep=lambda chunks: [])
    refused(tmp_path / "cut", rf"matrix.{{,9}}{key}.*(is incomplete|was not delivered)")


def foreign_cases(path: Path) -> Mapping[str, tuple[Callable[[], Any], str]]:
    plain, model = trained()

    def torch_saved() -> None:
        torch.save(plain.state_dict(), path)

    def safetensors() -> None:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"x")

    def unfinished() -> None:
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"x")

    def something() -> None:
        path.mkdir()
        (path / "notes.txt").write_bytes(b"x")

    return {
        "torch.save": (torch_saved, r"a foreign format: a single file, such as torch\.save writes"),
        "safetensors": (safetensors, r"a foreign format: a directory of safetensors"),
        "unfinished": (unfinished, r"data files and no \.metadata: its save did not finish"),
        "something": (something, r"no checkpoint of dcp\.save, which has a \.metadata; it holds \['notes\.txt'\]"),
        "model only": (
            lambda: dcp.save({"model": model, "step": 3}, checkpoint_id=path),
            r"no optimizer of shardopt is saved here .*no 'param_groups'\)\. Its keys begin with model, step\.",
        ),
        "by position": (
            lambda: dcp.save({"optim": plain.state_dict()}, checkpoint_id=path),
            r"got \[0, 1, 2\], expected parameter names",
        ),
    }


@pytest.mark.parametrize("case", ["torch.save", "safetensors", "unfinished", "something", "model only", "by position"])
def test_a_foreign_format_is_called_one(case: str, tmp_path: Path) -> None:
    make, problem = foreign_cases(tmp_path / "saved")[case]
    make()
    refused(tmp_path / "saved", problem)


def test_a_flat_parameter_of_old_is_refused_by_name_J6(tmp_path: Path) -> None:
    saved = {"state": {"_flat_param": {"exp_avg": torch.zeros(9)}}, "param_groups": [{"params": ["_flat_param"]}]}
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    refused(tmp_path, r"nothing in the checkpoint belongs to this optimizer: it has 1 parameter \(_flat_param\)")


@pytest.mark.parametrize("steps", [0, 2], ids=["no state", "state"])
@pytest.mark.parametrize("saved_class", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_another_class_is_told_by_its_options_and_its_state(saved_class: Any, steps: int, tmp_path: Path) -> None:
    plain, model = trained(saved_class, steps=steps)
    dcp.save({"optim": saved_state(plain, model, flat=False)}, checkpoint_id=tmp_path)
    taken: list[str] = []
    others: list[str] = []
    for live_class in ELEMENTWISE.values():
        optimizer, _ = wrapped(live_class)
        try:
            optimizer.prepare_load(tmp_path)
            taken.append(live_class.__name__)
        except LoadError as error:
            others.append(str(error))
    assert all("were saved by torch.optim" in text for text in others)
    assert taken == [saved_class.__name__]


def test_a_step_that_every_parameter_has_lost_is_missed(tmp_path: Path) -> None:
    plain, model = trained()
    saved = saved_state(plain, model, flat=False)
    for entries in saved["state"].values():
        del entries["step"]
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    refused(tmp_path, r"matrix: the checkpoint has state \['exp_avg', 'exp_avg_sq'\] of it, but not \['step'\]")
