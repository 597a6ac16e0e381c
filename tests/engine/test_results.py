"""What the model saw of one item, by the arithmetic of the fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.contract.errors import RequestError
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.result import ScoreResult
from prefixwise.engine.engine import ScoringEngine
from tests.engine.live import engine_on

VOCAB_SIZE = 100
QUERY, ITEM = [11, 12, 13], [2, 3]


@pytest.fixture
def engine() -> Iterator[ScoringEngine]:
    made = engine_on(FakeBackend(vocab_size=VOCAB_SIZE))
    yield made
    made.close()


def score(engine: ScoringEngine, **fields: Any) -> ScoreResult:
    body = {"query": QUERY, "items": [ITEM], "label_token_ids": [3, 5], "return_debug": True, **fields}
    return engine.score(parse_score_request(body))


@pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
def test_the_top_tokens_are_those_of_the_largest_logits(engine: ScoringEngine, algorithm: str) -> None:
    result = score(engine, debug_top_k=4, algorithm=algorithm)
    logits = fake_logits(np.array(QUERY + ITEM, np.int32), np.arange(VOCAB_SIZE, dtype=np.int32)).astype(float)
    expected = sorted(range(VOCAB_SIZE), key=lambda token: (-logits[token], token))[:4]
    item: Any = (result.debug or {})["item"]
    assert [each["id"] for each in item["top"]] == expected
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert [each["prob"] for each in item["top"]] == pytest.approx(probabilities[expected].tolist())
    assert [each["id"] for each in item["tokens"]] == QUERY + ITEM
    assert (item["prefix_tokens"], item["scored_position"]) == (3, 4)


@pytest.mark.parametrize("label_scoring", ["single", "sequence"])
@pytest.mark.parametrize("score_mode", ["prob", "softmax", "logprob"])
def test_looking_does_not_move_the_score(engine: ScoringEngine, score_mode: str, label_scoring: str) -> None:
    labels = [[3, 4], [5]] if label_scoring == "sequence" else [3, 5]
    fields: dict[str, Any] = {
        "score_mode": score_mode,
        "label_scoring": label_scoring,
        "label_token_ids": labels,
    }
    assert score(engine, debug_top_k=2, **fields).scores == score(engine, **fields).scores


def test_the_tokens_of_several_items_are_refused(engine: ScoringEngine) -> None:
    with pytest.raises(RequestError) as caught:
        score(engine, items=[ITEM, ITEM], debug_top_k=1)
    assert (caught.value.code, caught.value.param) == ("conflicting_parameters", "debug_top_k")


def test_the_layout_of_many_items_is_cut(engine: ScoringEngine) -> None:
    layout: Any = (score(engine, items=[ITEM] * 300, algorithm="serial").debug or {})["layout"]
    assert (layout["segments"], len(layout["tail_lens"]), len(layout["rows"])) == (300, 256, 256)
