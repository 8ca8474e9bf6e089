"""The catalogue of optimizers: what it calls equal, failed and refused, and the page it makes of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.catalogue.false_local import first_difference
from benchmarks.catalogue.jobs import Chosen
from benchmarks.catalogue.judging import BOUND, Verdict, compare, failure, same_bits, unmoved
from benchmarks.catalogue.models import MODELS
from benchmarks.catalogue.page import markdown, read_results, samples
from benchmarks.catalogue.protocols import classes, find, protocol_of, special
from benchmarks.catalogue.sessions import Session
from benchmarks.catalogue.standing import bare_words, bit_equal, count, resumed_words, worst, wrapped_words
from benchmarks.catalogue.survey import Entry
from benchmarks.harness.results import record
from tests.support.ranks import Outcome

ROOT = Path(__file__).parents[2]

# An update of norm 5, and one whose elements are exact in float32.
INITIAL = {"a": np.zeros(2, np.float32), "b": np.ones((2, 2), np.float32)}
FINAL = {"a": np.array([3, 4], np.float32), "b": np.full((2, 2), 0.5, np.float32)}
SAME = Verdict(kind="ok", worst=0.0, same_bits=True)
ROUNDED = Verdict(kind="ok", worst=3e-7, parameter="a.mix")
RUNS = ("run", "resume 2", "resume 4", "resume 1")


def changed(name: str, value: Any) -> dict[str, Any]:
    return {**FINAL, name: np.asarray(value, np.float32)}


def entry(name: str = "torch.optim.One", compute: str = "local", **values: Any) -> Entry:
    chosen = Chosen(asked="auto", compute=compute, reason="of a | reason", seconds=0.25)
    given = {"wrapped": dict.fromkeys(RUNS, SAME), "bare": dict.fromkeys(RUNS, SAME), "resumed_bits": True, **values}
    return Entry(name=name, chosen=chosen, **given)


def refused(name: str, *, protocol: str = "") -> Entry:
    bare = {"run": Verdict(kind="raises", detail="step: RuntimeError: no rule")}
    return entry(name, "refused", wrapped={}, bare=bare, refused=protocol, resumed_bits=False)


def outcome(kind: Any, *points: str, rank: int = 0, error: str = "") -> Outcome:
    return Outcome(rank=rank, pid=1, kind=kind, points=points, error=error, error_type="ValueError" if error else "")


def test_equal_weights_are_equal() -> None:
    assert compare(INITIAL, FINAL, dict(FINAL)) == SAME


def test_a_difference_counts_in_norms_of_its_parameters_update() -> None:
    near = compare(INITIAL, FINAL, changed("a", [3, 4.00048]))
    assert near.kind == "ok"
    assert near.worst == pytest.approx(0.00048 / 5, rel=1e-3)
    assert not near.same_bits
    far = compare(INITIAL, FINAL, changed("a", [3, 4.00052]))
    assert (far.kind, far.parameter) == ("differs", "a")
    # The update of the other parameter has norm 1.
    assert compare(INITIAL, FINAL, changed("b", [[0.5, 0.5], [0.5, 0.50048]])).kind == "differs"
    assert BOUND == 1e-4


@pytest.mark.parametrize("value", [[3, np.nan], [3, np.inf], [0, 0]], ids=["nan", "inf", "not updated"])
def test_what_is_not_finite_or_did_not_move_is_infinitely_far(value: list[float]) -> None:
    verdict = compare(INITIAL, FINAL, changed("a", value))
    assert (verdict.kind, verdict.worst, verdict.parameter) == ("differs", np.inf, "a")


def test_signs_of_zeros_are_bits() -> None:
    assert not same_bits({"a": np.zeros(1, np.float32)}, {"a": -np.zeros(1, np.float32)})
    assert not same_bits(FINAL, {"a": FINAL["a"]})


def test_an_oracle_that_leaves_a_parameter_alone_proves_nothing() -> None:
    assert unmoved(INITIAL, FINAL) == []
    assert unmoved(INITIAL, {"a": INITIAL["a"], "b": np.full((2, 2), np.nan, np.float32)}) == ["a", "b"]


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        ([outcome("error", "make", "step", error="bad")], "raises"),
        ([outcome("error", "make", "step", "save", error="bad")], "cannot be saved"),
        ([outcome("error", "make", "load", error="bad")], "cannot be loaded"),
        ([outcome("error", "make", "load", "step after load", error="bad")], "raises"),
        ([outcome("hang", "make", "step", error="no answer")], "hangs"),
        ([outcome("died", error="killed")], "raises"),
        # A rank that waits for one that has raised does not hang by itself.
        ([outcome("hang", "make", "step"), outcome("error", "make", "save", rank=1, error="bad")], "cannot be saved"),
    ],
)
def test_a_job_fails_for_its_first_cause(outcomes: list[Outcome], kind: str) -> None:
    verdict = failure([outcome("ok"), *outcomes])
    assert verdict is not None
    assert verdict.kind == kind
    assert verdict.worst is None


def test_a_job_that_returns_has_not_failed() -> None:
    assert failure([outcome("ok"), outcome("ok", rank=1)]) is None


def test_an_entry_says_the_first_thing_that_went_wrong() -> None:
    assert (wrapped_words(entry()), bare_words(entry()), resumed_words(entry())) == ("ok", "ok", "ok / ok / ok")
    off = Verdict(kind="differs", worst=0.02)
    late = entry(bare={**dict.fromkeys(RUNS, SAME), "resume 4": off})
    assert bare_words(late) == "differs by 2e-02 when resumed on 4"
    lost = entry(wrapped={"run": SAME, "resume 2": Verdict(kind="cannot be loaded")})
    assert wrapped_words(lost) == "cannot be loaded on 2"
    assert resumed_words(lost) == "cannot be loaded / - / -"
    assert not bit_equal(lost)
    assert wrapped_words(entry(wrapped={"run": Verdict(kind="hangs")})) == "hangs"


def test_counts_tell_what_passes_from_what_does_not() -> None:
    rounded = {**dict.fromkeys(RUNS, SAME), "resume 1": ROUNDED}
    entries = [
        entry("t.Fine"),
        entry("t.Rounded", wrapped=rounded),
        entry("t.Inexact", "owner", wrapped=rounded),
        entry("t.Otherwise", resumed_bits=False),
        entry("t.Failing", wrapped={"run": Verdict(kind="raises")}, resumed_bits=False),
        refused("t.Named", protocol="has to be"),
        refused("t.Unknown"),
        entry("t.Slipped", refused="has to be"),
        Entry(name="t.Broken", unsharded="ImportError"),
        Entry(name="t.NotWrapped", wrapped={"run": Verdict(kind="raises")}),
    ]
    counts = count(entries)
    assert counts.unsharded == 9
    assert counts.by_compute == {"local": 4, "owner": 1, "not wrapped": 1}
    assert counts.inexact == ["t.Inexact"]
    assert counts.resumed_otherwise == ["t.Otherwise"]
    assert counts.failing == ["t.Failing", "t.NotWrapped"]
    assert (counts.refused, counts.refused_too, counts.not_refused) == (["t.Named"], ["t.Unknown"], ["t.Slipped"])
    assert counts.not_unsharded == ["t.Broken"]
    assert counts.bare_ok == 6
    assert counts.bare_words == {"raises": 2}
    assert worst(entries[1]) == 3e-7


def test_results_come_back_as_they_were_and_make_the_page(tmp_path: Path) -> None:
    rounded = {**dict.fromkeys(RUNS, SAME), "resume 1": ROUNDED}
    entries = [
        entry("torch.optim.One", wrapped=rounded),
        entry("pytorch_optimizer.Two", "owner", bare={"run": Verdict(kind="differs", worst=np.inf)}),
        refused("pytorch_optimizer.Three"),
        Entry(name="pytorch_optimizer.Four", unsharded="ImportError: einops"),
    ]
    record(tmp_path / "out.jsonl", "catalog", {"pytorch_optimizer": "4.1.0"}, samples(entries))
    line, read = read_results(tmp_path / "out.jsonl")
    assert read == entries
    page = markdown(read, line)
    assert "| `torch.optim.One` | local | 3e-07 | rounding | ok / ok / ok | ok |\n" in page
    assert "| `Two` | owner | 0 | same | ok / ok / ok | differs by inf |\n" in page
    # A bar in a reason would end the cell.
    assert "| `Three` | of a \\| reason | raises |\n" in page
    assert "| `Four` | ImportError: einops |\n" in page
    assert "The weakest guarantee here is that of `torch.optim.One`: within 3e-07" in page
    assert json.dumps(samples(entries))


def test_the_page_is_that_of_the_results() -> None:
    line, entries = read_results(ROOT / "benchmarks" / "results" / "catalog.jsonl")
    page = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    assert page == markdown(entries, line), (
        "write it anew: python benchmarks/catalog.py --out benchmarks/results/catalog.jsonl"
    )
    assert {entry.name for entry in entries} == classes().keys()


def test_the_table_of_protocols_names_classes_there_are() -> None:
    known = classes()
    assert special() <= known.keys()
    assert len(known) > 130
    assert len(set(known.values())) == len(known)
    assert known["torch.optim.AdamW"] is torch.optim.AdamW
    assert protocol_of("torch.optim.AdamW").refused == ""


def test_classes_are_found_by_any_part_of_their_name() -> None:
    assert find(["muon"]) == ["torch.optim.Muon", "pytorch_optimizer.Muon"]
    assert find(["torch.optim.ADAMW", "AdamW"]) == ["torch.optim.AdamW"]
    assert find([]) == list(classes())
    with pytest.raises(ValueError, match="'Nothing' is no optimizer"):
        find(["Nothing"])


def test_a_whole_matrix_rule_is_not_called_local_by_its_numbers() -> None:
    def gradient(step: int, name: str, noise: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        return noise

    assert first_difference("torch.optim.AdamW", gradient, num_steps=2) is None
    found = first_difference("torch.optim.Adafactor", gradient, num_steps=2)
    assert found is not None
    assert found.endswith("at step 1")


def test_a_session_has_gradients_of_its_own_weights() -> None:
    for model in MODELS.values():
        session = Session(model(3))
        before = session.weights()
        assert {value.size for value in before.values()} >= ({160 * 192, 5001} if "mix" in before else {81, 480})
        first = float(session.backward(0))
        gradients = [param.grad.clone() for param in session.model.parameters() if param.grad is not None]
        assert all(gradient.count_nonzero() > 0 for gradient in gradients)
        assert len(gradients) == len(before)
        with torch.no_grad():
            for param, gradient in zip(session.model.parameters(), gradients, strict=True):
                param.sub_(gradient, alpha=0.1)
        assert float(session.backward(0)) < first
