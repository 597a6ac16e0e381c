"""Embedding overrides from the request to the forwards, on a backend where the vector (c, 0, ...) is token c.

So a request whose placeholders get such vectors must score as the request that has the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.result import ScoreResult
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prefix_cache import block_keys
from prefixwise.engine.request_state import RequestState
from prefixwise.forward.batch import KV_BLOCK_SIZE
from tests.engine.live import ALGORITHMS, SECONDS, engine_on

PLACEHOLDER = 49
RANDOM = np.random.default_rng(5)
QUERY: list[int] = RANDOM.integers(1, 49, 2 * KV_BLOCK_SIZE + 30).tolist()
ITEMS: list[list[int]] = [RANDOM.integers(1, 49, length).tolist() for length in (5, 1, 0, 40, 3)]
LABELS: dict[str, Any] = {"label_token_ids": [[7, 9, 11], [13]], "label_scoring": "sequence", "score_mode": "logprob"}
QUERY_PLACES = (2, KV_BLOCK_SIZE, len(QUERY) - 1)  # in the first block, the second, and what an empty item recomputes
ITEM_PLACES: tuple[tuple[int, ...] | None, ...] = ((0, 4), (0,), None, None, ())


def vectors_of(tokens: list[int], places: tuple[int, ...], shift: int = 0) -> list[list[float]]:
    return [[float(tokens[place] + shift), *[0.0] * 7] for place in places]


def with_placeholders(tokens: list[int], places: tuple[int, ...] | None) -> list[int]:
    return [PLACEHOLDER if place in (places or ()) else token for place, token in enumerate(tokens)]


def overridden(shift: int = 0) -> dict[str, Any]:
    """The request with placeholders; their vectors stand for the tokens, or for those `shift` further."""
    pairs = list(zip(ITEMS, ITEM_PLACES, strict=True))
    return {
        "query": with_placeholders(QUERY, QUERY_PLACES),
        "items": [with_placeholders(item, places) for item, places in pairs],
        "embed_override_token_id": PLACEHOLDER,
        "query_embed_overrides": vectors_of(QUERY, QUERY_PLACES, shift),
        "item_embed_overrides": [None if places is None else vectors_of(item, places) for item, places in pairs],
    }


@pytest.fixture(params=[False, True], ids=["separate", "joined"])
def engine(request: pytest.FixtureRequest) -> Iterator[ScoringEngine]:
    made = engine_on(FakeBackend(vocab_size=50, joins_prefill=request.param))
    yield made
    made.close()


def score(engine: ScoringEngine, **fields: Any) -> ScoreResult:
    return engine.score(parse_score_request({**LABELS, **fields}))


def wait(state: RequestState, changes: SimpleQueue[None]) -> None:
    while not state.is_done:
        changes.get(timeout=SECONDS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("options", [{}, {"item_first": True}, {"suffix": [8, 9]}])
def test_vectors_take_the_place_of_tokens(engine: ScoringEngine, algorithm: str, options: dict[str, Any]) -> None:
    plain = score(engine, query=QUERY, items=ITEMS, algorithm=algorithm, **options)
    assert score(engine, **overridden(), algorithm=algorithm, **options).scores == plain.scores
    assert score(engine, **overridden(1), algorithm=algorithm, **options).scores != plain.scores


def test_a_prefix_is_found_again_by_its_vectors(engine: ScoringEngine) -> None:
    fields = {"algorithm": "prefill_extend"}
    first, other = overridden(), overridden()
    other["query_embed_overrides"][1] = [3.0, *[0.0] * 7]  # the one in the second block
    untouched = {**first, "query_embed_overrides": None}
    cold = [score(engine, **each, **fields) for each in (first, other, untouched)]
    assert [result.usage.cached_tokens for result in cold] == [0, KV_BLOCK_SIZE, 0]
    warm = [score(engine, **each, **fields) for each in (first, other, untouched)]
    assert [result.usage.cached_tokens for result in warm] == [len(QUERY)] * 3
    assert [result.scores for result in warm] == [result.scores for result in cold]
    assert len({str(result.scores) for result in cold}) == 3


def test_a_pinned_prefix_holds_the_tokens_own_embeddings(engine: ScoringEngine) -> None:
    request = overridden()
    changes: SimpleQueue[None] = SimpleQueue()
    prefix_ids = engine.prepare_prefix(np.array(request["query"], np.int32))
    wait(engine.submit_prefix(prefix_ids, ttl_seconds=60, on_change=lambda: changes.put(None)), changes)
    fields = {"algorithm": "prefill_extend"}
    assert score(engine, **request, **fields).usage.cached_tokens == 0
    assert score(engine, **{**request, "query_embed_overrides": None}, **fields).usage.cached_tokens == len(QUERY)


def test_keys_are_of_vectors_and_not_of_where_they_lie() -> None:
    ids = np.arange(KV_BLOCK_SIZE + 5, dtype=np.int32)
    ids[[1, KV_BLOCK_SIZE]] = ~np.array([0, 1])
    vectors = np.array([[1, 2], [3, 4]], np.float32)
    moved = ids.copy()
    moved[[1, KV_BLOCK_SIZE]] = ~np.array([1, 0])
    starts = (0, KV_BLOCK_SIZE, KV_BLOCK_SIZE + 5)
    keys = block_keys(ids, starts, vectors)
    assert block_keys(moved, starts, vectors[::-1]) == keys
    second_changed = block_keys(ids, starts, np.array([[1, 2], [3, 5]], np.float32))
    assert second_changed[0] == keys[0]
    assert second_changed[1] != keys[1]
    assert not set(block_keys(moved, starts, vectors)) & set(keys)
    assert not set(block_keys(np.maximum(ids, 0), starts)) & set(keys)


def test_requests_with_and_without_overrides_share_a_forward() -> None:
    backend = FakeBackend(vocab_size=50)
    engine = engine_on(backend)
    bodies = [overridden(), {"query": QUERY, "items": ITEMS}, overridden(1)]
    alone = [score(engine, **body).scores for body in bodies]
    prepared = [engine.prepare(parse_score_request({**LABELS, **body})) for body in bodies]
    changes: SimpleQueue[None] = SimpleQueue()

    def submit() -> list[RequestState]:
        return [engine.submit(each, on_change=lambda: changes.put(None)) for each in prepared]

    states = engine.scheduler.call(submit)  # all before the next step
    for state in states:
        wait(state, changes)
    found = [engine.finish(each, state).scores for each, state in zip(prepared, states, strict=True)]
    assert found == alone
    assert any(batch.embed_overrides is not None and len(batch.prefixes) == 3 for batch in backend.forwards)
    assert all(batch.token_ids.min() >= 0 for batch in backend.forwards)
    engine.close()


def test_the_debug_block_names_the_placeholder(engine: ScoringEngine) -> None:
    fields = {"query": [1, PLACEHOLDER], "items": [[2]], "label_token_ids": [3]}
    vector = {"embed_override_token_id": PLACEHOLDER, "query_embed_overrides": [[5.0, *[0.0] * 7]]}
    result = engine.score(parse_score_request({**fields, **vector, "return_debug": True, "debug_top_k": 1}))
    assert result.debug is not None
    assert [token["id"] for token in result.debug["item"]["tokens"]] == [1, PLACEHOLDER, 2]  # type: ignore[index]
