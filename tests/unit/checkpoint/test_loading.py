"""What ``shardopt.load`` puts in place, refuses and reports, in one process."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardopt
from shardopt import LoadError, ShardedStateOptimizer
from tests.support.raw_values import value_differences
from tests.support.snapshot import snapshot
from tests.support.tamper import cut_chunks, rewritten


class Net(nn.Module):
    def __init__(self, *, head: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, head)
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
        self.to(dtype)


def parts(*, head: int = 2, steps: int = 1, dtype: torch.dtype = torch.float32, value: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(int(value))
    model = Net(head=head, dtype=dtype)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=value / 8), model)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        optimizer.step()
    return {"model": model, "optim": optimizer, "step": int(value), "nested": {"tensor": torch.full((2,), value)}}


def values(state: dict[str, Any]) -> dict[str, Any]:
    optimizer, model = state["optim"], state["model"]
    found = dict(copy.deepcopy(model.state_dict()))
    for name, param in model.named_parameters():
        found.update({f"{name}/{key}": value.clone() for key, value in optimizer.state.get(param, {}).items()})
    return {**found, "lr": optimizer.param_groups[0]["lr"], "step": state["step"], "nested": dict(state["nested"])}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    state = parts(value=3.0)
    shardopt.save(state, tmp_path / "saved")
    return tmp_path / "saved", values(state)


def refused(state: dict[str, Any], path: Path, **options: Any) -> LoadError:
    """The error of a load that changes nothing."""
    before = snapshot(state["optim"], state["model"])
    rest = copy.deepcopy({key: value for key, value in state.items() if key not in ("optim", "model")})
    with pytest.raises(LoadError) as error:
        shardopt.load(state, path, **options)
    assert before.diff(snapshot(state["optim"], state["model"])) == []
    assert value_differences(rest, {key: state[key] for key in rest}) == []
    return error.value


@pytest.mark.parametrize("steps", [0, 2])
def test_everything_comes_back_in_place(steps: int, saved: tuple[Path, dict[str, Any]]) -> None:
    path, expected = saved
    state = parts(steps=steps)
    tensor, weight = state["nested"]["tensor"], state["model"].body.weight
    reports = shardopt.load(state, path)
    assert value_differences(expected, values(state)) == []
    assert state["nested"]["tensor"] is tensor
    assert state["model"].body.weight is weight
    assert list(reports) == list(state)
    assert reports["step"].restored == ["step"]
    assert {"model.body.weight", "model.mask"} < set(reports["model"].restored)
    assert "state.body.weight.exp_avg" in reports["optim"].restored


def test_a_part_of_a_checkpoint_can_be_loaded(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts()
    optimizer = state["optim"]
    before = {key: value.clone() for key, value in optimizer.state[state["model"].body.weight].items()}
    shardopt.load({"model": state["model"]}, saved[0])
    assert torch.equal(state["model"].body.weight, saved[1]["body.weight"])
    assert value_differences(before, optimizer.state[state["model"].body.weight]) == []


def test_the_problems_of_all_parts_are_in_one_error(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts(head=5)
    state["nested"] = {"tensor": torch.zeros(2, dtype=torch.int32), "more": 1}
    state["step"] = torch.zeros(())
    error = refused(state, saved[0])
    problems = "\n".join(error.problems)
    assert "model.head.weight: saved with shape (2, 4), here it has (5, 4)." in problems
    assert "model.head.bias: saved with shape (2,), here it has (5,)." in problems
    assert "optim: head.weight: saved with shape (2, 4), this model has (5, 4)." in problems
    assert "nested.tensor: saved as torch.float32, here it is torch.int32" in problems
    assert "nested: the checkpoint does not have nested.more; strict=False keeps what is there." in problems
    assert "step: saved as a pickled value, here it is a Tensor." in problems
    assert len(error.problems) == 7
    assert str(error).startswith(f"{saved[0]} cannot be loaded (7 problems); nothing was changed:")
    assert all(problem in str(error) for problem in error.problems)


def test_more_problems_than_fit_are_counted(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts()
    state["nested"] = {str(number): torch.zeros(1) for number in range(30)}
    state["nested"] |= {"tensor": torch.zeros(2)}
    assert "nested.* (30: nested.0, nested.1, nested.2, ...)" in str(refused(state, saved[0]))


def test_keys_that_only_the_checkpoint_has_are_refused_unless_told(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts()
    state["model"].head = nn.Identity()
    state["optim"] = ShardedStateOptimizer(torch.optim.AdamW(state["model"].parameters()), state["model"])
    problems = "\n".join(refused(state, saved[0]).problems)
    assert "model: the checkpoint has model.head.weight, model.head.bias, which are not here; strict=False" in problems
    reports = shardopt.load(state, saved[0], strict=False)
    assert reports["model"].unused == ["model.head.weight", "model.head.bias"]
    assert reports["optim"].unused == ["head.bias", "head.weight"]


def test_a_new_head_keeps_its_values_when_it_is_fresh(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts(head=5)
    head = state["model"].head.weight.clone()
    reports = shardopt.load(state, saved[0], fresh=["head.*"])
    assert torch.equal(state["model"].head.weight, head)
    assert state["model"].head.weight not in state["optim"].state
    assert torch.equal(state["model"].body.weight, saved[1]["body.weight"])
    assert reports["model"].fresh == ["model.head.weight", "model.head.bias"]
    assert reports["model"].notes[0] == (
        "model.head.weight: saved with shape (2, 4), here it has (5, 4). It keeps its values."
    )


def test_fresh_state_of_parameters_that_fit_leaves_their_values_loaded(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts()
    shardopt.load(state, saved[0], fresh=["*"])
    assert torch.equal(state["model"].head.weight, saved[1]["head.weight"])
    assert not state["optim"].state


def test_a_pattern_that_matches_nothing_is_refused(saved: tuple[Path, dict[str, Any]]) -> None:
    assert refused(parts(), saved[0], fresh=["tail.*"]).problems == ("fresh=['tail.*'] matches nothing in the dict.",)


def test_the_options_of_prepare_load_reach_the_optimizer(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts()
    shardopt.load(state, saved[0], hyperparameters={"lr": 0.75})
    assert state["optim"].param_groups[0]["lr"] == 0.75


def test_another_dtype_is_converted_only_when_told(saved: tuple[Path, dict[str, Any]]) -> None:
    state = parts(dtype=torch.bfloat16)
    problems = "\n".join(refused(state, saved[0]).problems)
    assert "model.body.weight: saved as torch.float32, here it is torch.bfloat16; dtype='live'" in problems
    shardopt.load(state, saved[0], dtype="live")
    assert torch.equal(state["model"].body.weight, saved[1]["body.weight"].bfloat16())


def test_infinities_of_models_are_theirs_and_of_state_are_refused_H21(tmp_path: Path) -> None:
    state = parts()
    state["optim"].state[state["model"].body.weight]["exp_avg"][0, 0] = float("nan")
    shardopt.save(state, tmp_path)
    (problem,) = refused(parts(), tmp_path).problems
    assert problem.startswith("optim: body.weight: state 'exp_avg'")
    shardopt.load(parts(), tmp_path, finite="report")


def cut(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:300])


def lose_data(path: Path) -> None:
    for file in path.glob("*.distcp"):
        file.unlink()


def lose_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut, "model: reading its tensors failed .*damaged or missing"),
        (lose_data, "model: reading its tensors failed .*No such file or directory: .*distcp"),
        (lose_metadata, "reading .metadata failed: FileNotFoundError: .* its save did not finish"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(
    damage: Callable[[Path], None], text: str, saved: tuple[Path, dict[str, Any]]
) -> None:
    damage(saved[0])
    error = refused(parts(), saved[0])
    assert any(re.search(text, problem) for problem in error.problems), error.problems


def test_damage_is_reported_for_model_and_optimizer(saved: tuple[Path, dict[str, Any]]) -> None:
    lose_data(saved[0])
    starts = sorted({problem.partition(":")[0] for problem in refused(parts(), saved[0]).problems})
    assert starts == ["model", "nested", "optim", "step"]


def test_a_chunk_that_the_metadata_does_not_list_is_noticed(tmp_path: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    cut_chunks(saved[0], tmp_path / "cut", "model.body.weight", keep=lambda chunks: [])
    (problem,) = refused(parts(), tmp_path / "cut").problems
    assert problem == "model.body.weight: some of its elements are not in the checkpoint, or not as its metadata says."


def test_what_a_pickle_would_run_is_not_run_S2(tmp_path: Path) -> None:
    state = {"nested": {"path": Path("x"), "number": 1}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises(LoadError, match=r"nested.path: is a pickle that is not read \(UnpicklingError"):
        shardopt.load(state, tmp_path)
    assert state == {"nested": {"path": Path("x"), "number": 1}}


def test_random_states_and_numpy_values_are_read(tmp_path: Path) -> None:
    state = {"rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}}
    state["rng"]["scalar"] = np.float64(0.5)
    shardopt.save(state, tmp_path)
    loaded: dict[str, Any] = {"rng": {"torch": torch.zeros_like(state["rng"]["torch"])}}
    loaded["rng"] |= {"numpy": None, "python": None, "scalar": 0}
    shardopt.load(loaded, tmp_path)
    assert value_differences(state, loaded) == []


class Frozen:
    """A user's own state in dicts that cannot be written to."""

    def state_dict(self) -> dict[str, Any]:
        return {"inside": MappingProxyType({"number": 1})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("must not be called")


@pytest.mark.parametrize(
    ("live", "text"),
    [
        (torch.zeros(1).expand(2), "cannot be written to: its elements share memory"),
        (torch.zeros(2, device="meta"), "on the meta device"),
        (torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), "a Own is read by dcp.load only"),
    ],
)
def test_tensors_that_cannot_be_filled_are_refused(live: torch.Tensor, text: str, saved: tuple[Path, Any]) -> None:
    with pytest.raises(LoadError, match=text):
        shardopt.load({"nested": {"tensor": live}}, saved[0])


def test_containers_that_cannot_be_written_to_are_refused(tmp_path: Path) -> None:
    shardopt.save({"own": Frozen()}, tmp_path)
    with pytest.raises(LoadError, match="own.inside.number: what holds it cannot be written to"):
        shardopt.load({"own": Frozen()}, tmp_path)
    with pytest.raises(TypeError, match="must be a dict"):
        shardopt.load(MappingProxyType({"own": 1}), tmp_path)  # pyrefly: ignore


def test_the_state_dict_of_an_optimizer_in_place_of_itself_is_refused(saved: tuple[Path, Any]) -> None:
    with pytest.raises(LoadError, match="give the optimizer itself"):
        shardopt.load({"optim": parts()["optim"].state_dict()}, saved[0])


def test_keys_that_are_not_strings_come_back_where_they_were(tmp_path: Path) -> None:
    shardopt.save({"nested": {0: {"a": 1}, "list": [torch.ones(1), 2]}}, tmp_path)
    state: dict[str, Any] = {"nested": {0: {"a": 5}, "list": [torch.zeros(1), 6]}}
    shardopt.load(state, tmp_path)
    assert state == {"nested": {0: {"a": 1}, "list": [torch.ones(1), 2]}}


def test_two_optimizers_are_loaded_or_none(tmp_path: Path) -> None:
    def two() -> dict[str, Any]:
        model = Net()
        first = ShardedStateOptimizer(torch.optim.AdamW(model.body.parameters()), model)
        second = ShardedStateOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.5, momentum=0.5), model)
        return {"model": model, "first": first, "second": second}

    state = two()
    for param in state["model"].parameters():
        param.grad = torch.ones_like(param)
    state["first"].step()
    state["second"].step()
    shardopt.save(state, tmp_path / "saved")
    with rewritten(tmp_path / "saved", tmp_path / "bad") as tensors:
        tensors["second.state.head.weight.momentum_buffer"] = torch.zeros(7)
    other = two()
    first = snapshot(other["first"], other["model"])
    with pytest.raises(LoadError, match="second: head.weight"):
        shardopt.load(other, tmp_path / "bad")
    assert first.diff(snapshot(other["first"], other["model"])) == []
    called: list[str] = []
    for name in ("first", "second"):
        other[name].register_load_state_dict_pre_hook(lambda one, _, name=name: called.append(f"pre {name}"))
        other[name].register_load_state_dict_post_hook(
            lambda one, name=name: called.append(f"post {name} {len(other['second'].state)}")
        )
    shardopt.load(other, tmp_path / "saved", fresh=["body.bias"])
    # Both are there before the first hook hears of it.
    assert called == ["pre first", "pre second", "post first 2", "post second 2"]
    assert torch.equal(
        other["second"].state[other["model"].head.weight]["momentum_buffer"],
        state["second"].state[state["model"].head.weight]["momentum_buffer"],
    )
    assert other["model"].body.bias not in other["first"].state


def test_tied_weights_need_one_value(tmp_path: Path) -> None:
    def model(*, tied: bool, value: float = 1.0) -> nn.ModuleDict:
        made = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
        for index, layer in enumerate(made.values()):
            nn.init.constant_(layer.weight, value + index)
        if tied:
            made["b"].weight = made["a"].weight
        return made

    shardopt.save({"model": model(tied=False)}, tmp_path / "untied")
    shardopt.save({"model": model(tied=True, value=3.0)}, tmp_path / "tied")
    live = model(tied=True)
    with pytest.raises(
        LoadError, match=r"model\.b\.weight: here it is one tensor with model\.a\.weight, and they were"
    ):
        shardopt.load({"model": live}, tmp_path / "untied")
    assert live["a"].weight.unique().tolist() == [1.0]
    shardopt.load({"model": live}, tmp_path / "tied")
    assert live["a"].weight.unique().tolist() == [3.0]


def test_views_of_one_memory_are_refused(tmp_path: Path) -> None:
    shardopt.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "saved")
    memory = torch.zeros(4)
    with pytest.raises(LoadError, match=r"a: its memory overlaps that of others of \['a', 'b'\]"):
        shardopt.load({"a": memory[:3], "b": memory[1:]}, tmp_path / "saved")
    assert memory.tolist() == [0.0] * 4
