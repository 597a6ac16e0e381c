"""What a request must give, done the plain way: every item's whole context put together and scored alone.

Shares no code with prompts, plan and engine but the tokenizer and the final arithmetic of the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixwise.backends.fake import fake_logits
from prefixwise.contract.scores import scores_from_logits, scores_from_logprobs
from tests.prompts.merging_tokenizer import BOS, merging_tokenizer, token_texts

TOKENIZER = merging_tokenizer()


@dataclass(frozen=True)
class Expected:
    """The answer, or the error of the whole request as (code, item)."""

    error: tuple[str, int | None] | None = None
    scores: list[list[float] | None] = field(default_factory=list)
    item_errors: dict[int, str] = field(default_factory=dict)
    truncated: list[tuple[int, int, int]] = field(default_factory=list)
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Limits:
    """What the engine and its model are set to."""

    vocab_size: int
    max_context_len: int
    delimiter: int | None
    bos: bool


def expect(body: Mapping[str, Any], limits: Limits) -> Expected:
    query, items = _ids(body["query"]), [_ids(item) for item in body["items"]]
    errors: dict[int, str] = {}
    if limits.delimiter is not None:
        if limits.delimiter in query:
            return Expected(error=("delimiter_collision", None))
        errors |= {i: "delimiter_collision" for i, item in enumerate(items) if limits.delimiter in item}
    max_tokens = body.get("max_tokens_per_item") or 10**9
    kept = [item[:max_tokens] for item in items]
    contexts = [_context(body, query, item, limits) for item in kept]
    labels: list[list[int]] = [[label] if isinstance(label, int) else label for label in body["label_token_ids"]]
    longest = limits.max_context_len - max(map(len, labels)) + 1
    too_long = {i: "context_too_long" for i, context in enumerate(contexts) if len(context) > longest}
    if body.get("on_item_error") != "report" and (errors or too_long):
        first = min(errors or too_long)
        return Expected(error=((errors or too_long)[first], first))
    errors = too_long | errors
    return Expected(
        scores=[None if i in errors else _score(body, context, labels, limits) for i, context in enumerate(contexts)],
        item_errors=errors,
        truncated=[(i, len(item), max_tokens) for i, item in enumerate(items) if len(item) > max_tokens],
        prompt_tokens=len(query) + sum(map(len, items)),
    )


def _ids(text_or_ids: str | list[int]) -> list[int]:
    return TOKENIZER.encode(text_or_ids).tolist() if isinstance(text_or_ids, str) else text_or_ids


def _context(body: Mapping[str, Any], query: list[int], item: list[int], limits: Limits) -> list[int]:
    is_text = isinstance(body["query"], str)
    leading = [BOS] if is_text and limits.bos else []
    between = [] if limits.delimiter is None else [limits.delimiter]
    suffix = _ids(body.get("suffix") or [])
    item_first = body.get("item_first", False)
    if is_text and body.get("tokenization") == "joint" and limits.delimiter is None:
        texts = [body["query"], token_texts(item)]
        return leading + _ids("".join(texts[::-1] if item_first else texts)) + suffix
    own = [*item, *between, *query] if item_first else [*query, *between, *item]
    return leading + own + suffix


def _score(body: Mapping[str, Any], context: list[int], labels: list[list[int]], limits: Limits) -> list[float]:
    mode = body["score_mode"]
    if body.get("label_scoring") != "sequence":
        logits = _logits(context, [label[0] for label in labels])
        scores = scores_from_logits(mode, logits[None], np.array([_normalizer(context, limits)], np.float32))
    else:
        sums = [_logprob(context, label, limits) for label in labels]
        scores = scores_from_logprobs(mode, np.array([sums]))
    row: list[float] = scores[0].tolist()
    return row


def _logits(context: list[int], tokens: list[int]) -> Any:
    return fake_logits(np.array(context, np.int32), np.array(tokens, np.int32))


def _normalizer(context: list[int], limits: Limits) -> float:
    every = _logits(context, list(range(limits.vocab_size))).astype(np.float64)
    return float(np.float32(np.log(np.exp(every).sum())))


def _logprob(context: list[int], label: list[int], limits: Limits) -> float:
    """The sum of the label's tokens' log-probabilities, each after those before it."""
    return sum(
        float(_logits(context + label[:i], [token])[0]) - _normalizer(context + label[:i], limits)
        for i, token in enumerate(label)
    )
