"""Classes and hidden states by the arithmetic of the fake backend, and who pays for hidden states."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.contract.classify import parse_classify_request
from prefixwise.contract.errors import RequestError, TokenizerError
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.result import ClassifyResult
from prefixwise.contract.scores import ClassActivation
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.engine import ScoringEngine
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.engine.live import engine_on
from tests.prompts.merging_tokenizer import BOS, merging_tokenizer
from tests.server.app_client import HeldBackend

NAMES = ("good", "bad", "ugly")
INPUTS = [[5, 6, 7], [9]]


def engine_of(
    num_classes: int = 3, activation: ClassActivation = "softmax", tokenizer: TextTokenizer | None = None, **more: Any
) -> ScoringEngine:
    backend = FakeBackend(max_context_len=40)
    names = NAMES[:num_classes]
    backend.config = replace(backend.config, num_classes=num_classes, id2label=names, class_activation=activation)
    return engine_on(backend, tokenizer=tokenizer, **more)


@pytest.fixture
def engine() -> Iterator[ScoringEngine]:
    with closing(engine_of()) as made:
        yield made


def logits_of(ids: list[int], num_classes: int = 3) -> list[float]:
    found: list[float] = fake_logits(np.array(ids, np.int32), np.arange(num_classes, dtype=np.int32)).tolist()
    return found


def classify(engine: ScoringEngine, value: object, **fields: Any) -> ClassifyResult:
    return Classifier(engine).classify(parse_classify_request({"input": value, **fields}))


def test_logits_are_those_after_the_whole_input(engine: ScoringEngine) -> None:
    result = classify(engine, INPUTS, use_activation=False)
    assert [each.probs for each in result.results] == [logits_of(ids) for ids in INPUTS]
    assert [each.label for each in result.results] == [NAMES[int(np.argmax(logits_of(ids)))] for ids in INPUTS]
    assert (result.labels, result.usage.prompt_tokens) == (NAMES, 4)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "identity"])
def test_the_models_activation_applies(activation: ClassActivation) -> None:
    with closing(engine_of(activation=activation)) as engine:
        found = classify(engine, INPUTS[0]).results[0].probs
    logits = logits_of(INPUTS[0])
    expected = {
        "softmax": [math.exp(each) / sum(map(math.exp, logits)) for each in logits],
        "sigmoid": [1 / (1 + math.exp(-each)) for each in logits],
        "identity": logits,
    }
    assert found == pytest.approx(expected[activation], abs=1e-12)


def test_score_without_labels_gives_the_logits_of_the_classes(engine: ScoringEngine) -> None:
    body = {"query": [5, 6], "items": [[7], [8, 9], [600]], "on_item_error": "report"}
    result = engine.score(parse_score_request({**body, "return_pooled_hidden_states": True}))
    assert result.scores == [logits_of([5, 6, 7]), logits_of([5, 6, 8, 9]), None]
    assert (result.labels, result.score_mode) == (NAMES, "logit")
    states = [fake_logits(np.array([5, 6, *item], np.int32), np.arange(1, 9, dtype=np.int32)) for item in ([7], [8, 9])]
    response: Any = result.to_json()
    assert response["pooled_hidden_states"] == [states[0].tolist(), states[1].tolist(), None]
    assert response["labels"] == list(NAMES)
    shares = engine.score(parse_score_request({**body, "apply_softmax": True}))
    assert shares.scores[0] is not None
    assert sum(shares.scores[0]) == pytest.approx(1)
    assert "pooled_hidden_states" not in shares.to_json()


def test_embeddings_are_the_hidden_states_of_whole_inputs() -> None:
    with closing(engine_on(FakeBackend())) as engine:
        result = Classifier(engine).embed(parse_classify_request({"input": INPUTS}))
    expected = [fake_logits(np.array(ids, np.int32), np.arange(1, 9, dtype=np.int32)) for ids in INPUTS]
    np.testing.assert_array_equal(result.embeddings, expected)
    assert result.usage.prompt_tokens == 4


class TestTexts:
    @pytest.fixture
    def texts(self) -> Iterator[ScoringEngine]:
        with closing(engine_of(tokenizer=merging_tokenizer(bos=True))) as made:
            yield made

    def test_special_tokens_are_added_unless_not_wanted(self, texts: ScoringEngine) -> None:
        tokenizer = texts.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode("xyz").tolist()
        for is_added, context in ((True, [BOS, *ids]), (False, ids)):
            result = classify(texts, "xyz", add_special_tokens=is_added, use_activation=False)
            assert result.results[0].probs == logits_of(context)
            assert result.usage.prompt_tokens == len(context)

    def test_a_trailing_token_is_added_too(self, texts: ScoringEngine) -> None:
        assert texts.tokenizer is not None
        texts.tokenizer.trailing_ids = np.array([2], np.int32)
        ids = texts.tokenizer.encode("xyz").tolist()
        assert classify(texts, "xyz", use_activation=False).results[0].probs == logits_of([BOS, *ids, 2])

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_long_inputs_are_cut_but_not_their_special_tokens(self, texts: ScoringEngine, side: str) -> None:
        assert texts.tokenizer is not None
        ids = texts.tokenizer.encode("zyx").tolist()
        kept = ids[:2] if side == "right" else ids[-2:]
        options: dict[str, Any] = {"truncate_prompt_tokens": 3, "truncation_side": side, "use_activation": False}
        result = classify(texts, ["zyx", "z"], **options)
        assert result.results[0].probs == logits_of([BOS, *kept])
        assert [(each.index, each.original_tokens, each.kept_tokens) for each in result.truncated] == [
            (0, 1 + len(ids), 3)
        ]


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "fields", "code", "message"),
        [
            ([[1] * 41], {}, "context_too_long", r"input\[0\] must fit the model's 40 tokens, got 41 .* set truncate"),
            ([[1], [2, 600]], {}, "token_id_exceeds_vocab", r"input\[1\]\[1\] must be below 512"),
            ([[1]], {"truncate_prompt_tokens": 41}, "invalid_truncate_prompt_tokens", "from 1 to 40"),
            ([[1]] * 4, {}, "too_many_items", "input must hold at most 3 items"),
        ],
    )
    def test_the_field_is_named(self, value: object, fields: dict[str, Any], code: str, message: str) -> None:
        with (
            closing(engine_of(max_items=3)) as engine,
            pytest.raises(RequestError, match=message) as caught,
        ):
            classify(engine, value, **fields)
        assert (caught.value.code, caught.value.param) == (
            code,
            "truncate_prompt_tokens" if fields else "input",
        )

    def test_minus_one_cuts_to_what_the_model_takes(self, engine: ScoringEngine) -> None:
        result = classify(engine, [[1] * 50], truncate_prompt_tokens=-1, use_activation=False)
        assert result.results[0].probs == logits_of([1] * 40)

    def test_a_model_that_is_no_classifier(self) -> None:
        with closing(engine_on(FakeBackend())) as engine, pytest.raises(RequestError) as caught:
            classify(engine, INPUTS)
        assert (caught.value.code, caught.value.status) == ("not_a_classifier", 400)

    def test_text_without_a_tokenizer(self, engine: ScoringEngine) -> None:
        with pytest.raises(TokenizerError, match="send token ids instead"):
            classify(engine, "a")


@pytest.mark.parametrize("joins", [True, False])
def test_only_those_who_ask_for_hidden_states_pay(joins: bool) -> None:
    """In one step they have forwards of their own."""
    backend = HeldBackend(joins_prefill=joins, step_tokens=4096)
    with closing(engine_on(backend)) as engine:
        asks = (False, True, False, True, False)
        bodies = [
            {
                "query": [5 + number] * 10,
                "items": [[1], [2]],
                "label_token_ids": [3],
                "return_pooled_hidden_states": ask,
            }
            for number, ask in enumerate(asks)
        ]
        prepared = [engine.prepare(parse_score_request(body)) for body in bodies]
        first = engine.submit(prepared[0])
        assert backend.has_begun.wait(30)  # the requests after it are served together
        done = threading.Semaphore(0)
        states = [first, *(engine.submit(each, on_change=done.release) for each in prepared[1:])]
        backend.let_go.set()
        while not all(state.is_done for state in states):
            assert done.acquire(timeout=30)
        results = [engine.finish(each, state) for each, state in zip(prepared, states, strict=True)]
    assert tuple(each.pooled_hidden_states is not None for each in results) == asks
    scored = [batch for batch in backend.forwards if len(batch.score_tokens)]
    assert [(batch.need_hidden, len(batch.score_tokens)) for batch in scored] in (
        [(False, 2), (True, 4), (False, 4)],
        [(False, 2), (False, 4), (True, 4)],
    )


def test_every_kind_of_model_has_a_tiny_request() -> None:
    for made in (engine_on(FakeBackend()), engine_of(1), engine_of(3), engine_on(FakeBackend(), delimiter=0)):
        with closing(made) as engine:
            assert engine.score(engine.tiny_request()).scores[0] is not None
