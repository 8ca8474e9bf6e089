"""What prepare_load may be told: names that differ, parameters that start anew, hyperparameters, dtypes, values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardopt import LoadError, ShardedStateOptimizer
from shardopt.naming import Name
from shardopt.staging.options import LoadOptions
from tests.support.rules import bits, state, weights
from tests.support.snapshot import snapshot

# Saved without a process group, by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Made = tuple[ShardedStateOptimizer, nn.ModuleDict]


def model_of(names: str, *, width: int = 3, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """Linear layers of these names, a letter each."""
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(width, 2, bias=False) for name in names}).to(dtype)


def wrapped(model: nn.ModuleDict, *, steps: int = 0, cls: Any = torch.optim.AdamW, **options: Any) -> Made:
    """A wrapped optimizer that has taken these steps."""
    optimizer = ShardedStateOptimizer(cls(model.parameters(), **{"lr": 0.125, **options}), model)
    for step in range(steps):
        for index, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 1.0 + step + index)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, model


def saved(path: Path, made: Made) -> Made:
    """Saves it."""
    dcp.save({"optim": made[0]}, checkpoint_id=path)
    return made


def refused(made: Made, path: Path, *texts: str, **options: Any) -> None:
    """The load fails with all of these texts and changes nothing."""
    optimizer, model = made
    before = snapshot(optimizer, model)
    with pytest.raises(LoadError) as caught:
        optimizer.prepare_load(path, **options)
    for text in texts:
        assert text in str(caught.value)
    assert before.diff(snapshot(optimizer, model)) == []


def test_strict_names_what_only_one_side_has(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("abc"), steps=2))
    refused(
        wrapped(model_of("bcd"), steps=1),
        tmp_path,
        "a.weight: the checkpoint has it, this optimizer does not update it; strict=False leaves out",
        "d.weight: this optimizer updates it, the checkpoint does not have it; fresh=[pattern] starts",
    )


@pytest.mark.parametrize("steps", [0, 1])
def test_not_strict_takes_what_both_sides_have_and_reports_the_rest_K3_K5(tmp_path: Path, steps: int) -> None:
    optimizer, model = saved(tmp_path, wrapped(model_of("abc"), steps=2))
    want = state(optimizer, model)
    other, live = wrapped(model_of("bcd"), steps=steps)
    before = state(other, live)
    loaded = other.prepare_load(tmp_path, strict=False)
    assert (loaded.report.missing, loaded.report.unused, loaded.report.fresh) == (["d.weight"], ["a.weight"], [])
    assert "not in the checkpoint, keeping the state they have (1): d.weight" in str(loaded.report)
    loaded.commit()
    after = state(other, live)
    assert {name: after[name] for name in ("b.weight", "c.weight")} == {
        name: want[name] for name in ("b.weight", "c.weight")
    }
    assert after.get("d.weight") == before.get("d.weight")


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_that_matches_nothing_is_an_error(tmp_path: Path, strict: bool) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    refused(wrapped(model_of("cd")), tmp_path, "nothing in the checkpoint belongs to this optimizer", strict=strict)


def test_not_strict_relaxes_nothing_but_names(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    refused(wrapped(model_of("ab", width=4)), tmp_path, "a.weight: saved with shape (2, 3)", strict=False)
    refused(wrapped(model_of("ab"), cls=torch.optim.Adam), tmp_path, "were saved by torch.optim.adamw", strict=False)


@pytest.mark.parametrize("steps", [0, 2])
def test_fresh_parameters_start_anew_others_are_restored_K5(tmp_path: Path, steps: int) -> None:
    optimizer, model = saved(tmp_path, wrapped(model_of("abc"), steps=2))
    want = state(optimizer, model)
    live = model_of("abd")
    live["b"] = nn.Linear(5, 2, bias=False)  # resized; "d" is new
    other, _ = wrapped(live, steps=steps)
    loaded = other.prepare_load(tmp_path, fresh=["b.*", "d.weight"], strict=False)
    assert loaded.report.fresh == ["b.weight", "d.weight"]
    loaded.commit()
    assert state(other, live) == {"a.weight": want["a.weight"]}


def test_fresh_alone_takes_a_new_parameter_but_not_a_lost_one(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    wrapped(model_of("abc"))[0].prepare_load(tmp_path, fresh=["c.*"]).commit()
    refused(wrapped(model_of("ac")), tmp_path, "b.weight: the checkpoint has it", fresh=["c.*"])


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    refused(wrapped(model_of("ab")), tmp_path, "fresh=['head.*'] matches no parameter", fresh=["a.*", "head.*"])


@pytest.mark.parametrize("fused", [False, True])
def test_fresh_state_is_what_a_new_optimizer_has(tmp_path: Path, fused: bool) -> None:
    # Adagrad makes its state when it is built, and cannot step without it.
    options = {"cls": torch.optim.Adagrad, "initial_accumulator_value": 0.5, "fused": fused}
    saved(tmp_path, wrapped(model_of("ab"), steps=2, **options))
    other, live = wrapped(model_of("ab"), steps=2, **options)
    other.prepare_load(tmp_path, fresh=["b.*"]).commit()
    new, new_model = wrapped(model_of("ab"), **options)
    assert state(other, live)["b.weight"] == state(new, new_model)["b.weight"]


def test_the_hyperparameters_of_the_live_optimizer_can_be_kept_C10(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1, lr=0.5, weight_decay=0.25))
    other, _ = wrapped(model_of("ab"), lr=0.0625)
    loaded = other.prepare_load(tmp_path, hyperparameters="keep")
    loaded.commit()
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.0625, 0.01)
    assert any("keeps its live values" in note for note in loaded.report.notes)
    other.prepare_load(tmp_path, hyperparameters={"lr": 0.75}).commit()
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.75, 0.25)


def test_a_given_value_fills_a_live_tensor_and_settles_a_conflict(tmp_path: Path) -> None:
    model = model_of("ab")
    inner = torch.optim.AdamW(
        [{"params": [one.weight], "lr": lr} for one, lr in zip(model.values(), (0.5, 0.25), strict=True)]
    )
    saved(tmp_path, (ShardedStateOptimizer(inner, model), model))
    other, live = wrapped(model_of("ab"), lr=torch.tensor(0.125), foreach=False)
    refused((other, live), tmp_path, "group 0: its parameters were saved with different 'lr': a.weight with 0.5, b")
    lr = other.param_groups[0]["lr"]
    other.prepare_load(tmp_path, hyperparameters={"lr": 0.75}).commit()
    assert other.param_groups[0]["lr"] is lr
    assert lr.item() == 0.75


def test_an_unknown_hyperparameter_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    refused(
        wrapped(model_of("ab")),
        tmp_path,
        "hyperparameters=['momentun']: no parameter group",
        hyperparameters={"momentun": 1},
    )


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_cast_since_the_save_is_refused_or_converted_G13_T8(tmp_path: Path, steps: int) -> None:
    optimizer, model = saved(tmp_path, wrapped(model_of("ab"), steps=2))
    narrow = wrapped(model_of("ab", dtype=torch.bfloat16), steps=steps)
    text = "a.weight: state 'exp_avg' was saved as float32, this optimizer keeps bfloat16; dtype='live' converts"
    refused(narrow, tmp_path, text)
    loaded = narrow[0].prepare_load(tmp_path, dtype="live")
    loaded.commit()
    assert sum("is converted to bfloat16" in note for note in loaded.report.notes) == 4
    for name, param in narrow[1].named_parameters():
        want = optimizer.state[model.get_parameter(name)]["exp_avg"].to(torch.bfloat16)
        assert bits(narrow[0].state[param]["exp_avg"]) == bits(want)


class Wide(torch.optim.Optimizer):
    """A rule that keeps float32 state whatever the parameter's dtype."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    entry = self.state[param].setdefault("wide", torch.zeros_like(param, dtype=torch.float32))
                    entry.add_(param.grad)


def test_state_of_another_dtype_than_its_parameter_keeps_it_T8(tmp_path: Path) -> None:
    narrow = model_of("ab", dtype=torch.bfloat16)
    optimizer, _ = saved(tmp_path, wide(narrow, 2))
    other, live = wide(model_of("ab", dtype=torch.bfloat16), 0)
    other.prepare_load(tmp_path).commit()
    assert state(other, live) == state(optimizer, narrow)
    stock, stock_live = wide(model_of("ab", dtype=torch.bfloat16), 1)
    dcp.load({"optim": stock}, checkpoint_id=tmp_path)
    assert state(stock, stock_live) == state(optimizer, narrow)


def wide(model: nn.ModuleDict, steps: int) -> Made:
    optimizer = ShardedStateOptimizer(Wide(model.parameters()), model, compute="dtensor")
    for step in range(steps):
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0 + step)
        optimizer.step()
    return optimizer, model


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_state_that_is_not_finite_is_refused_or_reported_H21(tmp_path: Path, value: float) -> None:
    optimizer, model = wrapped(model_of("ab"), steps=1)
    optimizer.state[model["b"].weight]["exp_avg_sq"][1, 2] = value
    want = state(*saved(tmp_path, (optimizer, model)))
    word = "NaN" if value != value else "inf"
    refused(
        wrapped(model_of("ab")), tmp_path, f"b.weight: state 'exp_avg_sq' holds {word} on this rank; finite='report'"
    )
    other, live = wrapped(model_of("ab"))
    with pytest.raises(LoadError, match="holds"):
        dcp.load({"optim": other}, checkpoint_id=tmp_path)
    loaded = other.prepare_load(tmp_path, finite="report")
    assert [note for note in loaded.report.notes if word in note]
    loaded.commit()
    assert state(other, live) == want


def test_weights_are_never_touched_A4(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=2))
    other, live = wrapped(model_of("abc"), steps=1)
    before = weights(live)
    other.prepare_load(tmp_path, strict=False, fresh=["a.*"], hyperparameters={"lr": 1.0}, finite="report").commit()
    assert weights(live) == before


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"strict": 1}, TypeError, "strict=1 must be True or False"),
        ({"fresh": "head.*"}, TypeError, r"must be a list of patterns, like \['head"),
        ({"hyperparameters": "live"}, ValueError, "'checkpoint' or 'keep' or a dict"),
        ({"hyperparameters": {"params": []}}, ValueError, "does not move parameters"),
        ({"dtype": "bf16"}, ValueError, "expected 'same' or 'live'"),
        ({"finite": True}, ValueError, "expected 'error' or 'report'"),
    ],
)
def test_unknown_options_are_refused_H10(
    option: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    saved(tmp_path, wrapped(model_of("ab")))
    other, _ = wrapped(model_of("ab"))
    with pytest.raises(error, match=text):
        other.prepare_load(tmp_path, **option)


def test_patterns_match_whole_names() -> None:
    options = LoadOptions(fresh=("head.*", "block.[01].bias"))
    assert [options.is_fresh(Name(fqn)) for fqn in ("head.weight", "ahead.weight", "block.1.bias", "block.2.bias")] == [
        True,
        False,
        True,
        False,
    ]


def test_many_names_are_grouped_by_pattern_with_a_count_and_examples(tmp_path: Path) -> None:
    def layers(count: int) -> Made:
        model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(1, 1) for _ in range(count))})
        return wrapped(model)

    saved(tmp_path, layers(1))
    refused(
        layers(30),
        tmp_path,
        "58 parameters: this optimizer updates them, the checkpoint does not have them: "
        "layers.*.bias (29: layers.1.bias, layers.10.bias, layers.11.bias, ...); layers.*.weight (29: ",
    )


@pytest.mark.parametrize("how", [{"amsgrad": True}, "keep"])
def test_values_under_which_state_is_missing_are_refused(tmp_path: Path, how: Any) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    refused(
        wrapped(model_of("ab"), amsgrad=True),
        tmp_path,
        "a.weight: with the hyperparameters= of this load the optimizer needs state ['max_exp_avg_sq']",
        hyperparameters=how,
    )


@pytest.mark.parametrize("value", ["0.1", None, True, (0.1,)])
def test_a_given_value_of_another_kind_is_refused(tmp_path: Path, value: Any) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    for lr in (0.125, torch.tensor(0.125)):
        refused(
            wrapped(model_of("ab"), lr=lr, foreach=False),
            tmp_path,
            f"group 0: hyperparameters={{'lr': {value!r}}} is a {type(value).__name__}",
            hyperparameters={"lr": value},
        )


def test_a_saved_option_that_replaces_another_live_one_is_noted(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1, lr=0.5))
    other, _ = wrapped(model_of("ab"), amsgrad=True)
    assert other.prepare_load(tmp_path).report.notes == ["group 0: 'amsgrad' was saved as False, which replaces True."]


def test_a_refusal_that_names_options_says_whose_they_are(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    other, _ = wrapped(model_of("a"))
    with pytest.raises(LoadError, match=r"strict=False(.|\n)*Options are those of optimizer\.prepare_load\(path"):
        dcp.load({"optim": other}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("how", ["checkpoint", {"amsgrad": True}])
def test_a_parameter_that_keeps_its_state_needs_what_the_new_values_ask_for(tmp_path: Path, how: Any) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1, amsgrad=True))
    refused(
        wrapped(model_of("abc"), steps=1),
        tmp_path,
        "c.weight: it keeps its live state, which lacks ['max_exp_avg_sq']",
        strict=False,
        hyperparameters=how,
    )
    other, _ = wrapped(model_of("abc"), steps=1)
    other.prepare_load(tmp_path, fresh=["c.*"]).commit()


def test_fresh_state_follows_the_values_of_the_load(tmp_path: Path) -> None:
    options = {"cls": torch.optim.Adagrad}
    saved(tmp_path, wrapped(model_of("ab"), steps=1, initial_accumulator_value=0.5, **options))
    other, live = wrapped(model_of("ab"), **options)
    other.prepare_load(tmp_path, fresh=["b.*"]).commit()
    assert other.param_groups[0]["initial_accumulator_value"] == 0.5
    assert bool((other.state[live["b"].weight]["sum"] == 0.5).all())


def test_another_class_gives_fresh_parameters_no_values(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    other, _ = wrapped(model_of("ab"), cls=torch.optim.SGD, lr=0.5)
    other.prepare_load(tmp_path, fresh=["*"]).commit()
    assert other.param_groups[0]["lr"] == 0.5
    assert "betas" not in other.param_groups[0]


def test_state_made_in_inference_mode_is_replaced_and_not_written_to(tmp_path: Path) -> None:
    optimizer, model = saved(tmp_path, wrapped(model_of("ab"), steps=2))
    other, live = wrapped(model_of("ab"), steps=1)
    with torch.inference_mode():
        other.state[live["b"].weight]["exp_avg"] = torch.zeros(2, 3)
    other.prepare_load(tmp_path).commit()
    assert state(other, live) == state(optimizer, model)


def test_a_conversion_leaves_what_was_read_as_it_is(tmp_path: Path) -> None:
    optimizer, model = saved(tmp_path, wrapped(model_of("a"), steps=1))
    narrow, _ = wrapped(model_of("a", dtype=torch.bfloat16), steps=1)
    read = narrow.state_dict()
    dcp.load({"optim": read}, checkpoint_id=tmp_path)
    narrow.prepare_load(read, dtype="live")
    narrow.prepare_load(read, dtype="live").commit()
    want = optimizer.state[model["a"].weight]["exp_avg"].to(torch.bfloat16)
    assert bits(next(iter(narrow.state.values()))["exp_avg"]) == bits(want)


def test_options_are_spelled_to_the_last_bit() -> None:
    def spelled(lr: Any) -> str:
        return LoadOptions(hyperparameters={"lr": lr, "betas": (lr, 0.5)}).spelled()

    close = [torch.tensor(1e-4 + extra, dtype=torch.float64) for extra in (0.0, 1e-9)]
    assert spelled(close[0]) != spelled(close[1])
    assert spelled(close[0]) == spelled(close[0].clone())
    assert (
        LoadOptions(hyperparameters={"a": 1, "b": 2}).spelled()
        == LoadOptions(hyperparameters={"b": 2, "a": 1}).spelled()
    )


@pytest.mark.parametrize("kind", [list, tuple, set, iter])
def test_fresh_may_be_any_collection_of_patterns(kind: Any, tmp_path: Path) -> None:
    saved(tmp_path, wrapped(model_of("ab"), steps=1))
    loaded = wrapped(model_of("ab"))[0].prepare_load(tmp_path, fresh=kind(["b.*"]))
    assert loaded.report.fresh == ["b.weight"]
    options = [LoadOptions(fresh=tuple(order)) for order in (["a", "b"], ["b", "a"])]
    assert options[0].spelled() == options[1].spelled()
