"""Groups are matched by their members' names, and their objects stay the user's own."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from shardopt.staging.groups import GroupPlan, SavedGroup, plan_groups
from shardopt.staging.report import Report

SOME = ("a", "b")


def plan_one(live: dict[str, Any], saved: dict[str, Any]) -> tuple[GroupPlan, Report]:
    report = Report()
    (plan,) = plan_groups([(live, SOME)], [SavedGroup(SOME, saved)], report)
    return plan, report


def loaded(live: dict[str, Any], saved: dict[str, Any]) -> tuple[dict[str, Any], Report]:
    plan, report = plan_one(live, saved)
    assert not report.problems
    plan.commit()
    return live, report


@pytest.mark.parametrize(
    ("live", "saved", "expected", "note"),
    [
        (0.5, 0.25, 0.25, None),
        (0.5, torch.tensor(0.25), 0.25, "'lr' was saved as a tensor and stays a float"),
        (0.5, torch.tensor([0.25]), 0.25, "'lr' was saved as a tensor and stays a float"),
        (1, torch.tensor(0.25), 0.25, "'lr' was saved as a tensor and stays a int"),
        (torch.tensor(0.5), torch.tensor(0.25), torch.tensor(0.25), None),
        (torch.tensor(0.5), 0.25, torch.tensor(0.25), "'lr' was saved as a float and stays a tensor"),
        (torch.tensor(0.5), 2, torch.tensor(2.0), "'lr' was saved as a int and stays a tensor"),
        (torch.tensor(0.5), torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1), None),
        (torch.tensor([0.5, 0.5]), 0.25, torch.tensor([0.25, 0.25]), "'lr' was saved as a float and stays a tensor"),
        (0.5, torch.tensor([0.25, 0.5]), torch.tensor([0.25, 0.5]), None),
    ],
    ids=str,
)
def test_the_live_kind_of_lr_is_kept(live: Any, saved: Any, expected: Any, note: str | None) -> None:
    live = copy.deepcopy(live)
    group, report = loaded({"params": [], "lr": live}, {"lr": saved})
    assert type(group["lr"]) is type(expected)
    assert torch.equal(torch.as_tensor(group["lr"]), torch.as_tensor(expected))
    assert report.notes == ([] if note is None else [f"group 0: {note}."])
    if isinstance(live, Tensor):
        assert group["lr"] is live
        assert live.dtype == torch.float32


@pytest.mark.parametrize(
    ("live", "saved", "sentence"),
    [
        (torch.tensor(0.5), torch.tensor([1.0, 2.0]), r"group 0: 'lr' is a tensor of shape \(\), and was saved"),
        (torch.tensor(0.5), "warm", r"group 0: 'lr' is a tensor of shape \(\), and was saved as 'warm'"),
        (torch.tensor(0.5), None, r"group 0: 'lr' is a tensor of shape \(\), and was saved as None"),
        (torch.tensor(3), 0.25, r"group 0: 'lr' was saved as 0.25 and cannot be held by torch.int64"),
        (torch.tensor(3, dtype=torch.int8), torch.tensor(300), r"group 0: 'lr' was saved as tensor\(300\) and cannot"),
    ],
)
def test_what_a_live_tensor_cannot_hold_is_a_problem(live: Tensor, saved: Any, sentence: str) -> None:
    before = live.clone()
    plan, report = plan_one({"params": [], "lr": live}, {"lr": saved})
    assert len(report.problems) == 1
    assert re.match(sentence, report.problems[0])
    assert not plan.fill
    assert not plan.assign
    assert torch.equal(live, before)


def test_an_integer_tensor_takes_what_it_can_hold() -> None:
    group, _ = loaded({"params": [], "count": torch.tensor(3)}, {"count": 7})
    assert torch.equal(group["count"], torch.tensor(7))


def test_all_keys_come_from_the_checkpoint_but_those_of_the_kernel_and_the_structure() -> None:
    live = {
        "params": [1],
        "param_names": ["x"],
        "betas": (0.9, 0.99),
        "fused": True,
        "foreach": None,
        "capturable": True,
    }
    live["differentiable"] = False
    params, names = live["params"], live["param_names"]
    saved = {
        "betas": (0.5, 0.75),
        "fused": None,
        "foreach": True,
        "capturable": False,
        "differentiable": True,
        "tag": "x",
    }
    group, report = loaded(live, saved)
    assert group is live
    assert group["params"] is params
    assert group["param_names"] is names
    kernel = {key: group[key] for key in ("fused", "foreach", "capturable", "differentiable")}
    assert kernel == {"fused": True, "foreach": None, "capturable": True, "differentiable": False}
    assert (group["betas"], group["tag"]) == ((0.5, 0.75), "x")
    assert report.notes == ["group 0: 'betas' was saved as (0.5, 0.75), which replaces (0.9, 0.99)."]


def test_a_key_the_checkpoint_lacks_keeps_its_live_value_with_a_note() -> None:
    group, report = loaded({"params": [], "lr": 0.5, "extra": 3, "more": 4}, {"lr": 0.25})
    assert group == {"params": [], "lr": 0.25, "extra": 3, "more": 4}
    assert report.notes == ["group 0: ['extra', 'more'] is not in the checkpoint and keeps its live value."]


def test_planning_changes_nothing() -> None:
    lr = torch.tensor(0.5)
    live = {"params": [], "lr": lr, "betas": (0.9, 0.99)}
    plan_one(live, {"lr": 0.25, "betas": (0.1, 0.2), "new": 1})
    assert live == {"params": [], "lr": lr, "betas": (0.9, 0.99)}
    assert lr.item() == 0.5


def group_of(members: str, **values: Any) -> SavedGroup:
    return SavedGroup(tuple(members), values)


def test_groups_follow_their_members_whatever_their_order() -> None:
    first, second = {"params": [], "lr": 0.0}, {"params": [], "lr": 0.0}
    report = Report()
    saved = [group_of("cd", lr=0.25), group_of("ab", lr=0.5)]
    for plan in plan_groups([(first, ("b", "a")), (second, ("d", "c"))], saved, report):
        plan.commit()
    assert (first["lr"], second["lr"]) == (0.5, 0.25)
    assert not report.problems


def test_a_group_may_be_split_and_agreeing_ones_merged() -> None:
    live = [{"params": [], "lr": 0.0} for _ in range(2)]
    for plan in plan_groups([(live[0], ("a",)), (live[1], ("b",))], [group_of("ab", lr=0.5)], report := Report()):
        plan.commit()
    assert [group["lr"] for group in live] == [0.5, 0.5]
    merged = {"params": [], "lr": 0.0, "betas": ()}
    saved = [group_of("a", lr=0.5, betas=(0.1,)), group_of("b", lr=0.5, betas=(0.1,))]
    for plan in plan_groups([(merged, ("a", "b"))], saved, report):
        plan.commit()
    assert merged == {"params": [], "lr": 0.5, "betas": (0.1,)}
    assert not report.problems


@pytest.mark.parametrize(
    ("values", "others"),
    [
        ({"lr": 0.5}, {"lr": 0.25}),
        ({"lr": 0.5}, {}),
        ({}, {"lr": 0.5}),
        ({"lr": 0.5}, {"lr": torch.tensor(0.5)}),
        ({"lr": 0.0}, {"lr": -0.0}),
        ({"lr": 1}, {"lr": True}),
    ],
    ids=str,
)
def test_members_that_disagree_are_a_problem_which_names_them(values: dict[str, Any], others: dict[str, Any]) -> None:
    live = {"params": [], "lr": 7.0}
    report = Report()
    saved = [group_of("a", **values, same=1), group_of("b", **others, same=1)]
    (plan,) = plan_groups([(live, ("a", "b"))], saved, report)
    (problem,) = report.problems
    assert problem.startswith("group 0: its parameters were saved with different 'lr': a with ")
    assert f"a with {values.get('lr')!r}, b with {others.get('lr')!r}. " in problem
    assert "as they were saved, or give the value: hyperparameters={" in problem
    assert "lr" not in plan.assign


def test_implementation_keys_may_differ_between_merged_groups() -> None:
    saved = [group_of("a", lr=0.5, fused=True), group_of("b", lr=0.5, fused=None)]
    report = Report()
    plan_groups([({"params": [], "lr": 0.0, "fused": None}, ("a", "b"))], saved, report)
    assert not report.problems


def test_a_group_of_which_nothing_is_saved_keeps_its_values() -> None:
    empty, other = {"params": [], "lr": 0.125}, {"params": [], "lr": 0.125}
    report = Report()
    for plan in plan_groups([(empty, ()), (other, ("new",))], [group_of("a", lr=0.5)], report):
        plan.commit()
    assert empty["lr"] == other["lr"] == 0.125


def test_a_report_lists_problems_and_cuts_long_lists_with_their_count() -> None:
    report = Report(problems=[f"p{index}" for index in range(23)], notes=["n"], restored=["k"])
    text = str(report)
    assert text == report.summary()
    assert text.startswith(
        "the optimizer's state cannot be loaded (23 problems); the optimizer was not changed:\n  - p0\n"
    )
    assert text.endswith("  - p19\n  - and 3 more")
    assert "(1 problem);" in Report(problems=["p"]).summary()
    assert str(Report(notes=["n"], restored=["k", "l"])) == "2 entries to restore on this rank\nnote: n"
