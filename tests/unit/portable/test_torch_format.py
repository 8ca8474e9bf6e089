"""What torch's own functions saved of an unwrapped optimizer is loaded bit for bit, or refused with its reasons."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardopt import LoadError, ShardedStateOptimizer
from shardopt.portable.manifest import ElementwiseEntry, ValueEntry
from shardopt.portable.manifest_reader import read_manifest
from shardopt.portable.reader import read_checkpoint
from tests.support.rules import Awkward, bits, groups, state, train, weights
from tests.support.snapshot import snapshot
from tests.support.tamper import cut_chunks

# DCP says so whenever there is no process group, which is the point of a single-process test.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Build = Callable[[Any], torch.optim.Optimizer]

RULES: dict[str, Build] = {
    "AdamW": torch.optim.AdamW,
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.125)),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "no state": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    # Rows and columns of a matrix: neither has the parameter's shape.
    "Adafactor": lambda params: torch.optim.Adafactor(full(params)),
}
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])


def trained(
    build: Build = torch.optim.AdamW, *, steps: int = 2, seed: int = 0
) -> tuple[torch.optim.Optimizer, Awkward]:
    model = Awkward(seed)
    optimizer = build(two_groups(model))
    train(optimizer, model, range(steps))
    return optimizer, model


def full(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without parameters of no elements, by whose number Adafactor divides."""
    return [{**group, "params": [param for param in group["params"] if param.numel()]} for group in groups]


def two_groups(model: Awkward) -> list[dict[str, Any]]:
    params = [*model.parameters()]
    return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.25}]


def saved_state(optimizer: torch.optim.Optimizer, model: nn.Module, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def wrapped(build: Build = torch.optim.AdamW, *, steps: int = 0) -> tuple[ShardedStateOptimizer, Awkward]:
    inner, model = trained(build, steps=steps, seed=1)
    compute = "dtensor" if isinstance(inner, torch.optim.Adafactor) else "auto"
    return ShardedStateOptimizer(inner, model, compute=compute), model


@FLAT
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
@pytest.mark.parametrize("rule", RULES)
def test_state_and_groups_are_the_same_bits_and_so_are_the_next_steps(
    rule: str, steps: int, flat: bool, tmp_path: Path
) -> None:
    plain, model = trained(RULES[rule])
    dcp.save({"model": model, "optim": saved_state(plain, model, flat=flat)}, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped(RULES[rule], steps=steps)
    its_model.load_state_dict(model.state_dict())
    before = weights(its_model)
    optimizer.prepare_load(tmp_path).commit()
    assert weights(its_model) == before
    assert state(optimizer, its_model) == state(plain, model)
    assert groups(optimizer) == groups(plain)
    for one, params in ((plain, model), (optimizer, its_model)):
        train(one, params, range(2, 5))
    assert weights(its_model) == weights(model)
    assert state(optimizer, its_model) == state(plain, model)


@FLAT
def test_groups_are_matched_by_their_members_names(flat: bool, tmp_path: Path) -> None:
    plain, model = trained(lambda params: torch.optim.Adam(params, betas=(0.5, 0.75), lr=torch.tensor(0.5)))
    plain.param_groups[1]["betas"] = (0.25, 0.125)
    plain.param_groups[1]["initial_lr"] = 3.0
    dcp.save({"optim": saved_state(plain, model, flat=flat)}, checkpoint_id=tmp_path)
    its_model = Awkward(1)
    params = [*its_model.parameters()]
    lr = torch.tensor(1.0)
    inner = torch.optim.Adam([{"params": params[4:], "lr": lr}, {"params": params[:3]}, {"params": params[3:4]}])
    ShardedStateOptimizer(inner, its_model).prepare_load(tmp_path).commit()
    found = [(group["betas"], group.get("initial_lr"), float(group["lr"])) for group in inner.param_groups]
    assert found == [((0.25, 0.125), 3.0, 0.5), ((0.5, 0.75), None, 0.5), ((0.25, 0.125), 3.0, 0.5)]
    assert inner.param_groups[0]["lr"] is lr


@FLAT
@pytest.mark.parametrize("place", ["", "optim", "a.b"])
def test_the_optimizer_is_found_wherever_it_was_saved(place: str, flat: bool, tmp_path: Path) -> None:
    plain, model = trained()
    saved = saved_state(plain, model, flat=flat)
    for name in reversed(place.split(".") if place else []):
        saved = {name: saved}
    dcp.save({**saved, "model": model}, checkpoint_id=tmp_path)
    for prefix in (None, place):
        optimizer, its_model = wrapped()
        optimizer.prepare_load(tmp_path, prefix=prefix).commit()
        assert state(optimizer, its_model) == state(plain, model)
    with pytest.raises(LoadError, match=rf"nothing'.* nor one in torch's format; found \['{place}'\]"):
        optimizer.prepare_load(tmp_path, prefix="nothing")


@FLAT
def test_values_of_groups_keep_their_types(flat: bool, tmp_path: Path) -> None:
    values = {"lr": np.float32(0.1), "count": np.int64(3), "none": None, "text": "x", "on": True, "pair": (1, 2.5)}
    plain, model = trained()
    plain.param_groups[1].update(values)
    dcp.save({"optim": saved_state(plain, model, flat=flat)}, checkpoint_id=tmp_path)
    optimizer, _ = wrapped()
    optimizer.prepare_load(tmp_path).commit()
    found = {key: optimizer.param_groups[1][key] for key in values}
    assert (found, [*map(type, found.values())]) == (values, [*map(type, values.values())])


def test_a_parameter_named_like_torchs_keys_is_no_optimizer(tmp_path: Path) -> None:
    model = nn.ModuleDict({"param_groups": nn.Linear(2, 1)})
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters()), model)
    model["param_groups"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    optimizer.prepare_load(tmp_path).commit()


def test_several_optimizers_need_a_prefix(tmp_path: Path) -> None:
    plain, model = trained()
    own = wrapped(steps=1)[0]
    saved = {"one": saved_state(plain, model, flat=False), "two": saved_state(plain, model, flat=True), "own": own}
    dcp.save(saved, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped()
    with pytest.raises(LoadError, match=r"3 optimizers are saved here, under \['own', 'one', 'two'\]; pass prefix="):
        optimizer.prepare_load(tmp_path)
    optimizer.prepare_load(tmp_path, prefix="two").commit()
    assert state(optimizer, its_model) == state(plain, model)


def test_names_are_canonical(tmp_path: Path) -> None:
    plain, model = trained()
    saved = saved_state(plain, model, flat=False)
    saved["state"] = {f"_orig_mod.{name}": entries for name, entries in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [f"_orig_mod.{name}" for name in group["params"]]
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped()
    optimizer.prepare_load(tmp_path).commit()
    assert state(optimizer, its_model) == state(plain, model)


def test_names_may_be_parts_of_each_other_and_numbers(tmp_path: Path) -> None:
    model = nn.ModuleDict({"0": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "0_0": nn.Linear(2, 1)})
    plain = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    plain.step()
    for flat in (False, True):
        path = tmp_path / str(flat)
        dcp.save({"model": model, "optim": saved_state(plain, model, flat=flat)}, checkpoint_id=path)
        inner = torch.optim.AdamW(model.parameters())
        ShardedStateOptimizer(inner, model).prepare_load(path).commit()
        assert bits([*inner.state.values()]) == bits([*plain.state.values()])


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
        r"shard.*the other shards are in no file",
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


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
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


def test_a_rules_own_dtype_is_kept_when_the_parameters_have_theirs_T8(tmp_path: Path) -> None:
    model = Awkward().bfloat16()
    plain = torch.optim.AdamW(two_groups(model))
    train(plain, model, range(1))
    saved = saved_state(plain, model, flat=False)
    for entries in saved["state"].values():
        entries["exp_avg"] = entries["exp_avg"].float()
    dcp.save({"optim": saved, "model": model}, checkpoint_id=tmp_path)
    other = Awkward(1).bfloat16()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(two_groups(other)), other)
    optimizer.prepare_load(tmp_path).commit()
    assert optimizer.state[other.matrix]["exp_avg"].dtype == torch.float32
    assert optimizer.state[other.matrix]["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.parametrize("rule", ["AdamW", "ASGD", "NAdam"])
def test_scalars_of_a_scalar_parameter_are_told_from_its_state(rule: str, tmp_path: Path) -> None:
    # Where they live may differ: a step counter is on the host, a moment on the parameter's device.
    dcp.save({"optim": saved_state(*trained(RULES[rule]), flat=False)}, checkpoint_id=tmp_path)
    optimizer, _ = wrapped(RULES[rule])
    handles = read_checkpoint(tmp_path, optimizer._inventory.by_fqn)
    entries = {
        name: {key: type(entry) for key, entry in record.entries.items()}
        for name, record in read_manifest(handles["manifest"].contents().numpy().tobytes()).parameters.items()
    }
    assert entries["scalar"] == entries["matrix"]
    assert set(entries["matrix"].values()) == {ElementwiseEntry, ValueEntry}


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


def test_sharded_tensors_of_old_are_read_like_any_other_J6(mesh: DeviceMesh, tmp_path: Path) -> None:
    """As FSDP1 wrote them: the metadata has global shapes, so nothing tells them from DTensors."""

    def old(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.dim() or not tensor.numel():
            return tensor
        shard = Shard.from_tensor_and_offsets(tensor.contiguous(), [0] * tensor.dim(), dist.get_rank())
        return init_from_local_shards([shard], *tensor.shape)

    plain, model = trained()
    saved = saved_state(plain, model, flat=False)
    saved["state"] = {name: {key: old(one) for key, one in own.items()} for name, own in saved["state"].items()}
    assert isinstance(saved["state"]["matrix"]["exp_avg"], ShardedTensor)
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    optimizer, its_model = wrapped()
    optimizer.prepare_load(tmp_path).commit()
    assert state(optimizer, its_model) == state(plain, model)


def test_a_flat_parameter_of_old_is_refused_by_name_J6(tmp_path: Path) -> None:
    saved = {"state": {"_flat_param": {"exp_avg": torch.zeros(9)}}, "param_groups": [{"params": ["_flat_param"]}]}
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    refused(tmp_path, r"nothing in the checkpoint belongs to this optimizer: it has 1 parameter \(_flat_param\)")
