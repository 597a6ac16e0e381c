""""""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixwise.cluster.exchange import HttpRequest, HttpResponse, answer, merge_metrics
from prefixwise.engine.engine import ScoringEngine
from prefixwise.launch.loading import load_engine
from prefixwise.launch.options import EngineOptions
from prefixwise.server.app import make_app
from prefixwise.server.config import ServerOptions
from prefixwise.server.metrics import Metrics
from prefixwise.server.service import Service

BODY = {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [6, 7]}


@pytest.fixture(scope="module")
def engine() -> Iterator[ScoringEngine]:
    engine = load_engine(EngineOptions(backend="fake"))
    yield engine
    engine.close()


def ask(engine: ScoringEngine, request: HttpRequest, options: ServerOptions | None = None) -> HttpResponse:
    async def run() -> HttpResponse:
        service = Service(options or ServerOptions())
        service.open(engine)
        try:
            return await answer(make_app(service), request)
        finally:
            service.close()

    return asyncio.run(run())


def test_an_answer_is_whole(engine: ScoringEngine) -> None:
    response = ask(engine, HttpRequest("POST", "/v1/score", body=orjson.dumps(BODY)))
    assert response.status == 200
    assert len(orjson.loads(response.body)["scores"]) == 2
    assert response.header(b"content-type") == b"application/json"
    assert response.header(b"content-length") == str(len(response.body)).encode()


def test_a_long_answer_is_whole_too(engine: ScoringEngine) -> None:
    """A single server makes it in pieces."""
    body = BODY | {"items": [[3]] * 300, "label_token_ids": [6] * 300}
    response = ask(engine, HttpRequest("POST", "/v1/score", body=orjson.dumps(body)))
    assert [len(row) for row in orjson.loads(response.body)["scores"]] == [300] * 300
    assert response.header(b"content-length") == str(len(response.body)).encode()


def test_one_that_would_be_too_long_is_refused(engine: ScoringEngine) -> None:
    response = ask(
        engine, HttpRequest("POST", "/v1/score", body=orjson.dumps(BODY)), ServerOptions(max_response_bytes=1000)
    )
    assert orjson.loads(response.body)["error"]["code"] == "response_too_large"


def test_a_page_of_another_site_is_refused(engine: ScoringEngine) -> None:
    headers = ((b"host", b"cluster"), (b"origin", b"https://evil.example"))
    response = ask(engine, HttpRequest("POST", "/v1/score", headers=headers, body=orjson.dumps(BODY)))
    assert orjson.loads(response.body)["error"]["code"] == "origin_not_allowed"


def test_an_error_is_the_server_s_own(engine: ScoringEngine) -> None:
    response = ask(engine, HttpRequest("POST", "/v1/score", body=b"{}"))
    assert response.status == 400
    assert orjson.loads(response.body)["error"]["param"] == "query"


def test_a_body_that_is_too_large_is_refused(engine: ScoringEngine) -> None:
    options = ServerOptions(max_request_bytes=10)
    assert ask(engine, HttpRequest("POST", "/v1/score", body=b"x" * 11), options).status == 413


def test_the_key_is_asked_for(engine: ScoringEngine) -> None:
    options = ServerOptions(api_key="secret")
    request = HttpRequest("POST", "/v1/score", body=orjson.dumps(BODY))
    assert ask(engine, request, options).status == 401
    keyed = HttpRequest("POST", "/v1/score", headers=((b"x-api-key", b"secret"),), body=request.body)
    assert ask(engine, keyed, options).status == 200


def test_a_client_that_goes_frees_its_place(engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.backend, "seconds_per_forward", 0.5)

    async def leave() -> int:
        service = Service(ServerOptions())
        service.open(engine)
        task = asyncio.create_task(answer(make_app(service), HttpRequest("POST", "/v1/score", body=orjson.dumps(BODY))))
        await asyncio.sleep(0.1)
        assert engine.scheduler.admission.tokens > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(1.0)
        service.close()
        return engine.scheduler.admission.tokens

    assert asyncio.run(leave()) == 0


def page(requests: int) -> str:
    metrics = Metrics()
    for _ in range(requests):
        metrics.count_request("/v1/score", 200, 0.01)
    return metrics.render().decode()


def test_every_sample_says_whose_it_is_and_none_is_lost() -> None:
    merged = merge_metrics({"a": page(2), "b": page(3)})
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    samples = [
        (sample.labels["replica"], sample.value)
        for sample in families["prefixwise:requests"].samples
        if sample.name == "prefixwise:requests_total"
    ]
    assert samples == [("a", 2.0), ("b", 3.0)]


def test_each_family_is_described_once() -> None:
    merged = merge_metrics({"a": page(1), "b": page(1)})
    described = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(described) == len(set(described)) == sum(line.startswith("# TYPE") for line in page(1).splitlines())


def test_labels_may_hold_anything() -> None:
    merged = merge_metrics({"a": '# TYPE x counter\nx_total{path="a} b",other="\\"q\\" "} 3 1.5e9\nx_bare 4\n'})
    assert 'x_total{replica="a",path="a} b",other="\\"q\\" "} 3 1.5e9' in merged
    assert 'x_bare{replica="a"} 4' in merged
