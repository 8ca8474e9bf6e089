"""Models that were edited between save and resume: what matches comes back bit for bit, all else is reported."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.edits import EDITS, WRAPPERS, Expected, Layer, Loaded, Model, edit, expect, load_job, names, save_job
from tests.support.ranks import RankPool

_BATCH = 20
# `SHARDOPT_EDITS=300` for a release; a run of all tests has time for fewer.
_BATCHES = max(1, int(os.environ.get("SHARDOPT_EDITS", "100")) // _BATCH)


def random_pair(seed: int) -> tuple[Model, Model]:
    """A model to save, and what has become of it when it is loaded."""
    source = random.Random(seed)

    def edited(model: Model) -> Model:
        for _ in range(source.randrange(6)):
            kind = source.choice([*EDITS, "tie", "add", "swap"])
            model = edit(model, kind, source.randrange(10), source.randrange(10))
        return model

    def untied(model: Model) -> Model:
        for index in range(len(model)):
            model = edit(model, source.choice(["untie", "wrap"]), index, source.randrange(10))
        return model

    # The first layer is always trained, so that there is an optimizer.
    layers = [Layer("first", 3)]
    layers += [
        Layer(f"m{index}", source.randint(1, 3), source.choice(["a", "a", "b", None]), None, source.choice(WRAPPERS))
        for index in range(source.randint(1, 5))
    ]
    saved = edited(edit(tuple(layers), "tie", source.randrange(1, 6), source.randrange(10)))
    return saved, edited(untied(saved))


def attempts_of(expected: Expected) -> list[dict[str, Any]]:
    """First without help, then with the options that the refusal of the first names."""
    if not expected.source and not expected.resized:
        return [{"strict": False}]
    helped: dict[str, Any] = {"strict": False, "fresh": expected.resized}
    if expected.conflict:
        helped["hyperparameters"] = {"lr": 0.125}
    return [{"strict": False}, helped] if expected.resized or expected.conflict else [helped]


def surprises(expected: Expected, got: Loaded, want: dict[str, bytes], live: Model) -> list[str]:
    """What is other than expected, in words."""
    found: list[str] = []
    if not expected.source and not expected.resized:
        told = len(got.refusals) == 1 and "nothing in the checkpoint belongs to this optimizer" in got.refusals[0]
        return [] if told and got.after == got.before else [f"loaded though nothing matches: {got.refusals}"]
    if len(got.refusals) != (1 if expected.resized or expected.conflict else 0):
        found.append(f"refused {len(got.refusals)} times: {got.refusals}")
    text = "".join(got.refusals)
    found += [f"{fqn} is not refused" for fqn in expected.resized if f"{fqn}: saved with shape" not in text]
    if expected.conflict and "were saved with different 'lr'" not in text:
        found.append("a conflict of lr is not refused")
    report = {"missing": expected.missing, "unused": expected.unused, "fresh": expected.resized}
    if got.report != report:
        found.append(f"report {got.report}, expected {report}")
    for fqn in names(live):
        held = {key: value for key, value in got.after.items() if key.startswith(f"state.{fqn}.")}
        prefix = f"state.{expected.source.get(fqn)}."
        should = {f"state.{fqn}.{key.removeprefix(prefix)}": v for key, v in want.items() if key.startswith(prefix)}
        if fqn in expected.missing:
            should = {key: value for key, value in got.before.items() if key.startswith(f"state.{fqn}.")}
        if held != should:
            found.append(f"{fqn}: state of {sorted(held)} differs, expected {sorted(should)}")
    lr = {fqn: 0.125 for fqn in expected.lr} if expected.conflict else expected.lr
    if got.lr != lr:
        found.append(f"lr {got.lr}, expected {lr}")
    return found


@pytest.mark.parametrize("batch", range(_BATCHES))
def test_an_edited_model_gets_what_matches_and_a_report_of_the_rest_C13_C14_C15_K1(
    batch: int, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pairs = [random_pair(batch * _BATCH + index) for index in range(_BATCH)]
    root: Path = tmp_path_factory.mktemp("edits")
    saved = ranks.run(2, save_job, [model for model, _ in pairs], str(root), deadline_s=300)[0]
    expected = [expect(model, live) for model, live in pairs]
    attempts = [attempts_of(one) for one in expected]
    for world_size in (1, 2, 4):
        for got in ranks.run(world_size, load_job, [live for _, live in pairs], attempts, str(root), deadline_s=300):
            for index, (model, live) in enumerate(pairs):
                found = surprises(expected[index], got[index], saved[index], live)
                assert found == [], f"seed {batch * _BATCH + index}, {world_size} ranks: {model} -> {live}"
