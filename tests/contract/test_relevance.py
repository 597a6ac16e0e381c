"""From label scores to relevance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.contract.relevance import RelevanceKind, needed_score_mode, raw_scores, relevance_scores

LOGITS = st.floats(-80, 80)


def test_of_two_labels_the_raw_score_is_their_difference() -> None:
    assert raw_scores(np.array([[3.0, 1.0], [-2.0, 4.0]])).tolist() == [2.0, -6.0]


def test_of_one_label_the_raw_score_is_its_own() -> None:
    assert raw_scores(np.array([[3.0], [-2.0]])).tolist() == [3.0, -2.0]


@settings(deadline=None)
@given(first=LOGITS, second=LOGITS)
def test_softmax_of_two_is_the_sigmoid_of_their_difference(first: float, second: float) -> None:
    (found,) = relevance_scores("softmax", raw_scores(np.array([[first, second]])))
    assert found == pytest.approx(1 / (1 + math.exp(second - first)), rel=1e-12)
    assert found == relevance_scores("logit_diff", raw_scores(np.array([[first, second]])))[0]


@settings(deadline=None)
@given(logits=st.lists(LOGITS, min_size=2, max_size=6))
def test_softmax_of_many_is_the_first_ones_part(logits: list[float]) -> None:
    (found,) = relevance_scores("softmax", raw_scores(np.array([logits])))
    powers = [math.exp(logit - max(logits)) for logit in logits]
    assert found == pytest.approx(powers[0] / sum(powers), rel=1e-9, abs=1e-300)


def test_a_logit_passes_a_sigmoid() -> None:
    assert relevance_scores("logit", np.array([0.0, 2.0])).tolist() == [0.5, pytest.approx(1 / (1 + math.exp(-2)))]


def test_a_log_probability_is_a_probability() -> None:
    assert relevance_scores("prob", np.array([0.0, math.log(0.25)])).tolist() == [1.0, pytest.approx(0.25)]


@pytest.mark.parametrize("kind", ["softmax", "logit", "logit_diff"])
def test_no_logit_is_too_large(kind: RelevanceKind) -> None:
    with np.errstate(all="raise", under="ignore"):
        assert relevance_scores(kind, np.array([-1e4, 1e4])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "mode"), [("softmax", "logit"), ("logit", "logit"), ("logit_diff", "logit"), ("prob", "logprob")]
)
def test_only_a_probability_needs_the_whole_vocabulary(kind: RelevanceKind, mode: str) -> None:
    assert needed_score_mode(kind) == mode


@settings(deadline=None)
@given(rows=st.lists(st.lists(LOGITS, min_size=3, max_size=3), min_size=2, max_size=20))
def test_a_rows_score_does_not_depend_on_the_rows_beside_it(rows: list[list[float]]) -> None:
    together = raw_scores(np.array(rows))
    alone = [raw_scores(np.array([row]))[0] for row in rows]
    assert together.tolist() == alone
