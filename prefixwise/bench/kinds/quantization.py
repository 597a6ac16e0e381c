"""The gate of `validate quantization`: the scores of a quantised model against those of a reference, by their bounds.

Items are ranked by the score of the first label, within each request. An item's side is its label of the highest score;
of one label alone, whether the score is above 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from prefixwise.bench.kinds.base import Artifact, Scores
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.gate_report import GateCheck, Operator, check_metric, is_within
from prefixwise.bench.options import QuantizationBounds
from prefixwise.bench.render.document import NONE, Block, table
from prefixwise.bench.render.numbers import difference, short_number
from prefixwise.bench.rules import mean, score_differences

QUANTIZATION_VERSION: Literal["score_quantization_v1"] = "score_quantization_v1"
TOP = 10
_MIDDLE = 0.5


class QuantizationRequest(Artifact):
    """One request, and what both models said: a row for each item, a number for each label."""

    request_id: str
    scores: Scores = Field(min_length=1)
    reference_scores: Scores = Field(min_length=1)


class QuantizationMetrics(Artifact):
    """Over all requests."""

    max_abs_diff: float
    mean_abs_diff: float
    rank_correlation: float  # Spearman's, the mean over requests
    least_rank_correlation: float
    top_1_agreement: float  # the share of requests with the same best item
    top_10_agreement: float  # the share of the ten best items that are the same, the mean over requests
    changed_labels: float  # the share of items that changed sides


class QuantizationCheck(Artifact):
    """`validate quantization`."""

    schema_version: Literal["score_quantization_v1"]
    generated_at_utc: str
    model: str
    reference: str
    workload: str  # where the requests are from
    model_server: dict[str, Any] = Field(default_factory=dict)  # backend, dtype, quantisation, flags
    reference_server: dict[str, Any] = Field(default_factory=dict)
    metrics: QuantizationMetrics
    checks: dict[str, GateCheck]
    all_pass: bool
    requests: list[QuantizationRequest] = Field(min_length=1)


_RULES: dict[str, tuple[str, Operator]] = {  # by the metric: the bound's name, and how they compare
    "max_abs_diff": ("max_abs_diff", "<="),
    "mean_abs_diff": ("mean_abs_diff", "<="),
    "rank_correlation": ("min_rank_correlation", ">="),
    "top_1_agreement": ("min_top_1_agreement", ">="),
    "top_10_agreement": ("min_top_10_agreement", ">="),
    "changed_labels": ("max_changed_labels", "<="),
}


def judge_quantization(metrics: QuantizationMetrics, bounds: QuantizationBounds) -> dict[str, GateCheck]:
    """Each metric against its bound."""
    content = metrics.model_dump()
    return {
        metric: check_metric(content, metric, comparison, getattr(bounds, bound))
        for metric, (bound, comparison) in _RULES.items()
    }


def metrics_of(requests: Sequence[QuantizationRequest]) -> QuantizationMetrics:
    """Raises ValueError where the scores of a request are not of one shape."""
    differences = [score_differences(each.scores, each.reference_scores) for each in requests]
    num_scores = sum(each.num_compared for each in differences)
    correlations = [_correlation(each) for each in requests]
    sides = [side != other for each in requests for side, other in zip(*map(_sides, _both(each)), strict=True)]
    return QuantizationMetrics(
        max_abs_diff=max(each.max_abs_diff for each in differences),
        mean_abs_diff=sum(each.mean_abs_diff * each.num_compared for each in differences) / num_scores,
        rank_correlation=mean(correlations),
        least_rank_correlation=min(correlations),
        top_1_agreement=mean([_agreement(each, 1) for each in requests]),
        top_10_agreement=mean([_agreement(each, TOP) for each in requests]),
        changed_labels=mean(sides),
    )


def _both(request: QuantizationRequest) -> tuple[Scores, Scores]:
    return request.scores, request.reference_scores


def _sides(scores: Scores) -> list[int]:
    return [row.index(max(row)) if len(row) > 1 else int(row[0] > _MIDDLE) for row in scores]


def _agreement(request: QuantizationRequest, count: int) -> float:
    count = min(count, len(request.scores))
    best, expected = (set(_order(scores)[:count]) for scores in _both(request))
    return len(best & expected) / count


def _order(scores: Scores) -> list[int]:
    """The items by the first label's score, the highest first; equal ones in the order of the request."""
    return sorted(range(len(scores)), key=lambda item: -scores[item][0])


def _correlation(request: QuantizationRequest) -> float:
    """Of ranks. Where all scores of one model are equal it has none: 1 where those of the other are, too, else 0."""
    ranks, expected = (_ranks([row[0] for row in scores]) for scores in _both(request))
    centre = (len(ranks) + 1) / 2
    moments = [
        sum((a - centre) * (b - centre) for a, b in zip(*pair, strict=True))
        for pair in ((ranks, expected), (ranks, ranks), (expected, expected))
    ]
    both = moments[1] * moments[2]
    return moments[0] / both**0.5 if both else float(moments[1] == moments[2])


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for item in order[start:stop]:
            ranks[item] = (start + 1 + stop) / 2
        start = stop
    return ranks


def check_quantization(check: QuantizationCheck, found: Findings) -> None:
    """Metrics follow from the scores, gates from the metrics."""
    try:
        again = metrics_of(check.requests)
    except ValueError as error:
        found.fail("requests", "scores of both models in one shape, of one item and one label at least", error)
        return
    for name, value in again.model_dump().items():
        found.close(f"metrics.{name}", value, getattr(check.metrics, name), "by the scores")
    for name, (_, comparison) in _RULES.items():
        if name not in check.checks:
            found.fail(f"checks.{name}", "the gate", "nothing")
            continue
        gate = check.checks[name]
        found.close(f"checks.{name}.value", getattr(check.metrics, name), gate.value, "the metric")
        found.same(f"checks.{name}.comparison", comparison, gate.comparison, "of this gate")
        found.same(f"checks.{name}.pass", is_within(gate), gate.passed, f"{gate.value} {comparison} {gate.bound:g}")
        if not gate.passed:
            found.warn(f"checks.{name}.pass", "true", f"false: {gate.detail}")
    all_pass = _RULES.keys() <= check.checks.keys() and all(gate.passed for gate in check.checks.values())
    found.same("all_pass", all_pass, check.all_pass, "by its checks")


def quantization_blocks(check: QuantizationCheck) -> tuple[Block, ...]:
    """Both models, and each request. The gates are among all gates of the report."""
    names = {"model": check.model_server, "reference": check.reference_server}
    facts = ("checkpoint_quantization", "dtype", "backend", "flags")
    servers = [
        (getattr(check, who), *(str(server.get(fact) or NONE) for fact in facts)) for who, server in names.items()
    ]
    rows = [_row(each) for each in check.requests]
    return (
        *table("Models", ("model", "quantisation", "dtype", "backend", "flags"), servers, numeric=False),
        *table(
            f"Requests of {check.workload}", ("request", "items", "max abs diff", "rank correlation", "top 10"), rows
        ),
    )


def _row(request: QuantizationRequest) -> tuple[str, ...]:
    alone = metrics_of([request])
    return (
        request.request_id,
        str(len(request.scores)),
        difference(alone.max_abs_diff),
        short_number(alone.rank_correlation),
        short_number(alone.top_10_agreement),
    )
