"""The evaluation of an endpoint, and two evaluations combined. The tokens are the same on every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.files import now_utc
from prefixwise.bench.kinds.base import Scores
from prefixwise.bench.kinds.evaluation import (
    CountPerformance,
    EndpointEvaluation,
    Isolation,
    Mutation,
    SemanticAlignment,
    mutation_of,
    performance_of,
)
from prefixwise.bench.kinds.multi_vs_serial import (
    AlignedEquivalence,
    Equivalence,
    IsolationSummary,
    MultiVsSerial,
    Speedup,
)
from prefixwise.bench.options import EvaluationShape
from prefixwise.bench.rules import Differences, item_differences, mean, score_differences
from prefixwise.bench.tokens import (
    DEFAULT_DELIMITER,
    DEFAULT_LABELS,
    TokenFacts,
    default_delimiter,
    default_labels,
    token_facts,
)
from prefixwise.contract.errors import ArtifactError, ModelLoadError, PrefixwiseError

NUM_ISOLATION_ITEMS = 8


MUTATED_INDEX = 3  # with items before it and after it


LONGER_BY = 7  # tokens, so that whatever comes after the item moves to an odd place


@dataclass(frozen=True)
class TokenChoice:
    """The labels, the delimiter and the vocabulary size."""

    labels: tuple[int, ...]
    delimiter: int
    vocab_size: int


def reported_vocab_size(server_info: Mapping[str, Any], model_list: Mapping[str, Any]) -> int | None:
    """The vocabulary size in `/server_info` or `/v1/models`; None where the server does not report it."""
    model, entries = server_info.get("model"), model_list.get("data")
    first = entries[0] if isinstance(entries, list) and entries else None
    for place in (model, server_info, first):
        size = place.get("vocab_size") if isinstance(place, Mapping) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


def settle_tokens(
    labels: Sequence[int] | None, delimiter: int | None, vocab_size: int | None, model: str
) -> tuple[TokenChoice, list[str]]:
    """The tokens, and notes. None: the default, or the model's own where its vocabulary lacks that.

    Without a vocabulary size ids stay below the largest that is named, which must be in there anyway.
    Raises PrefixwiseError for ids that were given and cannot be.
    """
    named = [*(labels or DEFAULT_LABELS), DEFAULT_DELIMITER if delimiter is None else delimiter]
    if vocab_size is None:
        size = max(named) + 1
        reported = [f"the server does not report its vocabulary size: ids stay below {size} (--vocab-size says it)"]
        return TokenChoice(tuple(named[:-1]), named[-1], size), reported
    _check_ids([*(labels or ()), *(() if delimiter is None else (delimiter,))], vocab_size)
    notes: list[str | None] = []
    if labels is not None and delimiter is not None:
        return TokenChoice(tuple(labels), delimiter, vocab_size), []
    facts = _facts(model, vocab_size)
    if delimiter is None:
        delimiter, note = default_delimiter(facts, labels or ())
        notes.append(note)
    if labels is None:
        labels, note = default_labels(facts, (delimiter,))
        notes.append(note)
    return TokenChoice(tuple(labels), delimiter, vocab_size), [note for note in notes if note]


def _facts(model: str, vocab_size: int) -> TokenFacts:
    """The server's vocabulary counts; its tokenizer is asked only where a default would not fit into that."""
    reported = TokenFacts(model, "the server's report", vocab_size, vocab_size, ())
    if vocab_size > DEFAULT_DELIMITER:
        return reported
    try:
        own = token_facts(model)
    except ModelLoadError:  # it is the server's, and need not be here
        return reported
    return own if own.vocab_size == vocab_size else reported


def _check_ids(given: Sequence[int], vocab_size: int) -> None:
    if vocab_size < 8:
        raise PrefixwiseError(f"a vocabulary of at least 8 tokens is needed, got {vocab_size}")
    for each in given:
        if not 0 <= each < vocab_size:
            raise PrefixwiseError(
                f"labels and delimiter must be from 0 to {vocab_size - 1} for this server, got {each}"
            )


@dataclass(frozen=True)
class TokenSource:
    """Tokens by name: the same name gives the same tokens, other names others. The delimiter is never among them."""

    choice: TokenChoice
    seed: int

    def draw(self, name: str, count: int) -> list[int]:
        rng = Random(f"{self.seed}/{name}")
        return [self._token(rng.randrange(self._size)) for _ in range(count)]

    def other(self, name: str, tokens: Sequence[int]) -> list[int]:
        """As many tokens, each different from the given one."""
        rng = Random(f"{self.seed}/{name}")
        return [self._token((self._place(each) + rng.randrange(1, self._size)) % self._size) for each in tokens]

    def isolation_items(self, item_tokens: int) -> list[list[int]]:
        """Of many lengths, so that nothing lines up by accident."""
        lengths = [max(1, item_tokens + index - MUTATED_INDEX) for index in range(NUM_ISOLATION_ITEMS)]
        return [self.draw(f"isolation/item/{index}", length) for index, length in enumerate(lengths)]

    def items(self, name: str, count: int, item_tokens: int) -> list[list[int]]:
        return [self.draw(f"{name}/item/{index}", item_tokens) for index in range(count)]

    @property
    def _size(self) -> int:
        return self.choice.vocab_size - 1

    def _token(self, place: int) -> int:
        return place + (place >= self.choice.delimiter)

    def _place(self, token: int) -> int:
        return token - (token > self.choice.delimiter)


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
    """The whole document. An item count that fails is in `failures`, as too many are too much for some servers.

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
        return mutation_of(base, scores, MUTATED_INDEX, other)

    return Isolation(
        query_ids=query,
        item_ids=items,
        base_scores=base,
        same_length_mutation=mutate(source.other("isolation/other", own)),
        changed_length_mutation=mutate(longer),
    )


def _alignment(endpoint: Endpoint, source: TokenSource, isolation: Isolation) -> SemanticAlignment:
    query = [*isolation.query_ids, source.choice.delimiter]
    scores, _ = endpoint.score(query, isolation.item_ids, source.choice.labels)
    return SemanticAlignment(query_plus_delimiter_ids=query, base_scores_query_plus_delimiter=scores)


def _performance(endpoint: Endpoint, source: TokenSource, shape: EvaluationShape, count: int) -> CountPerformance:
    """Every run has a query of its own, so that no server answers from its prefix cache."""
    seconds = []
    for run in range(shape.warmup_runs + shape.timed_runs):
        name = f"performance/{count}/{run}"
        query = source.draw(f"{name}/query", shape.query_tokens)
        _, taken = endpoint.score(query, source.items(name, count, shape.item_tokens), source.choice.labels)
        seconds.append(taken)
    return performance_of(count, seconds[shape.warmup_runs :])


def combine(multi: EndpointEvaluation, serial: EndpointEvaluation) -> MultiVsSerial:
    """Raises ArtifactError where they are not of one model and one input."""
    alignment = check_pair(multi, serial)
    scores, alone = multi.isolation.base_scores, serial.isolation.base_scores
    aligned = alignment.base_scores_query_plus_delimiter
    return MultiVsSerial(
        model=multi.model,
        multi_url=multi.url,
        serial_url=serial.url,
        labels=multi.labels,
        equivalence=Equivalence(
            **_differences(scores, alone),
            abs_diffs_multi_vs_serial=item_differences(scores, alone),
            multi_scores=scores,
            serial_scores=alone,
        ),
        equivalence_query_plus_delimiter=AlignedEquivalence(
            **_differences(scores, aligned),
            abs_diffs_multi_vs_serial_query_plus_delimiter=item_differences(scores, aligned),
            serial_query_plus_delimiter_scores=aligned,
        ),
        isolation=_isolation_summary(multi),
        performance={
            count: _speedup(multi.performance[count], serial.performance[count])
            for count in sorted(multi.performance.keys() & serial.performance.keys(), key=int)
        },
        generated_at_utc=now_utc(),
        delimiter=multi.delimiter,
    )


def check_pair(multi: EndpointEvaluation, serial: EndpointEvaluation) -> SemanticAlignment:
    """The serial scores of the aligned prompt. Raises ArtifactError."""
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


def _differences(scores: Scores, reference: Scores) -> dict[str, Any]:
    """The mean is that of the items' largest differences, as in the earlier system. Raises ArtifactError."""
    found = differences(scores, reference)
    average = mean(item_differences(scores, reference))
    return {"max_abs_diff": found.max_abs_diff, "mean_abs_diff": average, "num_compared": found.num_compared}


def _isolation_summary(multi: EndpointEvaluation) -> IsolationSummary:
    same, changed = multi.isolation.same_length_mutation, multi.isolation.changed_length_mutation
    return IsolationSummary(
        same_length_mutation_unchanged_diffs=same.unchanged_item_abs_diffs,
        changed_length_mutation_unchanged_diffs=changed.unchanged_item_abs_diffs,
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
        multi_p95_sec=multi.p95_sec,
        serial_p95_sec=serial.p95_sec,
        multi_latencies_sec=multi.latencies_sec,
        serial_latencies_sec=serial.latencies_sec,
        multi_items_per_sec_p50=multi.items_per_sec_p50,
        serial_items_per_sec_p50=serial.items_per_sec_p50,
    )


def _ratio(serial_sec: float, multi_sec: float) -> float:
    if multi_sec <= 0:
        raise ArtifactError(f"latencies must be more than 0 s, got {multi_sec}")
    return serial_sec / multi_sec
