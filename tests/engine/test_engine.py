"""A request's walk through the engine: errors before any work, reports, debug. (`test_exactness.py` has the scores
themselves, `test_together.py` and its neighbours many requests at a time.)"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, ClassVar

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import BackendError, RequestError
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.result import ScoreResult, Truncation
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.batch import ForwardBatch
from prefixwise.plan.algorithms import DENSE_MAX_SEQUENCE_LEN
from tests.engine.live import GatedBackend, Ticket, body_of, engine_on
from tests.prompts.merging_tokenizer import merging_tokenizer

QUERY = [11, 12, 13]
ITEMS = [[1], [2, 3], []]


class Setup:
    """An engine on a fake backend, and the two together."""

    def __init__(self, backend: FakeBackend | None = None, **options: Any) -> None:
        self.backend = FakeBackend(vocab_size=100, max_context_len=12) if backend is None else backend
        self.engine = engine_on(self.backend, tokenizer=merging_tokenizer(), **{"max_items": 100, **options})

    def score(self, **fields: Any) -> ScoreResult:
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": [3, 5], "apply_softmax": True, **fields}
        return self.engine.score(parse_score_request(body))

    @property
    def forwards(self) -> list[ForwardBatch]:
        return self.backend.forwards


SetupOf = Callable[..., Setup]


@pytest.fixture
def setup_of() -> Iterator[SetupOf]:
    """Makes them, and closes them in the end."""
    with ExitStack() as made:

        def make(backend: FakeBackend | None = None, **options: Any) -> Setup:
            setup = Setup(backend, **options)
            made.callback(setup.engine.close)
            return setup

        yield make


class TestRefusals:
    """Each before any forward runs."""

    @pytest.mark.parametrize(
        ("fields", "code", "status", "type_", "message"),
        [
            (
                {"model": "other"},
                "model_not_found",
                404,
                "model_error",
                'model must be one of "fake" or "default", got "other"',
            ),
            (
                {"items": [[1]] * 101},
                "too_many_items",
                400,
                "invalid_value_error",
                "items must hold at most 100 items (max_items_per_request), got 101",
            ),
            (
                {"query": [1, 100]},
                "token_id_exceeds_vocab",
                422,
                "invalid_value_error",
                "query[1] must be below 100, the model's vocabulary size, got 100",
            ),
            (
                {"items": [[1], [2, 333]]},
                "token_id_exceeds_vocab",
                422,
                "invalid_value_error",
                "items[1][1] must be below 100, the model's vocabulary size, got 333",
            ),
            (
                {"label_token_ids": [3, 100]},
                "token_id_exceeds_vocab",
                422,
                "invalid_value_error",
                "label_token_ids[1] must be below 100",
            ),
            (
                {"items": [[1], [2] * 10]},
                "context_too_long",
                400,
                "invalid_value_error",
                "items[1] must fit the model's 12 tokens, got prefix 3 + item 10 tokens; shorten it",
            ),
            (
                {"query": "??", "items": ["a"]},
                "empty_query",
                400,
                "invalid_value_error",
                "query must hold at least one token",
            ),
            (
                {"query": "x", "items": ["a"], "labels": ["a", "xx"], "label_token_ids": None},
                "label_not_single_token",
                400,
                "invalid_value_error",
                "labels[1] must be exactly one token, got 'xx' which is 2: 'x' (4), 'x' (4)",
            ),
        ],
    )
    def test_a_request_at_fault(
        self, setup_of: SetupOf, fields: dict[str, Any], code: str, status: int, type_: str, message: str
    ) -> None:
        setup = setup_of()
        with pytest.raises(RequestError) as caught:
            setup.score(**fields)
        error = caught.value
        assert (error.code, error.status, error.type) == (code, status, type_)
        assert message in error.message
        assert setup.forwards == []

    def test_the_tokens_of_a_label_count_for_the_context(self, setup_of: SetupOf) -> None:
        labels = {"label_token_ids": [[5], [6, 7, 8]], "label_scoring": "sequence"}
        setup = setup_of()
        setup.score(items=[[2] * 7], **labels)
        with pytest.raises(RequestError, match=r"items\[0\].*prefix 3 \+ item 8 tokens \+ label 2"):
            setup.score(items=[[2] * 8], **labels)

    def test_a_delimiter_in_an_item(self, setup_of: SetupOf) -> None:
        setup = setup_of(delimiter=0)
        with pytest.raises(RequestError, match=r"items\[1\] must not hold the delimiter token 0") as caught:
            setup.score(items=[[1], [2, 0]])
        assert caught.value.code == "delimiter_collision"
        assert setup.forwards == []

    def test_a_dense_mask_beyond_its_bound(self, setup_of: SetupOf) -> None:
        backend = FakeBackend(max_context_len=10**6)
        setup = setup_of(backend, mask="dense", chunk_size=0, token_budget=10**6)
        with pytest.raises(RequestError) as caught:
            setup.score(items=[[1] * (DENSE_MAX_SEQUENCE_LEN - 2)], algorithm="packed")
        assert caught.value.code == "dense_mask_too_large"
        assert f"got a sequence of {DENSE_MAX_SEQUENCE_LEN + 1}" in caught.value.message
        assert setup.forwards == []

    @pytest.mark.parametrize("delimiter", [-1, 100])
    def test_a_delimiter_that_the_model_does_not_have(self, setup_of: SetupOf, delimiter: int) -> None:
        with pytest.raises(RequestError, match=f"must be a token id from 0 to 99, got {delimiter}") as caught:
            setup_of(delimiter=delimiter)
        assert caught.value.code == "invalid_delimiter_token_id"


class TestReports:
    def test_bad_items_have_no_score_and_the_others_are_scored_as_if_alone(self, setup_of: SetupOf) -> None:
        setup = setup_of(delimiter=7)
        items = [[1], [2, 7], [3] * 10, [4, 999], [], [-1]]
        result = setup.score(items=items, on_item_error="report")
        assert [(error.index, error.code) for error in result.item_errors] == [
            (1, "delimiter_collision"),
            (2, "context_too_long"),
            (3, "token_id_exceeds_vocab"),
            (5, "negative_token_id"),
        ]
        assert "items[2] must fit" in result.item_errors[1].message
        good = setup.score(items=[[1], []]).scores
        assert result.scores == [good[0], None, None, None, good[1], None]

    def test_where_no_item_is_left_nothing_runs(self, setup_of: SetupOf) -> None:
        setup = setup_of()
        result = setup.score(items=[[1] * 10, [-1]], on_item_error="report", return_debug=True)
        assert result.scores == [None, None]
        assert [error.code for error in result.item_errors] == ["context_too_long", "negative_token_id"]
        assert (setup.forwards, result.debug) == ([], None)

    def test_truncation_is_reported_and_usage_counts_what_was_sent(self, setup_of: SetupOf) -> None:
        result = setup_of().score(items=[[1] * 20, [2]], max_tokens_per_item=4)
        assert result.truncated == (Truncation(0, 20, 4),)
        assert result.usage.prompt_tokens == 3 + 20 + 1


class TestResult:
    def test_it_carries_what_the_caller_needs_to_read_it(self, setup_of: SetupOf) -> None:
        result = setup_of().score(label_token_ids=[[3], [5, 6]], label_scoring="sequence")
        assert (result.model, result.score_mode, result.labels) == ("fake", "softmax", ("3", "5 6"))
        assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (3 + 3, 0)
        assert [item.index for item in result.ranked()] == sorted(range(3), key=lambda i: -(result.scores[i] or [0])[0])
        assert result.debug is None

    def test_text_labels_keep_their_names(self, setup_of: SetupOf) -> None:
        result = setup_of().score(query="x", items=["a"], labels=["ab", "c"], label_token_ids=None)
        assert result.labels == ("ab", "c")

    def test_the_served_name_and_default_are_both_the_model(self, setup_of: SetupOf) -> None:
        setup = setup_of()
        assert setup.score(model="fake").scores == setup.score(model="default").scores == setup.score().scores

    def test_progress_is_reported_after_every_step(self, setup_of: SetupOf) -> None:
        backend, reported = GatedBackend(), []
        engine = setup_of(backend, chunk_size=2).engine

        def on_progress(done: int, total: int) -> None:
            reported.append((done, total))
            backend.let_pass()

        backend.let_pass(2)  # the prefill, and the first items
        engine.score(parse_score_request(body_of(QUERY, ITEMS, algorithm="prefill_extend")), on_progress)
        assert reported == [(2, 3), (3, 3)]

    def test_a_second_request_finds_its_prefix(self, setup_of: SetupOf) -> None:
        setup = setup_of(FakeBackend(vocab_size=100))
        query = list(range(90)) * 3
        first, second = (setup.score(query=query, return_debug=True) for _ in range(2))
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 270)
        assert (second.debug or {})["cached_tokens"] == 270
        assert first.scores == second.scores

    def test_a_name_that_the_model_is_served_by_is_the_model(self) -> None:
        with closing(Scheduler(FakeBackend(vocab_size=100))) as scheduler:
            engine = ScoringEngine(EngineConfig("fake", served_names=("other",)), scheduler, None)
            result = engine.score(parse_score_request({**body_of(QUERY, ITEMS), "model": "other"}))
        assert result.model == "fake"


class TestDebug:
    def test_it_says_what_was_done_and_why(self, setup_of: SetupOf) -> None:
        result = setup_of(chunk_size=2).score(algorithm="packed", return_debug=True)
        assert result.debug is not None
        debug = dict(result.debug)
        milliseconds = debug.pop("milliseconds")
        assert debug == {
            "algorithm": "packed",
            "reason": "asked for by the request",
            "mask": "segment",
            "chunks": 2,
            "batches": [{"segments": 3, "num_tokens": 10, "forward_tokens": 10, "bucket": 10, "fill": 1.0}],
            "cached_tokens": 0,
            "layout": {
                "prefix_tokens": 3,
                "segments": 3,
                "segments_per_item": 1,
                "prefix_lens": [3, 3, 2],
                "tail_lens": [1, 2, 1],
                "rows": [[0, 2], [2, 3]],
            },
        }
        assert isinstance(milliseconds, dict)
        assert set(milliseconds) == {"tokenize", "queue", "prefill", "extend", "host"}
        assert all(value >= 0 for value in milliseconds.values())

    def test_prefill_extend_has_no_mask_and_counts_its_forwards(self, setup_of: SetupOf) -> None:
        debug = setup_of(chunk_size=1).score(algorithm="prefill_extend", return_debug=True).debug
        assert debug is not None
        assert (debug["mask"], debug["chunks"]) == (None, 3)

    def test_auto_says_its_reason(self, setup_of: SetupOf) -> None:
        debug = setup_of().score(return_debug=True).debug
        assert debug is not None
        assert "static estimate for 3 prefix tokens and 3 segments" in str(debug["reason"])

    def test_time_spent_waiting_for_another_request_is_queued_time(
        self, setup_of: SetupOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request is held inside its forward for five seconds after the other one has come."""
        now = [1000.0]
        for module in ("request_state", "live_requests", "scheduler"):
            monkeypatch.setattr(f"prefixwise.engine.{module}.monotonic", lambda: now[0])
        backend = GatedBackend()
        engine = setup_of(backend).engine
        first = Ticket(engine, body_of(QUERY, ITEMS, return_debug=True))
        backend.next_forward()
        second = Ticket(engine, body_of(QUERY, ITEMS, return_debug=True))
        now[0] += 5.0
        backend.open()
        queued = [(ticket.result().debug or {})["milliseconds"]["queue"] for ticket in (first, second)]  # type: ignore[index]
        assert queued == [0.0, 5000.0]

    def test_a_forward_that_was_shared_is_reported_separately_from_ones_own_part(self, setup_of: SetupOf) -> None:
        backend = GatedBackend()
        engine = setup_of(backend).engine
        first = Ticket(engine, body_of(QUERY, ITEMS, algorithm="packed"))
        backend.next_forward()
        others = [Ticket(engine, body_of(QUERY, ITEMS, algorithm="packed", return_debug=True)) for _ in range(2)]
        backend.open()
        first.wait()
        for ticket in others:
            assert (ticket.result().debug or {})["batches"] == [
                {"segments": 3, "num_tokens": 7, "forward_tokens": 14, "bucket": 14, "fill": 1.0}
            ]


class TestLog:
    def test_the_choice_and_a_mask_that_was_not_expected(
        self, setup_of: SetupOf, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "prefixwise")
        setup_of(segment_fallback_threshold=2).score(algorithm="packed")
        assert "packed: asked for by the request" in caplog.messages
        assert "packed with mask dense: a sequence of 7 tokens is above the segment threshold of 2" in caplog.messages

    def test_a_mask_without_effect(self, setup_of: SetupOf, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "prefixwise")
        setup_of(mask="dense").score(algorithm="prefill_extend")
        assert caplog.messages == ["prefill_extend with mask None: the mask option dense has no effect here"]


class TestAuto:
    def test_where_paths_are_not_bit_equal_the_number_of_items_does_not_move_it(self, setup_of: SetupOf) -> None:
        setup = setup_of(FakeBackend(vocab_size=100, bit_equal=False), token_budget=50)
        requests: list[list[list[int]]] = [[[1]], [[]], [[1] * 40] * 90]
        chosen = {(setup.score(items=items, return_debug=True).debug or {})["algorithm"] for items in requests}
        assert len(chosen) == 1

    def test_where_they_are_it_does(self, setup_of: SetupOf) -> None:
        setup = setup_of(FakeBackend(vocab_size=100), token_budget=50)
        query = [1] * 40
        chosen = [
            (setup.score(query=query, items=items, return_debug=True).debug or {})["algorithm"]
            for items in ([[1]], [[1] * 9] * 90)
        ]
        assert chosen == ["packed", "prefill_extend"]


class TestLife:
    def test_a_closed_engine_says_so(self, setup_of: SetupOf) -> None:
        backend = GatedBackend(is_open=True)
        setup = setup_of(backend)
        setup.engine.close()
        setup.engine.close()
        assert backend.num_closed == 1
        with pytest.raises(BackendError, match="this scorer is closed"):
            setup.score()

    def test_threads_take_turns_and_get_what_they_get_alone(self, setup_of: SetupOf) -> None:
        setup = setup_of(GatedBackend(is_open=True))
        queries = [[number, number + 1] for number in range(40)]
        alone = [setup.score(query=query).scores for query in queries]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(8) as pool:
                together = list(pool.map(lambda query: setup.score(query=query).scores, queries))
        finally:
            sys.setswitchinterval(interval)
        assert together == alone

    def test_an_engine_that_failed_goes_on(self, setup_of: SetupOf) -> None:
        setup = setup_of()
        with pytest.raises(RequestError):
            setup.score(items=[[1] * 50])
        assert len(setup.score().scores) == 3


class TestChunksAndProgressCountItems:
    """With labels of two stems an item is two segments; what people set and see is items."""

    FIELDS: ClassVar[dict[str, Any]] = {"label_token_ids": [[3, 4], [5, 6]], "label_scoring": "sequence"}

    @pytest.mark.parametrize(("algorithm", "first_forward"), [("prefill_extend", 1), ("packed", 0), ("serial", 0)])
    def test_a_chunk_is_so_many_items(self, setup_of: SetupOf, algorithm: str, first_forward: int) -> None:
        setup = setup_of(chunk_size=2, token_budget=20 if algorithm == "packed" else 100)
        setup.score(items=[[1], [2], [3], [4]], algorithm=algorithm, **self.FIELDS)
        scored = [len(set(batch.score_tokens)) for batch in setup.forwards[first_forward:]]
        assert scored == [2 * 2 * 2, 2 * 2 * 2]  # items x stems x rows

    def test_progress_is_reported_in_items(self, setup_of: SetupOf) -> None:
        setup, reported = setup_of(chunk_size=2), []
        body = {"query": QUERY, "items": [[1], [2], [3]], "algorithm": "prefill_extend", **self.FIELDS}
        setup.engine.score(parse_score_request(body), lambda done, total: reported.append((done, total)))
        assert set(reported) <= {(2, 3), (3, 3)}
        assert reported[-1] == (3, 3)

    def test_a_progress_callback_may_score(self, setup_of: SetupOf) -> None:
        setup, inner = setup_of(chunk_size=1), []
        body = {"query": QUERY, "items": [[1], [2]], "label_token_ids": [3]}
        request = parse_score_request({**body, "algorithm": "prefill_extend"})
        outer = setup.engine.score(request, lambda done, total: inner.append(setup.engine.score(request).scores))
        assert 1 <= len(inner) <= 2
        assert all(scores == outer.scores for scores in inner)
