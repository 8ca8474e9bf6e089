"""The catalogue's own runs: an element-wise class on all numbers of ranks, and one that has to be refused."""

from __future__ import annotations

from benchmarks.catalogue.standing import bare_words, bit_equal, is_refused, wrapped_words
from benchmarks.catalogue.survey import survey
from tests.support.ranks import RankPool


def test_an_elementwise_class_has_the_unsharded_bits(ranks: RankPool) -> None:
    entry = survey(ranks, "torch.optim.AdamW", bare=False)
    assert entry.chosen is not None
    assert entry.chosen.compute == "local"
    assert wrapped_words(entry) == "ok", entry
    assert bit_equal(entry)
    assert entry.resumed_bits


def test_a_rule_that_differentiates_gradients_runs_unsharded_only(ranks: RankPool) -> None:
    entry = survey(ranks, "pytorch_optimizer.AdaHessian")
    assert entry.unsharded == ""
    assert entry.refused
    assert is_refused(entry)
    assert bare_words(entry) == "raises"
