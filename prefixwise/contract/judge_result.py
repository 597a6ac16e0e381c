"""The results of judge requests, and their arithmetic: from the log-probabilities of the answers to distributions.

An answer that begins another one stands for itself alone. `1` and `10` may be the tokens `1` and `1 0`: then the
probability of `1` is that of the token without that of `1 0`. So the answers exclude each other, and their
probabilities add up to the `mass`: how likely it is that the model gives one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefixwise.contract.errors import count
from prefixwise.contract.result import Truncation, Usage
from prefixwise.contract.result_table import ResultTable, Shown, distinct
from prefixwise.contract.scores import Float64Array


class Distributions(NamedTuple):
    """Of I items over L answers. Each row is computed by itself: its bits do not depend on other items."""

    probs: Float64Array  # [I, L], each row adds up to 1
    mass: Float64Array  # [I]
    entropy: Float64Array  # [I], bits
    expected: Float64Array | None  # [I]; None: the answers have no values


def distributions(
    logprobs: Float64Array, longer: Sequence[Sequence[int]], values: Sequence[float] | None
) -> Distributions:
    """`logprobs` is [I, L]. `longer[a]`: the answers whose tokens begin with those of answer a (`next_longer`)."""
    logprobs = np.array(logprobs, np.float64, order="C")  # sums over a row in C order do not depend on other rows
    largest = logprobs.max(axis=1, keepdims=True)
    whole = np.exp(logprobs - largest)
    powers = whole.copy()
    for answer, others in enumerate(longer):
        for other in others:
            powers[:, answer] -= whole[:, other]
    powers = np.maximum(powers, 0.0)  # a difference of nearly equal numbers may be rounded below 0
    totals = powers.sum(axis=1, keepdims=True)
    probs = powers / totals
    bits = np.log2(probs, out=np.zeros_like(probs), where=probs > 0)
    return Distributions(
        probs=probs,
        mass=np.minimum(np.exp(largest[:, 0]) * totals[:, 0], 1.0),
        entropy=np.maximum(-(probs * bits).sum(axis=1), 0.0),
        expected=None if values is None else (probs * np.array(values)).sum(axis=1),
    )


def next_longer(answers: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """For the token ids of each answer: the answers that begin with them, less those that begin with one of these."""
    places = {ids: place for place, ids in enumerate(answers)}
    found: list[list[int]] = [[] for _ in answers]
    for place, ids in enumerate(answers):
        begun = next((ids[:length] for length in range(len(ids) - 1, 0, -1) if ids[:length] in places), None)
        if begun is not None:
            found[places[begun]].append(place)
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class Judgement:
    """One item and the distribution of the answers.

    Attributes:
        index: In the request.
        item: Its text; None if the request has no items.
        answer: The most likely one.
        probs: Of all answers, in their order. They add up to 1.
        expected_value: The mean of the answers' values; None if they have none.
        entropy: Of the distribution, in bits: 0 if one answer is certain.
        mass: How likely it is that the model gives one of the answers at all.

    Examples:
        >>> Judgement(0, "Paris", "yes", [0.9, 0.1], None, 0.469, 0.98).answer
        'yes'
    """

    index: int
    item: str | None
    answer: str
    probs: list[float]
    expected_value: float | None
    entropy: float
    mass: float


@dataclass(frozen=True, repr=False)
class JudgeResult(ResultTable[Judgement]):
    """The judgements of one request: a sequence of `Judgement`, in the order of the items.

    Attributes:
        results: The entries; one if the request has no items.
        answers: In the order of `probs`.
        model: The name of the model.
        usage: The tokens of the request.
        truncated: The items that were cut.
        warnings: What about the request is legal and hardly meant.
        debug: If return_debug is set: how the request was computed.

    Examples:
        >>> entry = Judgement(0, "Paris", "yes", [0.9, 0.1], None, 0.469, 0.98)
        >>> result = JudgeResult([entry], ("yes", "no"), "a-model", Usage(40))
        >>> result[0].answer
        'yes'
        >>> result
        JudgeResult: 1 item, model a-model
        index  item   answer  yes  no   entropy  mass
        0      Paris  yes     0.9  0.1  0.469    0.98
    """

    results: list[Judgement]
    answers: tuple[str, ...]
    model: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()
    warnings: tuple[str, ...] = ()
    debug: Mapping[str, object] | None = None

    def __len__(self) -> int:
        return len(self.results)

    def _entry(self, index: int) -> Judgement:
        return self.results[index]

    @property
    def _has_values(self) -> bool:
        return self.results[0].expected_value is not None

    def _columns(self) -> list[str]:
        expected = ["expected_value"] if self._has_values else []
        return distinct(["index", "item", "answer", *self.answers, *expected, "entropy", "mass"])

    def _cells(self, num_rows: int) -> Iterator[list[object]]:
        for each in self.results[:num_rows]:
            expected = [each.expected_value] if self._has_values else []
            yield [each.index, each.item, each.answer, *each.probs, *expected, each.entropy, each.mass]

    def _shown(self) -> Shown:
        return Shown(f"JudgeResult: {count(len(self), 'item')}, model {self.model}", self.warnings)
