"""`POST /v1/score`: right answers, and one clear error for everything else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, RunningForward
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import RequestContext
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import (
    IDS_REQUEST,
    MODEL,
    AppClient,
    BrokenBackend,
    HeldBackend,
    app_client,
    error_of,
    expected_logits,
    go_away,
)

TEXT_REQUEST: dict[str, Any] = {"query": "ab", "items": ["c", "x"], "labels": ["y", "z"], "score_mode": "logit"}


@pytest.fixture(scope="module")
def text_client() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer()) as made:
        yield made


class TestScores:
    def test_they_are_right_and_in_order(self, client: AppClient) -> None:
        response = client.post("/v1/score", IDS_REQUEST)
        assert response.status_code == 200
        assert response.json() == {
            "object": "scoring",
            "model": MODEL,
            "scores": expected_logits([1, 2, 3], [[4, 5], [6], []], [7, 8]),
            "usage": {
                "prompt_tokens": 6,
                "total_tokens": 6,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }

    def test_text_is_tokenized(self, text_client: AppClient) -> None:
        response = text_client.post("/v1/score", TEXT_REQUEST)
        assert response.json()["scores"] == expected_logits([5], [[3], [4]], [8, 9])

    def test_a_request_of_many_bytes_gets_the_same_scores(self, client: AppClient) -> None:
        """It is parsed and answered on other threads than a small one."""
        items = [[i % 500, (7 * i) % 500, i % 13] for i in range(6000)]
        response = client.post("/v1/score", {**IDS_REQUEST, "items": items})
        assert response.json()["scores"] == expected_logits([1, 2, 3], items, [7, 8])

    def test_extra_keys_appear_only_when_asked_for(self, client: AppClient) -> None:
        body = {
            **IDS_REQUEST,
            "items": [[4, 5], [-1], [6]],
            "on_item_error": "report",
            "max_tokens_per_item": 1,
            "return_debug": True,
        }
        answer = client.post("/v1/score", body).json()
        assert answer["scores"][1] is None
        assert [error["code"] for error in answer["item_errors"]] == ["negative_token_id"]
        assert answer["truncated"] == [{"index": 0, "original_tokens": 2, "kept_tokens": 1}]
        assert {"algorithm", "reason", "milliseconds"} <= set(answer["debug"])

    def test_all_items_may_be_bad(self, client: AppClient) -> None:
        answer = client.post("/v1/score", {**IDS_REQUEST, "items": [[-1]], "on_item_error": "report"}).json()
        assert answer["scores"] == [None]

    def test_the_content_type_does_not_matter(self, client: AppClient) -> None:
        """As curl sends it when nobody tells it otherwise."""
        content = b'{"query": [1], "items": [[2]], "label_token_ids": [3]}'
        headers = {"content-type": "application/x-www-form-urlencoded"}
        assert client.post("/v1/score", content=content, headers=headers).status_code == 200


@pytest.fixture(scope="module")
def named() -> Iterator[AppClient]:
    options = ServerOptions(served_model_names=("first", "second"))
    with app_client(options, served_names=("first", "second", "/models/fake", "fake")) as made:
        yield made


class TestModelNames:
    @pytest.mark.parametrize(
        ("sent", "answered"),
        [
            (None, "first"),
            ("default", "first"),
            ("first", "first"),
            ("second", "second"),
            ("/models/fake", "/models/fake"),
            (MODEL, MODEL),
        ],
    )
    def test_the_answer_has_the_name_that_was_sent(self, named: AppClient, sent: str | None, answered: str) -> None:
        response = named.post("/v1/score", {**IDS_REQUEST, "model": sent})
        assert response.json()["model"] == answered

    def test_another_name_is_not_found(self, named: AppClient) -> None:
        response = named.post("/v1/score", {**IDS_REQUEST, "model": "third"})
        assert error_of(response) == (404, "model_error", "model_not_found", "model")


BAD = "invalid_request_error"
VALUE = "invalid_value_error"
MISSING = "missing_parameter_error"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"query": None}, (400, MISSING, "missing_query", "query")),
        ({"items": None}, (400, MISSING, "missing_items", "items")),
        ({"label_token_ids": None}, (400, MISSING, "missing_label_token_ids", "label_token_ids")),
        ({"query": []}, (400, VALUE, "empty_query", "query")),
        ({"query": "", "items": ["a"]}, (400, VALUE, "empty_query", "query")),
        ({"items": []}, (400, VALUE, "empty_items", "items")),
        ({"label_token_ids": []}, (400, VALUE, "empty_label_token_ids", "label_token_ids")),
        ({"query": 5}, (400, BAD, "invalid_query_type", "query")),
        ({"items": {"a": 1}}, (400, BAD, "invalid_items_type", "items")),
        ({"label_token_ids": "7"}, (400, BAD, "invalid_label_token_ids_type", "label_token_ids")),
        ({"query": "text"}, (400, BAD, "mixed_input_types", "items")),
        ({"items": [[1], "a"]}, (400, BAD, "mixed_input_types", "items")),
        ({"query": [1, True]}, (400, BAD, "invalid_token_id_type", "query")),
        ({"items": [[1.5]]}, (400, BAD, "invalid_token_id_type", "items")),
        ({"items": [[1], [-4]]}, (400, VALUE, "negative_token_id", "items")),
        ({"items": [[512]]}, (422, VALUE, "token_id_exceeds_vocab", "items")),
        ({"apply_softmax": 1}, (400, BAD, "invalid_apply_softmax_type", "apply_softmax")),
        ({"item_first": "yes"}, (400, BAD, "invalid_item_first_type", "item_first")),
        ({"score_mode": "best"}, (400, VALUE, "invalid_score_mode", "score_mode")),
        ({"algorithm": "fast"}, (400, VALUE, "invalid_algorithm", "algorithm")),
        ({"items": [[1] * 5000]}, (400, VALUE, "context_too_long", "items")),
        ({"items": [[1]] * 100_001}, (400, VALUE, "too_many_items", "items")),
        ({"labels": ["a"]}, (400, VALUE, "conflicting_parameters", "labels")),
        ({"apply_softmax": True}, (400, VALUE, "conflicting_parameters", "score_mode")),
        ({"score_mode": "logit_diff", "label_token_ids": [1]}, (400, VALUE, "wrong_label_count", "label_token_ids")),
        ({"query": "a", "items": ["b"]}, (400, BAD, "no_tokenizer", None)),
        ({"model": 5}, (400, BAD, "invalid_model_type", "model")),
    ],
)
def test_every_fault_has_its_error(client: AppClient, changes: dict[str, Any], expected: tuple[object, ...]) -> None:
    assert error_of(client.post("/v1/score", {**IDS_REQUEST, **changes})) == expected


@pytest.mark.parametrize("spaces", [0, 2**16], ids=["on the event loop", "on a thread"])
def test_values_are_shown_as_json(client: AppClient, spaces: int) -> None:
    body = b'{"query": [1], "items": [[2], null], "label_token_ids": [1]' + b" " * spaces + b"}"
    error = client.post("/v1/score", content=body).json()["error"]
    assert error["message"] == "items[1] must be a list of token ids, got null"


def test_a_label_that_is_not_one_token_is_refused(text_client: AppClient) -> None:
    response = text_client.post("/v1/score", {**TEXT_REQUEST, "labels": ["xy"]})
    assert error_of(response) == (400, VALUE, "label_not_single_token", "labels")


def test_a_delimiter_inside_is_refused_where_there_is_one() -> None:
    with app_client(delimiter_token_id=5) as client:
        response = client.post("/v1/score", IDS_REQUEST)
    assert error_of(response) == (400, VALUE, "delimiter_collision", "items")


class TestQueue:
    async def overload(self, client: AppClient, backend: HeldBackend) -> tuple[httpx.Response, httpx.Response]:
        """A request that fills the queue, and one that comes while it does; the second one's answer first."""
        first = asyncio.create_task(client.send("POST", "/v1/score", json=IDS_REQUEST))
        await asyncio.to_thread(backend.has_begun.wait, 10)
        # Its body is no JSON: it must be refused before anybody looks at that.
        second = await client.send("POST", "/v1/score", content=b"no json")
        backend.let_go.set()
        return second, await first

    def test_a_full_queue_refuses_before_the_body_is_parsed(self) -> None:
        backend = HeldBackend()
        with app_client(backend=backend, max_queued_tokens=1) as client:
            refused, served = asyncio.run(self.overload(client, backend))
            assert error_of(refused) == (429, "rate_limit_error", "queue_full", None)
            assert int(refused.headers["retry-after"]) >= 1
            assert served.status_code == 200
            assert client.post("/v1/score", IDS_REQUEST).status_code == 200


class TestDeadline:
    @pytest.mark.parametrize("sent", ["0", "-1", "nan", "inf", "soon", "", "5e-324", "1_0"])
    def test_a_timeout_that_is_none_is_refused(self, client: AppClient, sent: str) -> None:
        response = client.post("/v1/score", IDS_REQUEST, headers={"X-Request-Timeout": sent})
        assert error_of(response) == (400, VALUE, "invalid_request_timeout", "X-Request-Timeout")

    def test_a_long_one_changes_nothing(self, client: AppClient) -> None:
        response = client.post("/v1/score", IDS_REQUEST, headers={"X-Request-Timeout": "30"})
        assert response.status_code == 200

    @pytest.mark.parametrize(
        ("options", "headers"),
        [
            (ServerOptions(request_timeout=0.05), {}),
            (ServerOptions(request_timeout=0.05), {"X-Request-Timeout": "500"}),
            (ServerOptions(), {"X-Request-Timeout": "0.05"}),
            (ServerOptions(request_timeout=0), {"X-Request-Timeout": "0.05"}),
        ],
    )
    def test_it_is_answered_though_the_device_is_still_busy(
        self, options: ServerOptions, headers: dict[str, str]
    ) -> None:
        backend = HeldBackend()
        with app_client(options, backend=backend) as client:
            response = client.post("/v1/score", IDS_REQUEST, headers=headers)
            assert error_of(response) == (504, "server_error", "deadline_exceeded", None)
            backend.let_go.set()


def test_the_error_of_a_failing_device_hides_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with app_client(backend=BrokenBackend()) as client:
        response = client.post("/v1/score", IDS_REQUEST)
    assert error_of(response)[:3] == (500, "server_error", "internal_error")
    assert "secret" not in response.text
    assert "secret of the device" in caplog.text


def test_a_request_is_cancelled_when_its_client_disconnects() -> None:
    backend = HeldBackend(step_tokens=4)
    with app_client(backend=backend) as client:
        body = {**IDS_REQUEST, "items": [[number] for number in range(20)], "algorithm": "serial"}
        asyncio.run(go_away(client, backend, body))
        assert len(backend.forwards) == 1  # the request would have needed more
        assert client.post("/v1/score", IDS_REQUEST).status_code == 200
        stats = client.engine.scheduler.stats()
        assert (stats.running_requests, stats.waiting_requests, client.service.lifecycle.num_in_flight) == (0, 0, 0)


def test_a_client_that_disconnects_while_it_sends_gets_no_response(client: AppClient) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pytest.fail(f"nobody is there to receive {message}")

    scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": [], "root_path": ""}
    asyncio.run(client.app(scope, receive, send))
    assert client.service.lifecycle.num_in_flight == 0
    assert 'prefixwise:requests_total{route="/v1/score",status="499"}' in client.get("/metrics").text


def test_an_answered_request_leaves_nothing_for_the_garbage_collector(client: AppClient) -> None:
    """Where it did, its arrays would stay for a while, and the collector would have more to do."""
    body = httpx.Request("POST", "http://server", json=IDS_REQUEST).content

    async def ask() -> None:
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            return next(messages, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200

        await client.app(
            {"type": "http", "method": "POST", "path": "/v1/score", "headers": [], "root_path": ""}, receive, send
        )

    asyncio.run(ask())
    gc.collect()
    gc.disable()
    try:
        asyncio.run(ask())
        assert not any(type(each) is RequestContext for each in gc.get_objects())
    finally:
        gc.enable()


def test_small_id_requests_never_leave_the_event_loop(client: AppClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_pool(work: object) -> None:
        pytest.fail("a thread was used")

    monkeypatch.setattr(client.service, "in_pool", no_pool)
    assert client.post("/v1/score", IDS_REQUEST).status_code == 200


def test_vocabulary_of_the_fake_model() -> None:
    assert FakeBackend().config.vocab_size == 512  # the table of errors above counts on it


class NaNBackend(FakeBackend):
    """Its second score is not a number."""

    def start(self, batch: ForwardBatch) -> RunningForward:
        running = super().start(batch)

        def wait() -> ForwardOutput:
            output = running.wait()
            output.label_logits[1:2] = np.nan
            return output

        return replace(running, wait=wait)


def test_a_score_that_is_not_finite_is_an_error_that_names_the_item() -> None:
    """JSON would say null, which means something else."""
    with app_client(backend=NaNBackend()) as client:
        response = client.post("/v1/score", IDS_REQUEST)
    assert error_of(response)[:3] == (500, "server_error", "internal_error")
    assert "items[1] got a score that is not a finite number" in response.json()["message"]


def test_the_queue_time_of_a_cancelled_request_is_recorded() -> None:
    backend = HeldBackend()
    with app_client(ServerOptions(request_timeout=0.05), backend=backend) as client:
        assert client.post("/v1/score", IDS_REQUEST).status_code == 504
        backend.let_go.set()
        assert "prefixwise:queue_seconds_count 1.0" in client.get("/metrics").text
