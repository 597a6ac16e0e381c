"""Judgements by the arithmetic of the fake backend, on chats that can be followed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.contract.errors import RequestError
from prefixwise.contract.judge import parse_judge_request
from prefixwise.contract.judge_result import JudgeResult
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.judge import Judge
from tests.engine.live import ALGORITHMS, engine_on
from tests.prompts.merging_tokenizer import CHAT_TEMPLATE, VOCABULARY, merging_tokenizer

CHAT = [{"role": "user", "content": "xa{item}"}]
ITEMS = ["b", "bc", "", "zz"]
VOCAB_SIZE = 50


def engine_of(backend: FakeBackend | None = None, **options: Any) -> ScoringEngine:
    backend = backend or FakeBackend(vocab_size=VOCAB_SIZE, max_context_len=40)
    return engine_on(backend, tokenizer=merging_tokenizer(chat_template=CHAT_TEMPLATE), **options)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScoringEngine]:
    with closing(engine_of()) as made:
        yield made


def judge(engine: ScoringEngine, messages: object = CHAT, items: object = ITEMS, **fields: Any) -> JudgeResult:
    body = {"messages": messages, "items": items, "answers": ["y", "z", "ab"], **fields}
    return Judge(engine).judge(parse_judge_request(body))


def probability(context: list[int], answer: list[int]) -> float:
    """The product of the probabilities of its tokens, each after those before it."""
    product = 1.0
    for position, token in enumerate(answer):
        seen = np.array([*context, *answer[:position]], np.int32)
        logits = fake_logits(seen, np.arange(VOCAB_SIZE, dtype=np.int32)).astype(np.float64)
        product *= float(np.exp(logits[token]) / np.exp(logits).sum())
    return product


def ids(engine: ScoringEngine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    found: list[int] = engine.tokenizer.encode(text).tolist()
    return found


def test_a_distribution_is_that_of_the_chat_with_the_item(engine: ScoringEngine) -> None:
    result = judge(engine, values=[1, 2, 6])
    assert [each.item for each in result] == ITEMS
    for each in result:
        context = ids(engine, f"xxa{each.item}zy")
        absolute = np.array([probability(context, [VOCABULARY[answer]]) for answer in ("y", "z", "ab")])
        shares = absolute / absolute.sum()
        assert each.probs == pytest.approx(shares.tolist(), rel=1e-5)
        assert each.mass == pytest.approx(absolute.sum(), rel=1e-5)
        assert each.expected_value == pytest.approx(float(shares @ [1, 2, 6]), rel=1e-5)
        assert each.entropy == pytest.approx(float(-(shares * np.log2(shares)).sum()), rel=1e-5)
        assert each.answer == ("y", "z", "ab")[int(shares.argmax())]


def test_answers_of_several_tokens_of_which_one_begins_another(engine: ScoringEngine) -> None:
    result = judge(engine, answers=["y", "yz", "yzx", "zx"])
    for each in result:
        context = ids(engine, f"xxa{each.item}zy")
        y, yz, yzx, zx = (probability(context, ids(engine, text)) for text in ("y", "yz", "yzx", "zx"))
        alone = np.array([y - yz, yz - yzx, yzx, zx])
        assert each.probs == pytest.approx((alone / alone.sum()).tolist(), rel=1e-4)
        assert each.mass == pytest.approx(y + zx, rel=1e-5)
        assert each.expected_value is None


def test_a_chat_without_items_gives_one_judgement(engine: ScoringEngine) -> None:
    (alone,) = judge(engine, [{"role": "user", "content": "xabc"}], None)
    assert (alone.index, alone.item) == (0, None)
    beside = judge(engine)[1]
    assert (alone.probs, alone.entropy, alone.mass) == (beside.probs, beside.entropy, beside.mass)


def test_it_is_the_same_as_scoring_the_tokens(engine: ScoringEngine) -> None:
    result = judge(engine)
    assert result.debug is None
    body = {
        "query": ids(engine, "xxa"),
        "items": [ids(engine, "zzzy")],
        "label_token_ids": [VOCABULARY[each] for each in ("y", "z", "ab")],
        "score_mode": "softmax",
    }
    scores = engine.score(parse_score_request(body)).scores
    assert result[3].probs == pytest.approx(scores[0], rel=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_neighbours_and_algorithms_change_no_bit(engine: ScoringEngine, algorithm: str) -> None:
    fields: dict[str, Any] = {"answers": ["y", "yz", "ab"], "values": [1, 2, 3], "algorithm": algorithm}
    together = judge(engine, **fields)
    for index, item in enumerate(ITEMS):
        (alone,) = judge(engine, items=[item], **fields)
        assert replace(alone, index=index) == together[index]


def test_items_share_the_rubric_and_its_kv_blocks() -> None:
    rubric = [{"role": "user", "content": "xyz" * 100 + "{item}"}]
    backend = FakeBackend(vocab_size=VOCAB_SIZE)
    with closing(engine_of(backend)) as engine:
        first = judge(engine, rubric, ["b", "c"])
        again = judge(engine, rubric, ["zz"], return_debug=True)
    assert first.usage.cached_tokens == 0
    assert first.usage.prompt_tokens == 1 + 300 + 2 * 3  # x and the rubric once; item, z and y
    assert again.usage.cached_tokens >= 256
    assert again.debug is not None
    assert again.debug["cached_tokens"] == again.usage.cached_tokens


class TestRefusals:
    @pytest.mark.parametrize(
        ("items", "fields", "code", "message"),
        [
            (["b"] * 5, {}, "too_many_items", "items must hold at most 4 items"),
            (["b", "zy" * 20], {}, "context_too_long", r"items\[1\] must fit the model's 40 tokens, got prefix"),
            (["b", "c"], {"return_debug": True, "debug_top_k": 3}, "conflicting_parameters", "expected 1 item, got 2"),
        ],
    )
    def test_the_field_is_named(self, items: list[str], fields: dict[str, Any], code: str, message: str) -> None:
        with closing(engine_of(max_items=4)) as engine, pytest.raises(RequestError, match=message) as caught:
            judge(engine, items=items, **fields)
        assert caught.value.code == code

    def test_a_classifier_has_no_answers(self) -> None:
        backend = FakeBackend(vocab_size=VOCAB_SIZE)
        backend.config = replace(backend.config, num_classes=3)
        with closing(engine_of(backend)) as engine, pytest.raises(RequestError, match="is a classifier") as caught:
            judge(engine)
        assert caught.value.code == "no_label_logits"


def test_what_the_model_saw_is_shown(engine: ScoringEngine) -> None:
    result = judge(engine, items=["b"], return_debug=True, debug_top_k=2)
    assert result.debug is not None
    shown: Any = result.debug["item"]
    assert "".join(each["text"] for each in shown["tokens"]) == "xxabzy"
    assert len(shown["top"]) == 2
