"""The evaluation of one endpoint: isolation, alignment, speed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from prefixwise.bench.kinds.base import Artifact, Scores, date_of
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.render.document import Block, Bullets, Card, Chart, Charts, Report, Section, table
from prefixwise.bench.render.numbers import difference, short_number
from prefixwise.bench.render.svg import line_chart
from prefixwise.bench.rules import item_differences, mean, percentile


def _of_the_changed_item(found: object, info: ValidationInfo) -> object:
    """From the items of prefixwise 0.1, which wrote all of them."""
    index = info.data.get("mutated_index")
    if not isinstance(found, list) or not isinstance(index, int) or not 0 <= index < len(found):
        return found
    return found[index] if all(isinstance(each, list) for each in found) else found


class Mutation(Artifact):
    """One item changed: what became of the rest."""

    mutated_index: int
    mutated_item_ids: Annotated[
        list[int], BeforeValidator(_of_the_changed_item, json_schema_input_type=list[int] | list[list[int]])
    ]
    scores: Scores
    unchanged_item_abs_diffs: list[float]
    max_abs_diff_unchanged: float
    mean_abs_diff_unchanged: float


class Isolation(Artifact):
    """The same items, one of them changed."""

    query_ids: list[int]
    item_ids: list[list[int]]
    base_scores: Scores
    same_length_mutation: Mutation
    changed_length_mutation: Mutation


class CountPerformance(Artifact):
    """So many items at a time."""

    latencies_sec: list[float]
    p50_sec: float
    p95_sec: float
    items_per_sec_p50: float
    items_per_sec_p95: float


class SemanticAlignment(Artifact):
    """What a serial server says to the prompt that a multi-item server makes: query, delimiter, item."""

    query_plus_delimiter_ids: list[int]
    base_scores_query_plus_delimiter: Scores


class EndpointEvaluation(Artifact):
    """`validate endpoint`."""

    mode: Literal["multi", "serial"]
    url: str
    model: str
    labels: list[int]
    delimiter: int
    isolation: Isolation
    performance: dict[str, CountPerformance]
    semantic_alignment: SemanticAlignment | None = None
    generated_at_utc: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # what the inputs and runs follow from
    server_config: dict[str, Any] = Field(default_factory=dict)  # As the server reports it
    failures: dict[str, str] = Field(default_factory=dict)  # item counts that have no performance, and why


def mutation_of(base: Scores, scores: Scores, index: int, mutated: list[int]) -> Mutation:
    """For each unchanged item the largest difference of its labels' scores. `mutated`: the changed item."""
    diffs = [diff for place, diff in enumerate(item_differences(scores, base)) if place != index]
    return Mutation(
        mutated_index=index,
        mutated_item_ids=mutated,
        scores=scores,
        unchanged_item_abs_diffs=diffs,
        max_abs_diff_unchanged=max(diffs),
        mean_abs_diff_unchanged=mean(diffs),
    )


def performance_of(count: int, latencies_sec: list[float]) -> CountPerformance:
    """The metrics of at least one run."""
    p50, p95 = percentile(latencies_sec, 50), percentile(latencies_sec, 95)
    return CountPerformance(
        latencies_sec=latencies_sec,
        p50_sec=p50,
        p95_sec=p95,
        items_per_sec_p50=count / p50,
        items_per_sec_p95=count / p95,
    )


def check_endpoint(evaluation: EndpointEvaluation, found: Findings) -> None:
    """Check isolation, alignment and times."""
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
    for count, metrics in evaluation.performance.items():
        _check_performance(count, metrics, found)


def _check_shape(where: str, scores: Scores, num_items: int, num_labels: int, found: Findings) -> bool:
    before = len(found.errors)
    found.same(f"{where} length", num_items, len(scores), "item_ids")
    wrong = next((index for index, row in enumerate(scores) if len(row) != num_labels), None)
    if wrong is not None:
        found.same(f"{where}[{wrong}] length", num_labels, len(scores[wrong]), "labels")
    return len(found.errors) == before


def _check_mutation(where: str, mutation: Mutation, isolation: Isolation, found: Findings) -> bool:
    """Returns False where the mutation cannot be checked further."""
    num_items = len(isolation.item_ids)
    if not 0 <= mutation.mutated_index < num_items:
        found.fail(f"{where}.mutated_index", f"from 0 to {num_items - 1}", mutation.mutated_index)
        return False
    if mutation.mutated_item_ids == isolation.item_ids[mutation.mutated_index]:
        expected = f"other ids than item_ids[{mutation.mutated_index}]"
        found.fail(f"{where}.mutated_item_ids", expected, mutation.mutated_item_ids)
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
    before, after = len(isolation.item_ids[index]), len(mutation.mutated_item_ids)
    if (before == after) != is_same:
        expected = f"{before} tokens, as before" if is_same else f"another length than {before} tokens"
        found.fail(f"{where}.mutated_item_ids", expected, f"{after} tokens")


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


def _check_performance(count: str, metrics: CountPerformance, found: Findings) -> None:
    where = f"performance.{count}"
    if not count.isdecimal() or int(count) < 1:
        found.fail(where, "a number of items", count)
        return
    if not metrics.latencies_sec or min(metrics.latencies_sec) <= 0:
        found.fail(f"{where}.latencies_sec", "times of more than 0 s", metrics.latencies_sec)
        return
    for percent in (50, 95):
        seconds = percentile(metrics.latencies_sec, percent)
        found.close(f"{where}.p{percent}_sec", seconds, getattr(metrics, f"p{percent}_sec"), "of latencies_sec")
        per_second = getattr(metrics, f"items_per_sec_p{percent}")
        found.close(f"{where}.items_per_sec_p{percent}", int(count) / seconds, per_second, f"{count} / p{percent}")
    if len(metrics.latencies_sec) == 1:
        found.warn(f"{where}.latencies_sec", "several, for a p95 with a meaning", 1)


def evaluation_report(evaluation: EndpointEvaluation, name: str = "") -> Report:
    """Speed by the number of items, and isolation."""
    found, counts = evaluation.isolation, evaluation.performance
    mutations = {"same length": found.same_length_mutation, "another length": found.changed_length_mutation}
    moved = max(each.max_abs_diff_unchanged for each in mutations.values())
    isolation = table(
        "One item changed: how far the other items moved",
        ("replaced by an item of", "largest", "mean"),
        [
            (name, difference(each.max_abs_diff_unchanged), difference(each.mean_abs_diff_unchanged))
            for name, each in mutations.items()
        ],
    )
    speed = table(
        "By the number of items",
        ("items", "p50 (ms)", "p95 (ms)", "items/s (p50)"),
        [
            (
                count,
                short_number(1000 * each.p50_sec),
                short_number(1000 * each.p95_sec),
                short_number(each.items_per_sec_p50),
            )
            for count, each in counts.items()
        ],
    )
    failures = tuple(f"{count} items: {why}" for count, why in evaluation.failures.items())
    plots: tuple[Block, ...] = (Charts((_speed_chart(evaluation),)),) if counts else ()
    sections = (
        Section("Speed", (*plots, *speed, *((Bullets(failures),) if failures else ()))),
        Section("Isolation", isolation),
    )
    return Report(
        title=f"Evaluation of a {evaluation.mode} endpoint",
        date=date_of(evaluation),
        passed=None,
        statements=(
            f"Model {evaluation.model} at {evaluation.url}.",
            f"Changing one item moved the other items by at most {difference(moved)}.",
        ),
        cards=(Card("Largest move of an unchanged item", difference(moved), "of a score"),),
        sections=sections,
    )


def _speed_chart(evaluation: EndpointEvaluation) -> Chart:
    return line_chart(
        "speed",
        "Throughput by number of items",
        {int(count): each.items_per_sec_p50 for count, each in evaluation.performance.items()},
        across="items in a request",
        up="items per second (p50)",
        unit="items/s",
        caption="Higher is better.",
    )
