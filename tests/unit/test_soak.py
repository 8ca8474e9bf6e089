"""The soak draws the same from the same numbers, compares to the bit, and tells its own faults from shardopt's."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardopt
from benchmarks.soak import replay
from benchmarks.soaking.comparing import Failure, Whole, assembled, differences
from benchmarks.soaking.driving import _is_of_soak, check_steps, hidden_differences, steps_left
from benchmarks.soaking.episode import FAULTS, LAYOUTS, draw
from benchmarks.soaking.leg import Look, Told
from benchmarks.soaking.rules import RULES
from benchmarks.soaking.training import Held, Part, Training

MANY = 20 * len(RULES)


def test_an_episode_is_the_same_again_and_others_are_not() -> None:
    assert draw(3, 7) == draw(3, 7)
    assert draw(3, 7) != draw(3, 8)
    assert draw(3, 7) != draw(4, 7)


def test_every_rule_has_its_turn_in_every_round() -> None:
    names = [draw(5, number).rule for number in range(2 * len(RULES))]
    assert set(names[: len(RULES)]) == set(names[len(RULES) :]) == set(RULES)


def test_every_layout_fault_kill_and_way_is_drawn() -> None:
    legs = [leg for number in range(MANY) for leg in draw(0, number).legs]
    assert {leg.layout for leg in legs} == set(LAYOUTS)
    faults = {(fault.operation, fault.where) for leg in legs for fault in leg.faults}
    assert faults == {(operation, where) for operation, places in FAULTS.items() for where in places}
    assert {leg.kill for leg in legs} == {"", "step", "save collect", "save write", "save finish"}
    assert {leg.load for leg in legs} == {"dcp", "shardopt", "dict", "path"}
    assert {leg.save for leg in legs} == {"dcp", "shardopt", "over", "async"}
    assert {cell.kind for number in range(MANY) for cell in draw(0, number).cells} == {
        "trained",
        "late",
        "frozen",
        "idle",
        "plain",
    }


def test_gradients_depend_on_the_step_and_the_weights_alone() -> None:
    episode = draw(1, 2)
    one, other = (Training(episode, None, "start") for _ in range(2))
    one.give_gradients(4)
    other.give_gradients(4)
    name = next(name for name, param in one.params.items() if param.grad is not None)
    first, second = one.params[name].grad, other.params[name].grad
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    with torch.no_grad():
        other.params[name].add_(1)
    other.give_gradients(4)
    moved = other.params[name].grad
    assert moved is not None
    assert not torch.equal(first, moved)


def part(index: list[int], values: list[float]) -> Part:
    return Part(shape=(4,), index=torch.tensor(index, dtype=torch.int64), values=torch.tensor(values))


def held(**parts: Part) -> Held:
    return Held(1, dict(parts), {"w/step": "1", "w[lr]": "2"}, {"w": 2})


def test_parts_are_put_together() -> None:
    whole = assembled([held(w=part([0, 1], [1.0, 2.0])), held(w=part([2, 3], [3.0, 4.0]))])
    assert whole.tensors["w"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert whole.values == {"w/step": "1", "w[lr]": "2"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (held(w=part([2], [3.0])), "no rank holds element 3"),
        (held(w=part([1, 2, 3], [2.5, 3.0, 4.0])), "differs from its replica"),
        (replace(held(w=part([2, 3], [3.0, 4.0])), values={"w/step": "2"}), "rank 1 holds 2, another 1"),
        (
            held(w=Part(shape=(4,), index=torch.tensor([2, 3]), values=torch.zeros(2).double())),
            "rank 1 holds .*float64",
        ),
        (replace(held(w=part([2, 3], [3.0, 4.0])), values={"w[lr]": "2"}), "w/step: missing on rank 1"),
        (replace(held(w=part([2, 3], [3.0, 4.0])), values={"w/step": "1"}), r"w\[lr\]: missing on rank 1"),
    ],
)
def test_ranks_that_contradict_each_other_are_a_difference(other: Held, said: str) -> None:
    with pytest.raises(Failure, match=said) as caught:
        assembled([held(w=part([0, 1], [1.0, 2.0])), other])
    assert caught.value.kind == "difference"


def test_a_replica_without_state_is_a_difference() -> None:
    weight, moment = part([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0]), part([0, 1, 2, 3], [0.0, 1.0, 0.0, 1.0])
    full, bare = held(**{"w": weight, "w/exp_avg": moment}), Held(1, {"w": weight}, {}, {"w": 4})
    with pytest.raises(Failure, match="w/exp_avg: missing on rank 1"):
        assembled([full, bare])
    # The owner alone has them, and who holds no element need not.
    assembled([replace(full, owned={"w"}), bare])
    assembled([full, Held(1, {"w": part([], [])}, {}, {"w": 0})])


def at(step: int, *, trained: bool) -> Told:
    return Told(looks=[Look("then", Held(step), trained)])


def test_a_step_that_nobody_saved_or_asked_for_is_a_difference() -> None:
    leg = replace(draw(1, 2).legs[0], until=3, overrun=2, save="dcp")
    for good in (at(3, trained=True), at(5, trained=True), at(2, trained=False)):
        check_steps(1, leg, [good, good], {2: Whole()})
    for bad in ([at(0, trained=False)] * 2, [at(4, trained=True)] * 2, [at(3, trained=True), at(5, trained=True)]):
        with pytest.raises(Failure, match="step") as caught:
            check_steps(1, leg, bad, {2: Whole()})
        assert caught.value.kind == "difference"


@pytest.mark.parametrize(
    ("kill", "steps"),
    [("", {3}), ("step", {3}), ("save collect", {3}), ("save write", {3}), ("save finish", {3, 5})],
)
def test_a_save_that_failed_must_have_left_the_old_checkpoint(kill: str, steps: set[int]) -> None:
    leg = replace(draw(1, 2).legs[0], until=3, overrun=2, save="dcp", kill=kill)
    assert steps_left(leg, 2) == steps


def test_a_leg_that_resumes_from_a_later_step_goes_on_from_there() -> None:
    leg = replace(draw(1, 2).legs[0], until=3, overrun=2, save="async", kill="save finish")
    told = [Told(looks=[Look("loaded", Held(4), False), Look("saved", Held(4), True), Look("end", Held(7), True)])]
    check_steps(1, leg, told, {4: Whole()})
    assert steps_left(leg, 4) == {4, 7}
    assert replace(draw(1, 2), legs=(leg, leg, leg)).last_step == 12


def test_hidden_state_is_compared_rank_by_rank() -> None:
    assert list(hidden_differences([{"w/a": "1"}, {}], [{"w/a": "1"}, {}])) == []
    assert list(hidden_differences([{"w/a": "1"}, {}], [{}, {"w/a": "1"}])) == [
        "w/a on rank 0: 1, expected None",
        "w/a on rank 1: None, expected 1",
    ]


def whole(*values: float, dtype: torch.dtype = torch.float32, **more: str) -> Whole:
    return Whole(tensors={"w/exp_avg": torch.tensor(values, dtype=dtype)}, values=more)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (whole(1.0, -0.0), "w/exp_avg: 1 of 2 elements differ"),
        (whole(1.0, 0.0, dtype=torch.float64), "float64, expected torch.float32"),
        (Whole(), "w/exp_avg: missing"),
        (whole(1.0, 0.0, step="1"), "step: 1, expected None"),
    ],
)
def test_a_difference_of_one_bit_type_or_key_is_found(got: Whole, said: str) -> None:
    want = whole(1.0, 0.0)
    assert list(differences(want, want)) == []
    assert [said in item for item in differences(got, want)] == [True]


def test_a_small_moment_that_is_gone_is_found_beside_a_large_one() -> None:
    bf16 = torch.bfloat16
    assert len(list(differences(whole(1.0, 0.0, dtype=bf16), whole(1.0, 0.01, dtype=bf16)))) == 1


def test_the_replay_has_all_that_decides_an_episode() -> None:
    told = replay(Namespace(patience=4.0, rules=["AdamW fused"]), draw(3, 7))
    assert told == "python benchmarks/soak.py --seed 3 --episode 7 --patience 4 --rules 'AdamW fused'"


def test_an_error_of_the_soak_is_told_from_one_of_shardopt() -> None:
    package = str(Path(shardopt.__file__).parent / "optimizer.py")
    of_soak = 'File "/x/benchmarks/soaking/leg.py", line 1\n  File "/x/torch/nn.py", line 2\nTypeError'
    assert _is_of_soak(of_soak)
    assert not _is_of_soak(of_soak.replace("/x/torch/nn.py", package))
    assert _is_of_soak(f'File "{package}", line 1\n' + of_soak)


def test_the_package_is_known_wherever_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.soaking.driving._PACKAGE", "/env/site-packages/shardopt/")
    assert not _is_of_soak('File "/x/benchmarks/soaking/leg.py"\nFile "/env/site-packages/shardopt/scope.py"')
