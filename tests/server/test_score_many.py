"""`POST /v1/score` with `requests`: many in one call, answered in order, each by its scores or its error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.server.config import ServerOptions
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

VALUE = "invalid_value_error"
ONE: dict[str, Any] = {"query": [1, 2, 3], "items": [[4, 5], [6]]}
OTHER: dict[str, Any] = {"query": [9], "items": [[4], [5, 6], []]}
DEFAULTS: dict[str, Any] = {"label_token_ids": [7, 8], "score_mode": "logit"}


@pytest.fixture
def fresh() -> Iterator[AppClient]:
    with app_client(backend=FakeBackend()) as made:
        yield made


def call(*requests: object, **fields: Any) -> dict[str, Any]:
    return {**DEFAULTS, "requests": list(requests), **fields}


def test_they_are_answered_in_order_with_what_each_gets_alone(client: AppClient) -> None:
    alone = [client.post("/v1/score", {**DEFAULTS, **each}).json() for each in (ONE, OTHER)]
    assert alone[1]["scores"] == expected_logits([9], [[4], [5, 6], []], [7, 8])
    response = client.post("/v1/score", call(ONE, OTHER, ONE))
    assert response.status_code == 200
    assert response.json() == {
        "object": "list",
        "model": MODEL,
        "data": [alone[0], alone[1], alone[0]],
        "usage": {
            "prompt_tokens": 6 + 4 + 6,
            "total_tokens": 16,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_wrong_one_gets_its_error_and_the_rest_their_scores(client: AppClient) -> None:
    wrong = [
        ({"query": [1]}, "missing_items", "items"),
        ({**ONE, "query": [600]}, "token_id_exceeds_vocab", "query"),
        ({**ONE, "model": "other"}, "model_not_found", "model"),
        ({**ONE, "query": "a", "items": ["b"]}, "no_tokenizer", None),
        ({**ONE, "requests": []}, "unsupported_parameter", "requests"),
        (3, "invalid_json", None),
    ]
    response = client.post("/v1/score", call(ONE, *(each for each, _, _ in wrong), OTHER))
    assert response.status_code == 200
    first, *errors, last = response.json()["data"]
    assert (len(first["scores"]), len(last["scores"])) == (2, 3)
    for body, (_, code, param) in zip(errors, wrong, strict=True):
        assert (body["error"]["code"], body["error"]["param"]) == (code, param)
        assert set(body) == {"error", "detail", "message"}
    assert response.json()["usage"]["prompt_tokens"] == 6 + 4
    only_wrong = client.post("/v1/score", call(3))
    assert (only_wrong.status_code, only_wrong.json()["usage"]["prompt_tokens"]) == (200, 0)


def test_text_and_ids_may_be_in_one_call() -> None:
    with app_client(tokenizer=merging_tokenizer()) as client:
        answer = client.post("/v1/score", call(ONE, {"query": "ab", "items": ["c", "x"]})).json()
    assert [each["scores"] for each in answer["data"]] == [
        expected_logits([1, 2, 3], [[4, 5], [6]], [7, 8]),
        expected_logits([5], [[3], [4]], [7, 8]),
    ]


def test_unknown_fields_are_named_where_they_are(client: AppClient) -> None:
    response = client.post("/v1/score", call({**ONE, "top": 1}, ONE, unheard_of=0))
    answer = response.json()
    warnings = ['the field "unheard_of" is unknown and was ignored', 'the field "top" is unknown and was ignored']
    assert answer["warnings"] == warnings[:1]
    assert [each.get("warnings") for each in answer["data"]] == [warnings[1:], None]
    assert response.headers.get_list("x-prefixwise-warning") == warnings


def test_what_is_wrong_with_all_fails_the_call(client: AppClient) -> None:
    assert error_of(client.post("/v1/score", call(ONE, query=[1]))) == (
        *(400, VALUE, "conflicting_parameters", "requests"),
    )
    assert error_of(client.post("/v1/score", call(ONE, model="other")))[2] == "model_not_found"
    assert error_of(client.post("/v1/score", call()))[2:] == ("empty_requests", "requests")
    surrogate = json.dumps(call(ONE, suffix="\ud800")).encode()
    assert error_of(client.post("/v1/score", content=surrogate)) == (400, VALUE, "invalid_unicode", "requests")


def test_limits_hold_for_all_of_a_call_together() -> None:
    with app_client(ServerOptions(max_request_bytes=2000), max_items_per_request=5) as client:
        assert client.post("/v1/score", call(ONE, OTHER)).status_code == 200
        response = client.post("/v1/score", call(ONE, OTHER, ONE))
        assert error_of(response) == (400, VALUE, "too_many_items", "requests")
        # Each request is read with its defaults: 1,000 bytes of labels for three of them are 3,000 bytes.
        response = client.post("/v1/score", call(ONE, OTHER, 3, label_token_ids=[1] * 500))
        assert error_of(response) == (400, VALUE, "too_many_requests", "requests")
        assert "once for each of 3" in response.json()["message"]


def test_they_share_a_forward() -> None:
    backend = FakeBackend()
    with app_client(backend=backend) as client:
        client.post("/v1/score", call(ONE, OTHER, ONE, {**ONE, "query": [7]}, algorithm="packed"))
    assert len(backend.forwards) == 1


def test_lower_priorities_run_first() -> None:
    backend = FakeBackend(step_tokens=2)
    later, first = {"query": [100], "items": [[1]], "priority": 9}, {"query": [200], "items": [[1]]}
    with app_client(backend=backend) as client:
        client.post("/v1/score", call(later, first, algorithm="serial"))
    assert [int(batch.token_ids[0]) for batch in backend.forwards] == [200, 100]


def test_the_queue_takes_all_or_none() -> None:
    backend = HeldBackend()

    async def overload(client: AppClient) -> tuple[httpx.Response, int]:
        first = asyncio.create_task(client.send("POST", "/v1/score", json=IDS_REQUEST))
        await asyncio.to_thread(backend.has_begun.wait, 10)
        refused = await client.send("POST", "/v1/score", json=call(*[ONE] * 9))
        waiting = client.engine.scheduler.stats().waiting_requests
        backend.let_go.set()
        assert (await first).status_code == 200
        return refused, waiting

    with app_client(backend=backend, max_queued_tokens=40) as client:
        refused, waiting = asyncio.run(overload(client))
        assert error_of(refused) == (429, "rate_limit_error", "queue_full", None)
        assert int(refused.headers["retry-after"]) >= 1
        assert waiting == 0
        assert client.post("/v1/score", call(*[ONE] * 9)).status_code == 200  # nothing else waits


def test_a_deadline_is_that_of_the_call() -> None:
    backend = HeldBackend()
    with app_client(backend=backend) as client:
        response = client.post("/v1/score", call(ONE, OTHER), headers={"X-Request-Timeout": "0.05"})
        assert error_of(response) == (504, "server_error", "deadline_exceeded", None)
        backend.let_go.set()


def test_a_failing_device_fails_the_call() -> None:
    with app_client(backend=BrokenBackend()) as client:
        assert error_of(client.post("/v1/score", call(ONE, OTHER)))[:3] == (500, "server_error", "internal_error")


def test_all_are_cancelled_when_the_client_disconnects() -> None:
    backend = HeldBackend(step_tokens=4)
    with app_client(backend=backend) as client:
        asyncio.run(go_away(client, backend, call(*[ONE] * 20, algorithm="serial")))
        assert len(backend.forwards) == 1  # they would have needed more
        assert client.post("/v1/score", IDS_REQUEST).status_code == 200
        stats = client.engine.scheduler.stats()
        assert (stats.running_requests, stats.waiting_requests, client.service.lifecycle.num_in_flight) == (0, 0, 0)


def test_metrics_count_the_call_once_and_each_of_its_requests(fresh: AppClient) -> None:
    fresh.post("/v1/score", call(ONE, OTHER, 3, {**ONE, "items": [[1], [-1]], "on_item_error": "report"}))
    lines = fresh.get("/metrics").text.splitlines()
    assert 'prefixwise:requests_total{route="/v1/score",status="200"} 1.0' in lines
    assert "prefixwise:queue_seconds_count 3.0" in lines
    assert "prefixwise:items_scored_total 6.0" in lines  # 2 + 3 + 1
    assert "prefixwise:tokens_scored_total 14.0" in lines  # 6 + 4 + 4


def test_the_log_line_counts_the_requests(client: AppClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "prefixwise")
    client.post("/v1/score", call(ONE, OTHER, 3))
    fields = caplog.records[-1].__dict__["fields"]
    assert (fields["requests"], fields["items"], fields["prompt_tokens"], fields["status"]) == (3, 5, 10, 200)


def test_a_thousand_requests(client: AppClient) -> None:
    requests = [{"query": [number % 500], "items": [[1]]} for number in range(1000)]
    data = client.post("/v1/score", call(*requests)).json()["data"]
    assert [each["scores"] for each in data] == [expected_logits([n % 500], [[1]], [7, 8]) for n in range(1000)]
    assert error_of(client.post("/v1/score", call(*requests, ONE)))[2:] == ("too_many_requests", "requests")
