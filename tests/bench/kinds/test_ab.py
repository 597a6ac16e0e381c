"""What people read of a comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixwise.bench.kinds.ab import (
    AbResult,
    AbRun,
    AbVariant,
    cells_of,
    geometric_mean,
    notes_of,
    problems_of,
    round_medians,
    speed_ratio,
    student_quantile,
)
from prefixwise.bench.render.markdown import report_markdown
from prefixwise.bench.run.report import report_of


def variant(name: str, **changes: Any) -> AbVariant:
    body: dict[str, Any] = {
        "name": name,
        "server_flags": [],
        "request_fields": {},
        "server_config": {"devices": {"device": "cpu", "kind": "cpu", "dtype": "float32"}},
        "status": "ok",
        "failure": None,
        "time_ms": 2000.0,
        "median_ms": 1900.0,
        "p95_ms": 3000.0,
        "items_per_sec": 5000.0,
        "speed_vs_first": {"ratio": 2.0, "low": 1.9, "high": 2.1, "confidence": 0.95, "num_rounds": 5},
        "scores_vs_first": {"max_abs_diff": 0.0, "mean_abs_diff": 0.0, "num_compared": 4},
        "scores_agree": True,
        "runs": [],
    }
    return AbVariant.model_validate({**body, **changes})


WRONG = variant(
    "wrong", scores_agree=False, scores_vs_first={"max_abs_diff": 0.03, "mean_abs_diff": 0.02, "num_compared": 4}
)


FAILED = variant(
    "broken",
    status="failed",
    failure="oom: too large",
    time_ms=None,
    median_ms=None,
    p95_ms=None,
    items_per_sec=None,
    speed_vs_first=None,
    scores_vs_first=None,
    scores_agree=False,
)


def result(*variants: AbVariant) -> AbResult:
    shape = {"query_tokens": 20, "num_items": 10, "item_tokens": 5, "label_token_ids": [1], "vocab_size": 9}
    return AbResult.model_validate(
        {
            "schema_version": "score_ab_v1",
            "generated_at_utc": "2026-02-11T12:00:00Z",
            "model": None,
            "compare": "mask",
            "geometry": {**shape, "distinct_queries": 0},
            "cached": True,
            "rounds": 5,
            "runs_per_round": 2,
            "warmup_runs": 1,
            "seed": 0,
            "correctness_thresholds": {"max_abs_diff": 0.02, "mean_abs_diff": 0.01},
            "variants": [each.model_dump() for each in variants],
            "notes": [],
        }
    )


@pytest.mark.parametrize(
    ("shown", "cells"),
    [
        (
            variant("dense"),
            ("dense", "2,000.0", "3,000.0", "5,000.0", "2.000x", "1.900 to 2.100", "0.00e+00", "0.00e+00", "agree"),
        ),
        (
            WRONG,
            ("wrong", "2,000.0", "3,000.0", "5,000.0", "2.000x", "1.900 to 2.100", "3.00e-02", "2.00e-02", "DIFFER"),
        ),
        (FAILED, ("broken", "-", "-", "-", "-", "-", "-", "-", "failed")),
    ],
)
def test_a_row_says_it_all(shown: AbVariant, cells: tuple[str, ...]) -> None:
    assert cells_of(shown) == cells


def test_one_round_has_no_interval() -> None:
    one = {"ratio": 2.0, "low": None, "high": None, "confidence": 0.95, "num_rounds": 1}
    assert cells_of(variant("x", speed_vs_first=one))[4:6] == ("2.000x", "-")


def test_what_is_shown_of_a_file_without_times_is_the_median_that_its_rates_are_by() -> None:
    assert cells_of(variant("x", time_ms=None))[1] == "1,900.0"


def test_few_rounds_and_unfinished_ones_are_noted() -> None:
    assert notes_of(4, 4) == ["4 rounds make a wide interval: --rounds 10 or more narrow it"]
    assert notes_of(5, 5) == notes_of(1, 1) == []  # one has no interval at all
    assert notes_of(6, 10) == ["cut short: 6 of 10 rounds were finished"]


def test_problems_are_named() -> None:
    assert problems_of(result(variant("dense"), WRONG, FAILED)) == [
        "the scores of wrong are not those of dense: expected max <= 0.02 and mean <= 0.01, got 0.03 and 0.02",
        "broken failed: oom: too large",
    ]
    assert problems_of(result(variant("dense"), variant("segment"))) == []


def test_the_page_says_how_it_was_measured_and_has_a_row_for_each() -> None:
    text = report_markdown(report_of(result(variant("dense"), WRONG), "ab.json"))
    lines = text.splitlines()
    assert lines[0] == "# Variants (2026-02-11)"
    assert "## Variants: dense vs wrong" in lines
    assert "5 rounds of 2 runs in turns; 20 query tokens, 10 items of 5 tokens, one query with a cached prefix" in text
    assert "; model embedded on cpu, cpu, float32. A time is " in text
    header = next(place for place, line in enumerate(lines) if line.startswith("| variant | "))
    rows = [line.split(" | ") for line in lines[header + 2 : header + 4]]
    assert [(row[0], row[-1]) for row in rows] == [("| dense", "agree |"), ("| wrong", "**DIFFER** |")]
    assert lines[-1].startswith("- the scores of wrong are not those of dense")


def test_the_ratio_is_the_geometric_mean_over_rounds() -> None:
    """1 and 4: their geometric mean is 2. The logarithms are ln 2 off it, so the error of their mean is ln 2, too."""
    found = speed_ratio([1.0, 4.0], [1.0, 1.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 2.0 / 2**12.7062, 2.0 * 2**12.7062), rel=1e-4)
    assert (found.confidence, found.num_rounds) == (0.95, 2)


def test_the_ratio_is_that_of_the_geometric_means() -> None:
    first, other = [1.0, 1.2, 0.9, 1.1, 1.3], [0.5, 0.7, 0.6, 0.5, 0.4]
    found = speed_ratio(first, other)
    assert found is not None
    assert found.ratio == pytest.approx(geometric_mean(first) / geometric_mean(other), rel=1e-12)


def test_a_round_counts_the_median_of_its_runs() -> None:
    rows = [(0, 3.0), (1, 5.0), (0, 1.0), (1, 6.0), (0, 100.0)]
    assert round_medians([AbRun(round_index=index, place=0, seconds=time) for index, time in rows]) == [3.0, 5.5]


@pytest.mark.parametrize(
    ("freedom", "at_95", "at_99"),
    [
        (1, 12.7062, 63.6567),
        (2, 4.30265, 9.92484),
        (3, 3.18245, 5.84091),
        (4, 2.77645, 4.60409),
        (9, 2.26216, 3.24984),
        (10, 2.22814, 3.16927),
        (30, 2.04227, 2.75000),
        (99, 1.98422, 2.62641),
        (1000, 1.96234, 2.58075),
    ],
)
def test_the_quantiles_are_those_of_the_tables(freedom: int, at_95: float, at_99: float) -> None:
    found = (student_quantile(0.95, freedom), student_quantile(0.99, freedom))
    assert found == pytest.approx((at_95, at_99), rel=5e-6)


def test_rounds_that_agree_leave_no_doubt_however_slow_they_were() -> None:
    """A machine that is ten times slower in one round slows both down: paired, it cancels."""
    found = speed_ratio([3.0, 30.0, 3.0], [2.0, 20.0, 2.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_inverse_has_the_inverse_interval() -> None:
    first, other = [1.0, 1.2, 0.9, 1.1, 1.3], [0.5, 0.7, 0.6, 0.5, 0.4]
    there, back = speed_ratio(first, other), speed_ratio(other, first)
    assert there is not None and back is not None
    assert there.low is not None and there.high is not None
    assert (back.ratio, back.low, back.high) == pytest.approx((1 / there.ratio, 1 / there.high, 1 / there.low))


def test_one_round_says_nothing_about_doubt() -> None:
    found = speed_ratio([2.0], [1.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == (2.0, None, None)
    assert speed_ratio([], []) is None


def test_the_same_times_give_the_same_interval() -> None:
    assert speed_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]) == speed_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_the_interval_has_the_true_ratio_as_often_as_it_says(rounds: int) -> None:
    """2,000 measurements with noise of 20 % in both variants, true ratio 1.5: 95 of 100 intervals have it."""
    rng = np.random.default_rng(rounds)
    hits = 0
    for _ in range(2000):
        first, other = 1.5 * np.exp(rng.normal(0, 0.2, rounds)), np.exp(rng.normal(0, 0.2, rounds))
        found = speed_ratio(list(first), list(other))
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= 1.5 <= found.high
    assert 0.92 <= hits / 2000 <= 0.98
