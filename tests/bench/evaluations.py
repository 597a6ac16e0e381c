"""Evaluations with metrics that are easy to work with: two items, two labels, one changed item."""

from __future__ import annotations

from typing import Any

from prefixwise.bench.kinds.base import Scores
from prefixwise.bench.kinds.evaluation import (
    CountPerformance,
    EndpointEvaluation,
    Isolation,
    Mutation,
    SemanticAlignment,
)

QUERY = [7, 8, 9]
ITEMS = [[1, 2], [3]]
LABELS = [4, 5]
DELIMITER = 6
MULTI_SCORES = [[0.5, 0.5], [0.25, 0.75]]


def mutation(moved: float) -> Mutation:
    """The second item changed, and the first moved so far."""
    return Mutation(
        mutated_index=1,
        mutated_item_ids=[2],
        scores=[[0.5 + moved, 0.5 - moved], [0.1, 0.9]],
        unchanged_item_abs_diffs=[moved],
        max_abs_diff_unchanged=moved,
        mean_abs_diff_unchanged=moved,
    )


def isolation(base: Scores, same: float = 0.0, changed: float = 0.0) -> Isolation:
    return Isolation(
        query_ids=QUERY,
        item_ids=ITEMS,
        base_scores=base,
        same_length_mutation=mutation(same),
        changed_length_mutation=mutation(changed),
    )


def took(p50: float, p95: float = 4.0) -> CountPerformance:
    return CountPerformance(
        latencies_sec=[p50], p50_sec=p50, p95_sec=p95, items_per_sec_p50=1 / p50, items_per_sec_p95=1 / p95
    )


def evaluation(kind: str, base: Scores, times: dict[str, CountPerformance], **more: Any) -> EndpointEvaluation:
    """`more` are its fields, in place of those that follow from `kind`, `base` and `times`."""
    fields = {
        "mode": kind,
        "url": f"http://{kind}/v1/score",
        "model": "a-model",
        "labels": LABELS,
        "delimiter": DELIMITER,
        "isolation": isolation(base),
        "performance": times,
        **more,
    }
    return EndpointEvaluation(**fields)


def multi_evaluation(base: Scores = MULTI_SCORES, **more: Any) -> EndpointEvaluation:
    return evaluation("multi", base, {"8": took(0.5), "32": took(1.0, 2.0), "1": took(0.25)}, **more)


def serial_evaluation(base: Scores = MULTI_SCORES, aligned: Scores = MULTI_SCORES, **more: Any) -> EndpointEvaluation:
    alignment = SemanticAlignment(
        query_plus_delimiter_ids=[*QUERY, DELIMITER], base_scores_query_plus_delimiter=aligned
    )
    times = {"1": took(0.25), "8": took(1.5), "32": took(6.0, 9.0), "64": took(9.0)}
    return evaluation("serial", base, times, **{"semantic_alignment": alignment, **more})
