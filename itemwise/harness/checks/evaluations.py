"""What must hold in the evaluation of an endpoint, and in what is combined from two of them."""

from __future__ import annotations

from typing import Any

from itemwise.harness.artifacts import (
    CountPerformance,
    EndpointEvaluation,
    Isolation,
    MultiVsSerial,
    Mutation,
    Parity,
    Scores,
)
from itemwise.harness.checks.findings import Findings
from itemwise.harness.rules import MAX_ABS_DIFF, mean, percentile, score_differences

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
    _check_shape("isolation.base_scores", isolation.base_scores, len(isolation.item_ids), num_labels, found)
    lengths = {"same_length_mutation": True, "changed_length_mutation": False}
    for name, is_same in lengths.items():
        mutation: Mutation = getattr(isolation, name)
        if _check_mutation(f"isolation.{name}", mutation, isolation, num_labels, found):
            _check_length(f"isolation.{name}", mutation, isolation, found, is_same=is_same)
    _check_alignment(evaluation, found)
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
    for count, figures in combined.performance.items():
        where = f"performance.{count}"
        if figures.multi_p50_sec <= 0:
            found.fail(f"{where}.multi_p50_sec", "more than 0", figures.multi_p50_sec)
            continue
        ratio = figures.serial_p50_sec / figures.multi_p50_sec
        found.close(f"{where}.speedup_vs_serial_p50", ratio, figures.speedup_vs_serial_p50, "serial over multi")
    if _GATED_COUNT not in combined.performance:
        found.warn("performance", f"{_GATED_COUNT} items, which a gate is on", f"{list(combined.performance)}")
    for name, value in combined.isolation.model_dump().items():
        if name.endswith("_max_abs_diff") and value != 0.0:
            found.warn(f"isolation.{name}", "0.0", value)


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


def _check_mutation(where: str, mutation: Mutation, isolation: Isolation, num_labels: int, found: Findings) -> bool:
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
    is_whole = _check_shape(f"{where}.scores", mutation.scores, num_items, num_labels, found)
    if is_whole and len(isolation.base_scores) == num_items:
        _check_unchanged(where, mutation, isolation.base_scores, found)
    return True


def _check_unchanged(where: str, mutation: Mutation, base: Scores, found: Findings) -> None:
    diffs = mutation.unchanged_item_abs_diffs
    if not diffs:
        found.fail(f"{where}.unchanged_item_abs_diffs", "a difference for each unchanged item", "none")
        return
    found.close(f"{where}.max_abs_diff_unchanged", max(diffs), mutation.max_abs_diff_unchanged, "of its differences")
    found.close(f"{where}.mean_abs_diff_unchanged", mean(diffs), mutation.mean_abs_diff_unchanged, "of its differences")
    keep = [index for index in range(len(base)) if index != mutation.mutated_index]
    by_scores = score_differences([mutation.scores[index] for index in keep], [base[index] for index in keep])
    found.close(f"{where}.unchanged_item_abs_diffs, the largest", by_scores.max_abs_diff, max(diffs), "by the scores")
    if by_scores.max_abs_diff > 0:
        found.warn(f"{where}.max_abs_diff_unchanged", "0.0: items leave each other alone", by_scores.max_abs_diff)


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
