"""What must hold in the evaluation of an endpoint, and in what is combined from two of them."""

from __future__ import annotations

from typing import Any

from prefixwise.bench.artifacts import (
    CountPerformance,
    EndpointEvaluation,
    Isolation,
    IsolationSummary,
    MultiVsSerial,
    Mutation,
    Parity,
    Scores,
    Speedup,
)
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.rules import MAX_ABS_DIFF, mean, percentile, score_differences
from prefixwise.bench.validation.evaluation import mutation_of

# Where a parity artifact has the vectors behind a difference, it is computed again.
_PARITY_VECTORS = {
    "max_abs_diff_jax_serial_vs_torch_serial": ("jax_serial_scores", "torch_serial_scores"),
    "max_abs_diff_jax_multi_vs_torch_serial": ("jax_multi_scores", "torch_serial_scores"),
    "max_abs_diff_jax_multi_vs_torch_multi_semantic": ("jax_multi_scores", "torch_multi_semantic_scores"),
}
_GATED_COUNT = "32"


def check_endpoint(evaluation: EndpointEvaluation, found: Findings) -> None:
    """Isolation, alignment, times."""
    isolation, num_labels = evaluation.isolation, len(evaluation.labels)
    found.warn_of_few_labels("labels", evaluation.labels)
    if not evaluation.labels:
        found.fail("labels", "at least one id", "none")
        return
    if len(isolation.item_ids) < 2:
        found.fail("isolation.item_ids", "at least two items: one is changed, others are not", len(isolation.item_ids))
        return
    base = isolation.base_scores
    can_compare = _check_shape("isolation.base_scores", base, len(isolation.item_ids), num_labels, found)
    lengths = {"same_length_mutation": True, "changed_length_mutation": False}
    for name, is_same in lengths.items():
        mutation: Mutation = getattr(isolation, name)
        where = f"isolation.{name}"
        if _check_mutation(where, mutation, isolation, found):
            _check_length(where, mutation, isolation, found, is_same=is_same)
            is_whole = _check_shape(f"{where}.scores", mutation.scores, len(isolation.item_ids), num_labels, found)
            if is_whole and can_compare:
                _check_unchanged(where, mutation, base, found)
    _check_alignment(evaluation, found)
    for count, why in evaluation.failures.items():
        found.warn(f"failures.{count}", "times of so many items", why)
    for count, figures in evaluation.performance.items():
        _check_performance(count, figures, found)


def check_multi_vs_serial(combined: MultiVsSerial, found: Findings) -> None:
    """Speed-ups are ratios of the medians; a mean is never above its maximum."""
    pairs = {
        "equivalence": combined.equivalence,
        "equivalence_query_plus_delimiter": combined.equivalence_query_plus_delimiter,
    }
    for name, each in pairs.items():
        if not 0 <= each.mean_abs_diff <= each.max_abs_diff * (1 + 1e-9):
            found.fail(f"{name}.mean_abs_diff", f"from 0 to max_abs_diff, {each.max_abs_diff:.6g}", each.mean_abs_diff)
    found.warn_of_few_labels("labels", combined.labels)
    for count, figures in combined.performance.items():
        _check_speedup(f"performance.{count}", figures, found)
    if _GATED_COUNT not in combined.performance:
        found.warn("performance", f"{_GATED_COUNT} items, which a gate is on", f"{list(combined.performance)}")
    for name in IsolationSummary.model_fields:
        value = getattr(combined.isolation, name)
        if value is not None and value < 0:
            found.fail(f"isolation.{name}", "0 or more, as it is a difference", value)
        elif name.endswith("_max_abs_diff") and value != 0.0:
            found.warn(f"isolation.{name}", "0.0", value)


def _check_speedup(where: str, figures: Speedup, found: Findings) -> None:
    for name in ("multi_p50_sec", "serial_p50_sec"):
        if getattr(figures, name) <= 0:
            found.fail(f"{where}.{name}", "more than 0", getattr(figures, name))
            return
    ratio = figures.serial_p50_sec / figures.multi_p50_sec
    found.close(f"{where}.speedup_vs_serial_p50", ratio, figures.speedup_vs_serial_p50, "serial over multi")


def check_parity(parity: Parity, found: Findings) -> None:
    """Against the vectors, where they are there."""
    for name, (one, other) in _PARITY_VECTORS.items():
        value: float = getattr(parity, name)
        if value < 0:
            found.fail(name, "0 or more", value)
        scores, reference = found.document.get(one), found.document.get(other)
        if scores is not None and reference is not None:
            _check_difference(name, value, (one, scores), (other, reference), found)
        if value > MAX_ABS_DIFF:
            found.warn(name, f"at most {MAX_ABS_DIFF}", f"{value:.6g}")


def _check_difference(
    name: str, value: float, scores: tuple[str, Any], reference: tuple[str, Any], found: Findings
) -> None:
    names = f"{scores[0]} and {reference[0]}"
    try:
        expected = score_differences(scores[1], reference[1]).max_abs_diff
    except (ValueError, TypeError) as error:
        found.fail(names, "two tables of numbers, of one shape", error)
        return
    found.close(name, expected, value, f"by {names}")


def _check_shape(where: str, scores: Scores, num_items: int, num_labels: int, found: Findings) -> bool:
    before = len(found.errors)
    found.same(f"{where} length", num_items, len(scores), "item_ids")
    wrong = next((index for index, row in enumerate(scores) if len(row) != num_labels), None)
    if wrong is not None:
        found.same(f"{where}[{wrong}] length", num_labels, len(scores[wrong]), "labels")
    return len(found.errors) == before


def _check_mutation(where: str, mutation: Mutation, isolation: Isolation, found: Findings) -> bool:
    """Whether it can be read at all."""
    num_items = len(isolation.item_ids)
    if not 0 <= mutation.mutated_index < num_items:
        found.fail(f"{where}.mutated_index", f"from 0 to {num_items - 1}", mutation.mutated_index)
        return False
    if len(mutation.mutated_item_ids) != num_items:
        found.same(f"{where}.mutated_item_ids length", num_items, len(mutation.mutated_item_ids), "item_ids")
        return False
    changed = [index for index, item in enumerate(mutation.mutated_item_ids) if item != isolation.item_ids[index]]
    found.same(f"{where}.mutated_item_ids, where they differ from item_ids", [mutation.mutated_index], changed)
    return True


def _check_unchanged(where: str, mutation: Mutation, base: Scores, found: Findings) -> None:
    by_scores = mutation_of(base, mutation.scores, mutation.mutated_index, mutation.mutated_item_ids)
    diffs, expected = mutation.unchanged_item_abs_diffs, by_scores.unchanged_item_abs_diffs
    if len(diffs) != len(expected):
        wanted = f"a difference for each unchanged item, {len(expected)} of them"
        found.fail(f"{where}.unchanged_item_abs_diffs", wanted, len(diffs))
        return
    for index, (value, again) in enumerate(zip(diffs, expected, strict=True)):
        found.close(f"{where}.unchanged_item_abs_diffs[{index}]", again, value, "by the scores")
    found.close(f"{where}.max_abs_diff_unchanged", max(diffs), mutation.max_abs_diff_unchanged, "of its differences")
    found.close(f"{where}.mean_abs_diff_unchanged", mean(diffs), mutation.mean_abs_diff_unchanged, "of its differences")
    if max(expected) > 0:
        found.warn(f"{where}.max_abs_diff_unchanged", "0.0: items leave each other alone", max(expected))


def _check_length(where: str, mutation: Mutation, isolation: Isolation, found: Findings, *, is_same: bool) -> None:
    index = mutation.mutated_index
    before, after = len(isolation.item_ids[index]), len(mutation.mutated_item_ids[index])
    if (before == after) != is_same:
        expected = f"{before} tokens, as before" if is_same else f"another length than {before} tokens"
        found.fail(f"{where}.mutated_item_ids[{index}]", expected, f"{after} tokens")


def _check_alignment(evaluation: EndpointEvaluation, found: Findings) -> None:
    alignment = evaluation.semantic_alignment
    if alignment is None:
        if evaluation.mode == "serial":
            found.fail("semantic_alignment", "the field, in serial mode", "nothing")
        return
    expected = [*evaluation.isolation.query_ids, evaluation.delimiter]
    if alignment.query_plus_delimiter_ids != expected:
        got = f"{len(alignment.query_plus_delimiter_ids)} other ids"
        found.fail("semantic_alignment.query_plus_delimiter_ids", "query_ids and the delimiter", got)
    where = "semantic_alignment.base_scores_query_plus_delimiter"
    scores = alignment.base_scores_query_plus_delimiter
    _check_shape(where, scores, len(evaluation.isolation.item_ids), len(evaluation.labels), found)


def _check_performance(count: str, figures: CountPerformance, found: Findings) -> None:
    where = f"performance.{count}"
    if not count.isdecimal() or int(count) < 1:
        found.fail(where, "a number of items", count)
        return
    if not figures.latencies_sec or min(figures.latencies_sec) <= 0:
        found.fail(f"{where}.latencies_sec", "times of more than 0 s", figures.latencies_sec)
        return
    for percent in (50, 95):
        seconds = percentile(figures.latencies_sec, percent)
        found.close(f"{where}.p{percent}_sec", seconds, getattr(figures, f"p{percent}_sec"), "of latencies_sec")
        per_second = getattr(figures, f"items_per_sec_p{percent}")
        found.close(f"{where}.items_per_sec_p{percent}", int(count) / seconds, per_second, f"{count} / p{percent}")
    if len(figures.latencies_sec) == 1:
        found.warn(f"{where}.latencies_sec", "several, for a p95 with a meaning", 1)
