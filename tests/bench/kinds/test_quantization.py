"""The metrics of `validate quantization`, by hand, and what its artifact must not say."""

from __future__ import annotations

import pytest

from prefixwise.bench.kinds.quantization import QuantizationRequest, judge_quantization, metrics_of
from prefixwise.bench.options import QuantizationBounds


def request(scores: list[float], expected: list[float]) -> QuantizationRequest:
    """Of two labels, whose scores sum to 1."""
    rows, others = ([[score, 1 - score] for score in each] for each in (scores, expected))
    return QuantizationRequest(request_id="r", scores=rows, reference_scores=others)


def test_equal_scores_are_equal_in_every_way() -> None:
    found = metrics_of([request([0.1, 0.9, 0.4], [0.1, 0.9, 0.4])]).model_dump()
    expected = {"max_abs_diff": 0.0, "mean_abs_diff": 0.0, "changed_labels": 0.0}
    assert found == {
        **dict.fromkeys(found, 1.0),
        **expected,
    }


def test_differences_count_every_score_of_every_request() -> None:
    found = metrics_of([request([0.5], [0.75]), request([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])])
    assert (found.max_abs_diff, found.mean_abs_diff) == (0.25, 0.0625)


def test_ranks_are_spearmans() -> None:
    """Ranks 1 2 3 4 against 2 1 4 3: 1 - 6 x 4 / (4 x 15); and two that are turned round."""
    swapped = request([0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.4, 0.3])
    turned = request([0.1, 0.2], [0.2, 0.1])
    found = metrics_of([swapped, turned])
    assert found.least_rank_correlation == pytest.approx(-1.0)
    assert found.rank_correlation == pytest.approx((0.6 - 1) / 2)


def test_equal_scores_share_their_rank() -> None:
    """Ranks 1.5 1.5 3 against 1 2 3: 1.5 / sqrt(1.5 x 2)."""
    found = metrics_of([request([0.1, 0.1, 0.3], [0.1, 0.2, 0.3])])
    assert found.rank_correlation == pytest.approx(0.75**0.5)


@pytest.mark.parametrize(("expected", "correlation"), [([0.5, 0.5], 1.0), ([0.4, 0.5], 0.0)])
def test_a_model_that_says_the_same_of_all_items_has_no_order(expected: list[float], correlation: float) -> None:
    assert metrics_of([request([0.3, 0.3], expected)]).rank_correlation == correlation


def test_the_best_items() -> None:
    """Of twelve items the two last change places with the two first: eight of the ten best stay, not the best."""
    scores = [item / 100 for item in range(12)]
    found = metrics_of([request(scores, [*scores[10:], *scores[2:10], *scores[:2]]), request([0.1], [0.2])])
    assert (found.top_1_agreement, found.top_10_agreement) == (0.5, 0.9)


def test_sides() -> None:
    assert metrics_of([request([0.6, 0.4, 0.4, 0.4], [0.4, 0.3, 0.2, 0.1])]).changed_labels == 0.25
    one_label = QuantizationRequest(request_id="r", scores=[[0.6], [0.7]], reference_scores=[[0.4], [0.9]])
    assert metrics_of([one_label]).changed_labels == 0.5


def test_tables_of_two_shapes_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="scores must be of one shape"):
        metrics_of([QuantizationRequest(request_id="r", scores=[[0.5]], reference_scores=[[0.5, 0.5]])])


def test_each_gate_has_its_own_bound() -> None:
    metrics = metrics_of([request([0.6, 0.2, 0.3], [0.4, 0.5, 0.3])])
    bounds = {
        "max_abs_diff": "max_abs_diff",
        "mean_abs_diff": "mean_abs_diff",
        "rank_correlation": "min_rank_correlation",
        "top_1_agreement": "min_top_1_agreement",
        "changed_labels": "max_changed_labels",
    }
    wide = {"max_abs_diff": 1.0, "mean_abs_diff": 1.0, "max_changed_labels": 1.0}
    loose = QuantizationBounds(**wide, min_rank_correlation=-1.0, min_top_1_agreement=0.0, min_top_10_agreement=0.0)
    passed = {name for name, check in judge_quantization(metrics, loose).items() if check.passed}
    assert passed == {*bounds, "top_10_agreement"} - {"rank_correlation"}  # a negative one never passes
    failed = {name for name, check in judge_quantization(metrics, QuantizationBounds()).items() if not check.passed}
    assert failed == bounds.keys()
