"""What people read of a comparison."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwise.bench.ab.report import cells_of, markdown_of, notes_of, problems_of
from prefixwise.bench.artifacts import AbResult, AbVariant


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


def test_the_page_has_what_was_run_and_a_row_for_each() -> None:
    lines = markdown_of(result(variant("dense"), WRONG)).splitlines()
    assert lines[0] == "# mask: dense vs wrong"
    assert lines[2:7] == [
        "- model: embedded",
        "- device: cpu (cpu), float32",
        "- requests: 20 query tokens, 10 items of 5; one query, its prefix kept",
        "- rounds: 5, in turns; runs of a variant in a round: 2",
        "- made: 2026-02-11T12:00:00Z",
    ]
    assert [line.split(" | ")[0] for line in lines if line.startswith("|")] == [
        "| variant",
        "| ---",
        "| dense",
        "| wrong",
    ]
    assert lines[-1].startswith("**the scores of wrong are not those of dense")
