"""From logits and log-probabilities to scores: values worked out by hand, extremes, rows that stand alone."""

from __future__ import annotations

import math
from math import log
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.contract.request import LabelScoring, ScoreMode
from prefixwise.contract.scores import (
    Float32Array,
    Float64Array,
    RelevanceKind,
    needed_score_mode,
    needs_logsumexp,
    raw_scores,
    relevance_scores,
    scores_from_logits,
    scores_from_logprobs,
)

MODES: tuple[ScoreMode, ...] = get_args(ScoreMode)
LARGEST = float(np.finfo(np.float32).max)


def floats(rows: list[list[float]]) -> Float32Array:
    return np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("mode", "logits", "log_normalizer", "expected"),
    [
        # e^0 : e^ln3 = 1 : 3, whatever is added to both
        ("softmax", [0, log(3)], None, [1 / 4, 3 / 4]),
        ("softmax", [100, 100 + log(3)], None, [1 / 4, 3 / 4]),
        ("softmax", [log(1), log(2), log(5)], None, [1 / 8, 2 / 8, 5 / 8]),
        ("softmax", [-7], None, [1]),
        # 2 and 3 out of a vocabulary whose exponentials add up to 10
        ("prob", [log(2), log(3)], log(10), [0.2, 0.3]),
        ("logprob", [log(2), log(3)], log(10), [log(0.2), log(0.3)]),
        ("logprob", [-1.5], 2.5, [-4.0]),
        ("logit", [1.5, -2], None, [1.5, -2]),
        ("logit_diff", [1.5, -2], None, [3.5]),
        # 1 / (1 + 1/3) and 1 / (1 + 3)
        ("sigmoid", [log(3)], None, [3 / 4]),
        ("sigmoid", [-log(3)], None, [1 / 4]),
        ("sigmoid", [5 + log(3), 5], None, [3 / 4]),
        ("sigmoid", [5, 5 + log(3)], None, [1 / 4]),
        ("sigmoid", [0], None, [1 / 2]),
    ],
)
def test_scores_of_one_token_labels(
    mode: ScoreMode, logits: list[float], log_normalizer: float | None, expected: list[float]
) -> None:
    normalizers = None if log_normalizer is None else np.array([log_normalizer], np.float32)
    scores = scores_from_logits(mode, floats([logits]), normalizers)
    assert scores.dtype == np.float64
    assert scores.shape == (1, len(expected))
    np.testing.assert_allclose(scores[0], expected, rtol=2e-6)  # the inputs are rounded to float32


@pytest.mark.parametrize(
    ("mode", "logprobs", "expected"),
    [
        ("softmax", [log(0.1), log(0.3)], [1 / 4, 3 / 4]),
        ("softmax", [-2000, -2000 + log(3)], [1 / 4, 3 / 4]),  # long labels: each probability alone is 0.0
        ("prob", [log(0.1), log(0.3)], [0.1, 0.3]),
        ("logprob", [-12.5, -3.25], [-12.5, -3.25]),
        ("logit_diff", [-12.5, -3.25], [-9.25]),
        ("sigmoid", [log(0.3), log(0.1)], [3 / 4]),
    ],
)
def test_scores_of_labels_of_many_tokens(mode: ScoreMode, logprobs: list[float], expected: list[float]) -> None:
    scores = scores_from_logprobs(mode, np.array([logprobs]))
    assert scores.shape == (1, len(expected))
    np.testing.assert_allclose(scores[0], expected, rtol=1e-12)


def test_rows_and_columns_keep_their_order() -> None:
    logits = floats([[log(1), log(3)], [log(4), log(1)]])
    scores = scores_from_logits("prob", logits, np.array([log(10), log(5)], np.float32))
    np.testing.assert_allclose(scores, [[0.1, 0.3], [0.8, 0.2]], rtol=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_no_items_give_no_rows(mode: ScoreMode) -> None:
    num_columns = 1 if mode in ("logit_diff", "sigmoid") else 2
    scores = scores_from_logits(mode, np.zeros((0, 2), np.float32), np.zeros(0, np.float32))
    assert scores.shape == (0, num_columns)


@pytest.mark.parametrize(
    ("mode", "logits", "expected"),
    [
        ("softmax", [LARGEST, -LARGEST], [1, 0]),
        ("softmax", [LARGEST, LARGEST], [0.5, 0.5]),
        ("softmax", [-LARGEST, -LARGEST], [0.5, 0.5]),
        ("prob", [-LARGEST, 0], [0, 1]),
        ("logit_diff", [LARGEST, -LARGEST], [2 * LARGEST]),
        ("sigmoid", [LARGEST], [1]),
        ("sigmoid", [-LARGEST], [0]),
        ("sigmoid", [LARGEST, -LARGEST], [1]),
    ],
)
def test_the_largest_logits_overflow_nowhere(mode: ScoreMode, logits: list[float], expected: list[float]) -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        scores = scores_from_logits(mode, floats([logits]), np.zeros(1, np.float32))
    assert scores[0].tolist() == expected


def test_sigmoid_keeps_its_precision_far_below_zero() -> None:
    scores = scores_from_logits("sigmoid", floats([[-50]]), None)
    np.testing.assert_allclose(scores, np.exp([[-50.0]]), rtol=1e-15)


def test_a_normalizer_rounded_below_its_logit_gives_no_probability_above_one() -> None:
    logits, normalizers = floats([[28.000002]]), np.array([28], np.float32)
    assert logits[0, 0] > normalizers[0]
    assert scores_from_logits("prob", logits, normalizers).tolist() == [[1.0]]
    assert scores_from_logits("logprob", logits, normalizers).tolist() == [[0.0]]
    assert scores_from_logprobs("prob", np.array([[1e-6]])).tolist() == [[1.0]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("label_scoring", get_args(LabelScoring))
def test_the_whole_vocabulary_is_needed_only_for_probabilities(mode: ScoreMode, label_scoring: LabelScoring) -> None:
    expected = label_scoring == "sequence" or mode in {"prob", "logprob"}
    assert needs_logsumexp(mode, label_scoring) == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_normalizer_is_noticed_exactly_where_one_is_needed(mode: ScoreMode) -> None:
    if not needs_logsumexp(mode, "single"):
        assert scores_from_logits(mode, floats([[1, 2]]), None).shape[0] == 1
        return
    with pytest.raises(ValueError, match=f"{mode} needs logsumexp"):
        scores_from_logits(mode, floats([[1, 2]]), None)


@pytest.mark.parametrize(("mode", "num_labels"), [("logit", 1), ("logit", 2), ("sigmoid", 1)])
def test_a_label_of_many_tokens_has_no_raw_logit(mode: ScoreMode, num_labels: int) -> None:
    with pytest.raises(ValueError, match=f"{mode} needs a raw logit"):
        scores_from_logprobs(mode, np.zeros((1, num_labels)))


@pytest.mark.parametrize(("mode", "num_labels"), [("logit_diff", 1), ("logit_diff", 3), ("sigmoid", 3)])
def test_a_comparison_takes_two_labels(mode: ScoreMode, num_labels: int) -> None:
    with pytest.raises(ValueError, match=f"{mode} compares two labels, got {num_labels}"):
        scores_from_logits(mode, np.zeros((1, num_labels), np.float32), None)


def score(mode: ScoreMode, label_scoring: LabelScoring, logits: Float32Array) -> Float64Array:
    """Either function on the same numbers, with a normalizer that is a function of the row alone."""
    if label_scoring == "single":
        return scores_from_logits(mode, logits, logits[:, 0] + np.float32(3))
    return scores_from_logprobs(mode, logits.astype(np.float64, order="K") - 50)


CASES = [(mode, "single") for mode in MODES] + [(mode, "sequence") for mode in MODES if mode != "logit"]


@pytest.mark.parametrize(("mode", "label_scoring"), CASES)
@settings(max_examples=25)  # of each mode; an example is up to 70 rows, one by one
@given(
    num_items=st.integers(1, 70),
    num_labels=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_row_does_not_depend_on_other_rows_or_on_the_layout(
    mode: ScoreMode,
    label_scoring: LabelScoring,
    num_items: int,
    num_labels: int,
    seed: int,
    data: st.DataObject,
) -> None:
    if mode in ("logit_diff", "sigmoid"):
        num_labels = 2
    logits = np.random.default_rng(seed).normal(0, 8, (num_items, num_labels)).astype(np.float32)
    whole = score(mode, label_scoring, logits)

    row_by_row = [score(mode, label_scoring, logits[row : row + 1]) for row in range(num_items)]
    np.testing.assert_array_equal(np.concatenate(row_by_row), whole)

    chosen = data.draw(st.lists(st.integers(0, num_items - 1), min_size=1, max_size=10))
    np.testing.assert_array_equal(score(mode, label_scoring, logits[chosen]), whole[chosen])

    np.testing.assert_array_equal(score(mode, label_scoring, np.asfortranarray(logits)), whole)
    strided = np.repeat(np.repeat(logits, 2, axis=0), 3, axis=1)[::2, ::3]
    np.testing.assert_array_equal(score(mode, label_scoring, strided), whole)


@given(st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=12))
def test_softmax_is_a_distribution(logits: list[float]) -> None:
    scores = scores_from_logits("softmax", floats([logits]), None)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert scores.sum() == pytest.approx(1, abs=1e-12)


@given(st.floats(-LARGEST, LARGEST, width=32), st.floats(-LARGEST, LARGEST, width=32))
def test_sigmoid_of_two_labels_is_the_softmax_of_the_first(first: float, second: float) -> None:
    logits = floats([[first, second]])
    sigmoid = scores_from_logits("sigmoid", logits, None)
    softmax = scores_from_logits("softmax", logits, None)
    np.testing.assert_allclose(sigmoid[:, 0], softmax[:, 0], rtol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_the_input_is_left_alone_and_never_handed_out(mode: ScoreMode) -> None:
    logits = np.array([[1.0, 2.0]], np.float64)  # already float64: a view would be possible
    scores = scores_from_logits(mode, logits, np.array([3.0]))  # type: ignore[arg-type]
    scores[:] = 99
    assert logits.tolist() == [[1.0, 2.0]]


# From label scores to relevance


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
