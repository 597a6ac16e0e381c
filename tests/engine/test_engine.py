"""A request's walk through the engine: errors before any work, reports, debug, threads. (`test_exactness.py`
has the scores themselves.)"""

from __future__ import annotations

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from itemwise.backends.base import Backend, ForwardBatch, ForwardOutput
from itemwise.backends.fake import FakeBackend
from itemwise.contract.errors import BackendError, RequestError
from itemwise.contract.parse import parse_score_request
from itemwise.contract.result import ScoreResult, Truncation
from itemwise.engine.engine import EngineConfig, ScoringEngine
from itemwise.plan.options import DENSE_MAX_ROW_LEN, PlanOptions
from tests.prompts.merging_tokenizer import merging_tokenizer

QUERY = [11, 12, 13]
ITEMS = [[1], [2, 3], []]


class Setup:
    """An engine on a fake backend, and the two together."""

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        delimiter: int | None = None,
        max_items: int = 100,
        **plan: Any,
    ) -> None:
        self.backend = FakeBackend(vocab_size=100, max_context_len=12) if backend is None else backend
        config = EngineConfig("fake", delimiter, max_items, PlanOptions(**plan))
        self.engine = ScoringEngine(config, self.backend, merging_tokenizer())

    def score(self, **fields: Any) -> ScoreResult:
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": [3, 5], "apply_softmax": True, **fields}
        return self.engine.score(parse_score_request(body))

    @property
    def forwards(self) -> list[ForwardBatch]:
        assert isinstance(self.backend, FakeBackend)
        return self.backend.forwards


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
    def test_a_request_at_fault(self, fields: dict[str, Any], code: str, status: int, type_: str, message: str) -> None:
        setup = Setup()
        with pytest.raises(RequestError) as caught:
            setup.score(**fields)
        error = caught.value
        assert (error.code, error.status, error.type) == (code, status, type_)
        assert message in error.message
        assert setup.forwards == []

    def test_the_tokens_of_a_label_count_for_the_context(self) -> None:
        labels = {"label_token_ids": [[5], [6, 7, 8]], "label_scoring": "sequence"}
        setup = Setup()
        setup.score(items=[[2] * 7], **labels)
        with pytest.raises(RequestError, match=r"items\[0\].*prefix 3 \+ item 8 tokens \+ label 2"):
            setup.score(items=[[2] * 8], **labels)

    def test_a_delimiter_in_an_item(self) -> None:
        setup = Setup(delimiter=0)
        with pytest.raises(RequestError, match=r"items\[1\] must not hold the delimiter token 0") as caught:
            setup.score(items=[[1], [2, 0]])
        assert caught.value.code == "delimiter_collision"
        assert setup.forwards == []

    def test_a_dense_mask_beyond_its_bound(self) -> None:
        backend = FakeBackend(max_context_len=10**6)
        setup = Setup(backend, mask="dense", chunk_size=0, token_budget=10**6)
        with pytest.raises(RequestError) as caught:
            setup.score(items=[[1] * (DENSE_MAX_ROW_LEN - 2)], algorithm="packed")
        assert caught.value.code == "dense_mask_too_large"
        assert f"got a row of {DENSE_MAX_ROW_LEN + 1}" in caught.value.message
        assert setup.forwards == []

    @pytest.mark.parametrize("delimiter", [-1, 100])
    def test_a_delimiter_that_the_model_does_not_have(self, delimiter: int) -> None:
        with pytest.raises(RequestError, match=f"must be a token id from 0 to 99, got {delimiter}") as caught:
            Setup(delimiter=delimiter)
        assert caught.value.code == "invalid_delimiter_token_id"


class TestReports:
    def test_bad_items_have_no_score_and_the_others_are_scored_as_if_alone(self) -> None:
        setup = Setup(delimiter=7)
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

    def test_where_no_item_is_left_nothing_runs(self) -> None:
        setup = Setup()
        result = setup.score(items=[[1] * 10, [-1]], on_item_error="report", return_debug=True)
        assert result.scores == [None, None]
        assert [error.code for error in result.item_errors] == ["context_too_long", "negative_token_id"]
        assert (setup.forwards, result.debug) == ([], None)

    def test_truncation_is_reported_and_usage_counts_what_was_sent(self) -> None:
        result = Setup().score(items=[[1] * 20, [2]], max_tokens_per_item=4)
        assert result.truncated == (Truncation(0, 20, 4),)
        assert result.usage.prompt_tokens == 3 + 20 + 1


class TestResult:
    def test_it_carries_what_the_caller_needs_to_read_it(self) -> None:
        result = Setup().score(label_token_ids=[[3], [5, 6]], label_scoring="sequence")
        assert (result.model, result.score_mode, result.labels) == ("fake", "softmax", ("3", "5 6"))
        assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (3 + 3, 0)
        assert [item.index for item in result.ranked()] == sorted(range(3), key=lambda i: -(result.scores[i] or [0])[0])
        assert result.debug is None

    def test_text_labels_keep_their_names(self) -> None:
        result = Setup().score(query="x", items=["a"], labels=["ab", "c"], label_token_ids=None)
        assert result.labels == ("ab", "c")

    def test_the_served_name_and_default_are_both_the_model(self) -> None:
        setup = Setup()
        assert setup.score(model="fake").scores == setup.score(model="default").scores == setup.score().scores

    def test_progress_counts_segments(self) -> None:
        told: list[tuple[int, int]] = []
        engine = Setup(chunk_size=2).engine
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": [3], "algorithm": "prefill_extend"}
        engine.score(parse_score_request(body), lambda done, total: told.append((done, total)))
        assert told == [(2, 3), (3, 3)]


class TestDebug:
    def test_it_says_what_was_done_and_why(self) -> None:
        result = Setup(chunk_size=2).score(algorithm="packed", return_debug=True)
        assert result.debug is not None
        debug = dict(result.debug)
        milliseconds = debug.pop("milliseconds")
        assert debug == {
            "algorithm": "packed",
            "reason": "asked for by the request",
            "mask": "segment",
            "chunks": 2,
            "batches": [{"row_starts": (0, 2, 3), "num_tokens": 10, "bucket": 10, "segments": 3, "fill": 1.0}],
            "cached_tokens": 0,
        }
        assert isinstance(milliseconds, dict)
        assert set(milliseconds) == {"tokenize", "queue", "prefill", "extend", "host"}
        assert all(value >= 0 for value in milliseconds.values())

    def test_prefill_extend_has_no_mask_and_counts_its_forwards(self) -> None:
        debug = Setup(chunk_size=1).score(algorithm="prefill_extend", return_debug=True).debug
        assert debug is not None
        assert (debug["mask"], debug["chunks"]) == (None, 3)

    def test_auto_says_its_reason(self) -> None:
        debug = Setup().score(return_debug=True).debug
        assert debug is not None
        assert "static estimate for 3 prefix tokens and 3 segments" in str(debug["reason"])

    def test_time_spent_waiting_for_another_request_is_queued_time(self) -> None:
        """A request is held inside its forward until the other one has long been waiting for the device."""
        backend = HeldBackend()
        setup = Setup(backend)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(setup.score, return_debug=True)
            assert backend.entered.wait(10)
            second = pool.submit(setup.score, return_debug=True)
            assert not backend.entered_again.wait(0.2)  # time to queue, while it may not enter
            backend.release.set()
            queued = [(future.result().debug or {})["milliseconds"]["queue"] for future in (first, second)]  # type: ignore[index]
        assert queued[1] > queued[0]


class HeldBackend(Backend):
    """Its first forward goes on only when it is released."""

    def __init__(self) -> None:
        self._inner = FakeBackend(vocab_size=100, max_context_len=12)
        self.config, self.info = self._inner.config, self._inner.info
        self.entered, self.entered_again, self.release = (threading.Event() for _ in range(3))

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if self.entered.is_set():
            self.entered_again.set()
        self.entered.set()
        assert self.release.wait(10)
        return self._inner.forward(batch)


class TestLog:
    def test_the_choice_and_a_mask_that_was_not_expected(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "itemwise")
        Setup(segment_fallback_threshold=2).score(algorithm="packed")
        assert "packed: asked for by the request" in caplog.messages
        assert "packed with mask dense: a row of 7 tokens is above the segment threshold of 2" in caplog.messages

    def test_a_mask_without_effect(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "itemwise")
        Setup(mask="dense").score(algorithm="prefill_extend")
        assert caplog.messages == ["prefill_extend with mask None: the mask option dense has no effect here"]


class TestAuto:
    def test_where_paths_are_not_bit_equal_the_number_of_items_does_not_move_it(self) -> None:
        setup = Setup(FakeBackend(vocab_size=100, bit_equal=False), token_budget=50)
        requests: list[list[list[int]]] = [[[1]], [[]], [[1] * 40] * 90]
        chosen = {(setup.score(items=items, return_debug=True).debug or {})["algorithm"] for items in requests}
        assert len(chosen) == 1

    def test_where_they_are_it_does(self) -> None:
        setup = Setup(FakeBackend(vocab_size=100), token_budget=50)
        query = [1] * 40
        chosen = [
            (setup.score(query=query, items=items, return_debug=True).debug or {})["algorithm"]
            for items in ([[1]], [[1] * 9] * 90)
        ]
        assert chosen == ["packed", "prefill_extend"]


class ClosableBackend(Backend):
    """Counts how often it is closed, and fails where two forwards overlap."""

    def __init__(self) -> None:
        self._inner = FakeBackend(vocab_size=100, max_context_len=12)
        self.config, self.info = self._inner.config, self._inner.info
        self.num_closed = 0
        self._busy = threading.Lock()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        assert self._busy.acquire(blocking=False), "two forwards at once"
        output = self._inner.forward(batch)
        self._busy.release()
        return output

    def close(self) -> None:
        self.num_closed += 1


class TestLife:
    def test_a_closed_engine_says_so(self) -> None:
        backend = ClosableBackend()
        setup = Setup(backend)
        setup.engine.close()
        setup.engine.close()
        assert backend.num_closed == 1
        with pytest.raises(BackendError, match="this scorer is closed"):
            setup.score()

    def test_threads_take_turns_and_get_what_they_get_alone(self) -> None:
        setup = Setup(ClosableBackend())
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

    def test_an_engine_that_failed_goes_on(self) -> None:
        setup = Setup()
        with pytest.raises(RequestError):
            setup.score(items=[[1] * 50])
        assert len(setup.score().scores) == 3


class TestChunksAndProgressCountItems:
    """With labels of two stems an item is two segments; what people set and see is items."""

    FIELDS: ClassVar[dict[str, Any]] = {"label_token_ids": [[3, 4], [5, 6]], "label_scoring": "sequence"}

    @pytest.mark.parametrize(("algorithm", "first_forward"), [("prefill_extend", 1), ("packed", 0), ("serial", 0)])
    def test_a_chunk_is_so_many_items(self, algorithm: str, first_forward: int) -> None:
        setup = Setup(chunk_size=2, token_budget=20 if algorithm == "packed" else 100)
        setup.score(items=[[1], [2], [3], [4]], algorithm=algorithm, **self.FIELDS)
        scored = [len(set(batch.score_tokens)) for batch in setup.forwards[first_forward:]]
        assert scored == [2 * 2 * 2, 2 * 2 * 2]  # items x stems x rows

    def test_progress_is_told_in_items(self) -> None:
        setup, told = Setup(chunk_size=2), []
        body = {"query": QUERY, "items": [[1], [2], [3]], "algorithm": "prefill_extend", **self.FIELDS}
        setup.engine.score(parse_score_request(body), lambda done, total: told.append((done, total)))
        assert told == [(2, 3), (3, 3)]

    def test_a_progress_callback_may_score(self) -> None:
        setup, inner = Setup(chunk_size=1), []
        body = {"query": QUERY, "items": [[1], [2]], "label_token_ids": [3]}
        request = parse_score_request({**body, "algorithm": "prefill_extend"})
        outer = setup.engine.score(request, lambda done, total: inner.append(setup.engine.score(request).scores))
        assert inner == [outer.scores, outer.scores]
