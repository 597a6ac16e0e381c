"""Two evaluations of one model, put together: is the multi-item server equal to the serial one, and how much faster?

equivalence                        multi's scores against serial's of query + item
equivalence_query_plus_delimiter   multi's scores against serial's of query + delimiter + item: the same prompt
isolation                          how far the unchanged items of the multi-item server moved
performance                        serial's median time over multi's, for every item count that both have
"""

from __future__ import annotations

from prefixwise.bench.artifacts import (
    CountPerformance,
    EndpointEvaluation,
    Equivalence,
    IsolationSummary,
    MultiVsSerial,
    Scores,
    SemanticAlignment,
    Speedup,
)
from prefixwise.bench.files import now_utc
from prefixwise.bench.rules import Differences, score_differences
from prefixwise.contract.errors import ArtifactError


def combine(multi: EndpointEvaluation, serial: EndpointEvaluation) -> MultiVsSerial:
    """Raises ArtifactError where they are not of one model and one input."""
    alignment = check_pair(multi, serial)
    scores = multi.isolation.base_scores
    return MultiVsSerial(
        model=multi.model,
        multi_url=multi.url,
        serial_url=serial.url,
        labels=multi.labels,
        equivalence=_equivalence(scores, serial.isolation.base_scores),
        equivalence_query_plus_delimiter=_equivalence(scores, alignment.base_scores_query_plus_delimiter),
        isolation=_isolation_summary(multi),
        performance={
            count: _speedup(multi.performance[count], serial.performance[count])
            for count in sorted(multi.performance.keys() & serial.performance.keys(), key=int)
        },
        generated_at_utc=now_utc(),
        delimiter=multi.delimiter,
    )


def check_pair(multi: EndpointEvaluation, serial: EndpointEvaluation) -> SemanticAlignment:
    """What the serial one has of the aligned prompt. Raises ArtifactError."""
    for evaluation, mode in ((multi, "multi"), (serial, "serial")):
        if evaluation.mode != mode:
            raise ArtifactError(f"expected an evaluation of mode {mode}, got one of mode {evaluation.mode}")
    pairs = {
        "model": (multi.model, serial.model),
        "labels": (multi.labels, serial.labels),
        "delimiter": (multi.delimiter, serial.delimiter),
        "query_ids": (multi.isolation.query_ids, serial.isolation.query_ids),
        "item_ids": (multi.isolation.item_ids, serial.isolation.item_ids),
    }
    for what, (one, other) in pairs.items():
        if one != other:
            raise ArtifactError(f"both evaluations must have the same {what}, got {_short(one)} and {_short(other)}")
    if serial.semantic_alignment is None:
        raise ArtifactError("the serial evaluation has no semantic_alignment: expected query + delimiter, too")
    return serial.semantic_alignment


def differences(scores: Scores, reference: Scores) -> Differences:
    """Raises ArtifactError where they are not of one shape."""
    try:
        return score_differences(scores, reference)
    except ValueError as error:
        raise ArtifactError(str(error)) from None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _equivalence(scores: Scores, reference: Scores) -> Equivalence:
    found = differences(scores, reference)
    return Equivalence(
        max_abs_diff=found.max_abs_diff, mean_abs_diff=found.mean_abs_diff, num_compared=found.num_compared
    )


def _isolation_summary(multi: EndpointEvaluation) -> IsolationSummary:
    same, changed = multi.isolation.same_length_mutation, multi.isolation.changed_length_mutation
    return IsolationSummary(
        same_length_mutation_max_abs_diff=same.max_abs_diff_unchanged,
        same_length_mutation_mean_abs_diff=same.mean_abs_diff_unchanged,
        changed_length_mutation_max_abs_diff=changed.max_abs_diff_unchanged,
        changed_length_mutation_mean_abs_diff=changed.mean_abs_diff_unchanged,
    )


def _speedup(multi: CountPerformance, serial: CountPerformance) -> Speedup:
    return Speedup(
        speedup_vs_serial_p50=_ratio(serial.p50_sec, multi.p50_sec),
        speedup_vs_serial_p95=_ratio(serial.p95_sec, multi.p95_sec),
        multi_p50_sec=multi.p50_sec,
        serial_p50_sec=serial.p50_sec,
        multi_items_per_sec_p50=multi.items_per_sec_p50,
        serial_items_per_sec_p50=serial.items_per_sec_p50,
    )


def _ratio(serial_sec: float, multi_sec: float) -> float:
    if multi_sec <= 0:
        raise ArtifactError(f"latencies must be more than 0 s, got {multi_sec}")
    return serial_sec / multi_sec
