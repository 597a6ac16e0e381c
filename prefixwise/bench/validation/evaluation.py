"""One endpoint, evaluated: do items leave each other alone, and how long do so many of them take?

multi     one request holds all items
serial    one request per item; a run takes as long as all its calls, one after the other

    query | item 0 | item 1 | item 2 | item 3 | item 4 ...   the base
    query | item 0 | item 1 | item 2 | OTHER  | item 4 ...   one item changed, in the same length and in another

What the unchanged items get must be what they got. A serial server is also asked about query + delimiter + item: that
is what a multi-item server with a delimiter shows to every item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixwise.bench.artifacts import (
    CountPerformance,
    EndpointEvaluation,
    Isolation,
    Mutation,
    Scores,
    SemanticAlignment,
)
from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.files import now_utc
from prefixwise.bench.rules import mean, percentile
from prefixwise.bench.validation.inputs import LONGER_BY, MUTATED_INDEX, TokenChoice, TokenSource
from prefixwise.bench.validation.options import EvaluationShape

Mode = Literal["multi", "serial"]
OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Endpoint:
    """A server, and how items are sent to it."""

    client: ScoreClient
    mode: Mode
    model: str

    def score(
        self, query: Sequence[int], items: Sequence[Sequence[int]], labels: Sequence[int]
    ) -> tuple[Scores, float]:
        """Scores, and the seconds of all calls together. Raises CallError."""
        calls = [items] if self.mode == "multi" else [[item] for item in items]
        answers = [self.client.score(self._request(query, call, labels)) for call in calls]
        return [row for answer in answers for row in answer.scores], math.fsum(each.seconds for each in answers)

    def _request(self, query: Sequence[int], items: Sequence[Sequence[int]], labels: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self.model,
            "query": list(query),
            "items": [list(item) for item in items],
            "label_token_ids": list(labels),
            "apply_softmax": True,
            "item_first": False,
        }


def num_steps(mode: Mode, shape: EvaluationShape) -> int:
    """How often `evaluate` calls `on_step`."""
    return 1 + (mode == "serial") + len(shape.item_counts)


def evaluate(endpoint: Endpoint, choice: TokenChoice, shape: EvaluationShape, on_step: OnStep) -> EndpointEvaluation:
    """All of it. An item count that fails is in `failures`, as too many are too much for some servers.

    Raises CallError where isolation cannot be looked at.
    """
    source = TokenSource(choice, shape.seed)
    on_step("isolation")
    isolation = _isolation(endpoint, source, shape)
    alignment = None
    if endpoint.mode == "serial":
        on_step("query + delimiter")
        alignment = _alignment(endpoint, source, isolation)
    performance, failures = {}, {}
    for count in shape.item_counts:
        on_step(f"{count} items")
        try:
            performance[str(count)] = _performance(endpoint, source, shape, count)
        except CallError as error:
            failures[str(count)] = str(error)
    return EndpointEvaluation(
        mode=endpoint.mode,
        url=endpoint.client.url,
        model=endpoint.model,
        labels=list(choice.labels),
        delimiter=choice.delimiter,
        isolation=isolation,
        performance=performance,
        semantic_alignment=alignment,
        generated_at_utc=now_utc(),
        settings=shape.settings(choice.vocab_size),
        failures=failures,
    )


def _isolation(endpoint: Endpoint, source: TokenSource, shape: EvaluationShape) -> Isolation:
    query = source.draw("isolation/query", shape.query_tokens)
    items = source.isolation_items(shape.item_tokens)
    base, _ = endpoint.score(query, items, source.choice.labels)
    own = items[MUTATED_INDEX]
    longer = source.draw("isolation/longer", len(own) + LONGER_BY)

    def mutate(other: list[int]) -> Mutation:
        mutated = [*items[:MUTATED_INDEX], other, *items[MUTATED_INDEX + 1 :]]
        scores, _ = endpoint.score(query, mutated, source.choice.labels)
        return mutation_of(base, scores, MUTATED_INDEX, mutated)

    return Isolation(
        query_ids=query,
        item_ids=items,
        base_scores=base,
        same_length_mutation=mutate(source.other("isolation/other", own)),
        changed_length_mutation=mutate(longer),
    )


def mutation_of(base: Scores, scores: Scores, index: int, mutated: list[list[int]]) -> Mutation:
    """For each unchanged item the largest difference of its labels' scores."""
    diffs = [
        max(abs(own - other) for own, other in zip(row, before, strict=True))
        for place, (row, before) in enumerate(zip(scores, base, strict=True))
        if place != index
    ]
    return Mutation(
        mutated_index=index,
        mutated_item_ids=mutated,
        scores=scores,
        unchanged_item_abs_diffs=diffs,
        max_abs_diff_unchanged=max(diffs),
        mean_abs_diff_unchanged=mean(diffs),
    )


def _alignment(endpoint: Endpoint, source: TokenSource, isolation: Isolation) -> SemanticAlignment:
    query = [*isolation.query_ids, source.choice.delimiter]
    scores, _ = endpoint.score(query, isolation.item_ids, source.choice.labels)
    return SemanticAlignment(query_plus_delimiter_ids=query, base_scores_query_plus_delimiter=scores)


def _performance(endpoint: Endpoint, source: TokenSource, shape: EvaluationShape, count: int) -> CountPerformance:
    """Every run has a query of its own, so that no server answers from what it has kept of the last run."""
    seconds = []
    for run in range(shape.warmup_runs + shape.timed_runs):
        name = f"performance/{count}/{run}"
        query = source.draw(f"{name}/query", shape.query_tokens)
        _, taken = endpoint.score(query, source.items(name, count, shape.item_tokens), source.choice.labels)
        seconds.append(taken)
    return performance_of(count, seconds[shape.warmup_runs :])


def performance_of(count: int, latencies_sec: list[float]) -> CountPerformance:
    """Of at least one run."""
    p50, p95 = percentile(latencies_sec, 50), percentile(latencies_sec, 95)
    return CountPerformance(
        latencies_sec=latencies_sec,
        p50_sec=p50,
        p95_sec=p95,
        items_per_sec_p50=count / p50,
        items_per_sec_p95=count / p95,
    )
