"""What a user writes, with the types that a checker must find. `mypy --strict` and pyright read it; nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import numpy as np

from prefixwise import (
    AsyncClient,
    Client,
    Judgement,
    JudgeResult,
    PrefixwiseError,
    QueueFullError,
    RequestError,
    RerankedDocument,
    RerankResult,
    ScoredItem,
    Scorer,
    ScoreResult,
)

REVIEWS = ["I loved every minute of it.", "It broke after two days."]
LABELS = [" positive", " negative"]


def best_review(scorer: Scorer | Client) -> str:
    result = scorer.score("Review: ", REVIEWS, suffix=" Sentiment:", labels=LABELS, apply_softmax=True)
    assert_type(result, ScoreResult[str, list[float]])
    assert_type(result.scores[0][0], float)
    assert_type(result.ranked()[0].item, str)
    assert_type(result.ranked()[0].scores, list[float])
    assert_type(result[0], ScoredItem[str, list[float]])
    assert_type(result[:2], list[ScoredItem[str, list[float]]])
    print(sum(each.score for each in result) / len(result), result.to_dicts(), result.to_pandas())
    return result.ranked()[0].item


def scored_ids(scorer: Scorer) -> list[int]:
    result = scorer.score(np.array([1, 2, 3]), [np.array([4, 5]), [6]], label_token_ids=[7, 8])
    assert_type(result, ScoreResult[list[int], list[float]])
    return result.ranked()[0].item


def with_errors(scorer: Scorer) -> None:
    result = scorer.score("Review: ", iter(REVIEWS), labels=LABELS, on_item_error="report")
    assert_type(result.scores, list[list[float] | None])
    assert_type(result.ranked()[0].scores, list[float])
    show(result)


def show(result: ScoreResult) -> None:
    """Any result, without parameters."""
    assert_type(result[0].item, str | list[int])


def texts() -> Iterator[str]:
    yield from REVIEWS


def judged(scorer: Scorer | Client) -> float | None:
    messages = [{"role": "user", "content": "Rate this from 1 to 5: {item}"}]
    result = scorer.judge(messages, REVIEWS, answers="1-5", values=[0, 0.25, 0.5, 0.75, 1])
    assert_type(result, JudgeResult)
    assert_type(result[0], Judgement)
    scorer.judge(messages, texts(), answers=[" good", " bad"])
    return result[0].expected_value


def reranked(scorer: Scorer | Client) -> str:
    show(scorer.score("Review: ", texts(), labels=LABELS))
    show(scorer.score("Review: ", np.array(REVIEWS), labels=(label for label in LABELS)))
    result = scorer.rerank("What broke?", texts(), top_n=1)
    assert_type(result, RerankResult)
    assert_type(result[0], RerankedDocument)
    scorer.rerank("What broke?", [{"text": review, "id": number} for number, review in enumerate(REVIEWS)])
    return result[0].document


async def over_http() -> str:
    async with AsyncClient("http://127.0.0.1:30000", api_key="key", timeout=10) as client:
        try:
            result = await client.score("Review: ", REVIEWS, labels=LABELS)
        except QueueFullError as error:
            assert_type(error.retry_after, int)
            raise
        except RequestError as error:
            raise PrefixwiseError(f"{error.code}: {error}") from error
    assert_type(result, ScoreResult[str, list[float]])
    return result.ranked()[0].item
