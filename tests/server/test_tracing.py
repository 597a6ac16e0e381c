"""Traces of requests: their spans, W3C `traceparent` in and out, ids in the log, and OTLP to a real collector."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

import httpx
import pytest

from prefixwise.client.attempts import Attempts, Settings
from prefixwise.contract.errors import BackendError, InvalidValueError
from prefixwise.server.config import ServerOptions
from prefixwise.server.logs import JsonFormatter
from prefixwise.server.tracing import Tracing, check_tracing
from tests.server.app_client import IDS_REQUEST, AppClient, BrokenBackend, app_client
from tests.server.server_process import WORKERS, server_process

sdk = pytest.importorskip("opentelemetry.sdk.trace")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # the example of W3C Trace Context
STAGES = ["prepare", "queue", "steps", "render"]
CLIENT_STAGES = ("receive", "send")  # left out below a millisecond


class Traced:
    """A client of an application whose spans stay in memory."""

    def __init__(self, client: AppClient, ratio: float = 1.0) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        self.client = client
        self._exporter = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self._exporter)
        client.service.tracing = Tracing(processor, ParentBasedTraceIdRatio(ratio), Resource({"service.name": "s"}))

    def spans(self) -> list[Any]:
        """The stages of the last request, and its own span last."""
        found = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return found


@pytest.fixture
def traced() -> Iterator[Traced]:
    with app_client() as client:
        yield Traced(client)


def test_a_request_is_a_span_with_its_stages_in_order(traced: Traced) -> None:
    response = traced.client.post("/v1/score", IDS_REQUEST, headers={"X-Request-Id": "r-1"})
    *stages, request = traced.spans()
    assert [each.name for each in stages if each.name not in CLIENT_STAGES] == STAGES
    assert request.name == "POST /v1/score" and request.kind.name == "SERVER" and request.parent is None
    assert {each.parent.span_id for each in stages} == {request.context.span_id}
    assert {each.context.trace_id for each in stages} == {request.context.trace_id}
    times = [request.start_time, *(each.end_time for each in stages), request.end_time]
    assert times == sorted(times)
    assert [each.start_time for each in stages if each.name in STAGES[1:]] == [
        each.end_time for each in stages if each.name in STAGES[:-1]
    ]
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/score",
        "http.response.status_code": 200,
        "gen_ai.request.id": "r-1",
        "gen_ai.response.model": "fake-model",
        "gen_ai.usage.prompt_tokens": 6,
        "prefixwise.items": 3,
        "prefixwise.cached_tokens": 0,
    }
    assert expected.items() <= dict(request.attributes).items()
    assert 0 <= request.attributes["gen_ai.latency.time_in_queue"] < request.attributes["gen_ai.latency.e2e"]
    (steps,) = (each for each in stages if each.name == "steps")
    assert steps.attributes["gen_ai.latency.time_in_model_inference"] > 0
    ids = (request.context.trace_id, request.context.span_id)
    assert response.headers["traceresponse"] == "00-{:032x}-{:016x}-01".format(*ids)
    text = json.dumps([dict(each.attributes) for each in (*stages, request)])
    assert "[1, 2, 3]" not in text  # nothing of the body


@pytest.mark.parametrize(
    ("sent", "is_traced"),
    [(f"00-{TRACE}-{PARENT}-01", True), (f"00-{TRACE}-{PARENT}-00", False)],
    ids=["sampled", "not"],
)
def test_a_client_decides_and_its_trace_goes_on(traced: Traced, sent: str, is_traced: bool) -> None:
    headers = {"traceparent": sent, "tracestate": "vendor=1"}
    response = traced.client.post("/v1/score", IDS_REQUEST, headers=headers)
    version, trace, own, flags = response.headers["traceresponse"].split("-")
    assert (version, trace, flags) == ("00", TRACE, sent[-2:]) and own != PARENT
    spans = traced.spans()
    assert bool(spans) == is_traced
    if is_traced:
        assert f"{spans[-1].parent.span_id:016x}" == PARENT and spans[-1].parent.is_remote
        assert spans[-1].context.trace_state["vendor"] == "1"


@pytest.mark.parametrize("sent", ["", "00-zz-1-01", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", "é" * 70])
def test_a_header_that_is_no_traceparent_begins_a_trace(traced: Traced, sent: str) -> None:
    response = traced.client.post("/v1/score", IDS_REQUEST, headers={b"traceparent": sent.encode()})
    assert response.status_code == 200
    assert traced.spans()[-1].parent is None
    assert response.headers["traceresponse"].split("-")[1] != TRACE


def test_faults_of_a_client_are_no_errors_and_ours_are(traced: Traced) -> None:
    traced.client.post("/v1/score", {"query": 7})
    stages, request = traced.spans()[:-1], traced.client.get("/nowhere")
    assert not {each.name for each in stages} & {*STAGES}
    assert request.status_code == 404
    (missing,) = traced.spans()
    assert (missing.name, missing.status.status_code.name) == ("GET other", "UNSET")
    with app_client(backend=BrokenBackend()) as client:
        broken = Traced(client)
        assert client.post("/v1/score", IDS_REQUEST).status_code == 500
        failed = broken.spans()[-1]
    assert (failed.status.status_code.name, failed.attributes["error.type"]) == ("ERROR", "500")


def test_what_is_not_sampled_leaves_nothing_and_probes_are_never_traced() -> None:
    with app_client() as client:
        traced = Traced(client, ratio=0.0)
        assert "traceresponse" not in client.post("/v1/score", IDS_REQUEST).headers
        always = Traced(client)
        client.get("/health")
        client.get("/metrics")
        assert traced.spans() == always.spans() == []


def test_the_log_has_the_ids_of_the_trace(traced: Traced) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(JsonFormatter().format(record))  # type: ignore[method-assign]
    log = logging.getLogger("prefixwise")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        traced.client.post("/v1/score", IDS_REQUEST)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    context = traced.spans()[-1].context
    found = json.loads(lines[-1])
    assert (found["trace_id"], found["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")


def test_a_client_sends_the_span_that_is_current() -> None:
    from opentelemetry import trace

    attempts = Attempts(Settings("http://127.0.0.1:1", None, 10.0, 0, 1))
    assert "traceparent" not in attempts.arguments()["headers"]
    current = trace.SpanContext(int(TRACE, 16), int(PARENT, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(current)):
        assert attempts.arguments()["headers"]["traceparent"] == f"00-{TRACE}-{PARENT}-01"


def test_without_the_option_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys\nfrom tests.server.app_client import IDS_REQUEST, app_client\n"
        "with app_client() as client: client.post('/v1/score', IDS_REQUEST).raise_for_status()\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "url", ["localhost:4318", "grpc://localhost:4317", "http://", "http://me:secret@host/v1/traces"]
)
def test_an_endpoint_must_be_a_url_without_secrets(url: str) -> None:
    with pytest.raises(InvalidValueError, match="otlp_traces_endpoint must be a URL like") as raised:
        ServerOptions(otlp_traces_endpoint=url)
    assert "secret" not in str(raised.value)


def test_missing_packages_are_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing(ServerOptions())
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BackendError, match=r"--otlp-traces-endpoint needs .* install it with: pip install"):
        check_tracing(ServerOptions(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))


@contextmanager
def collector() -> Iterator[tuple[str, SimpleQueue[Any]]]:
    """A server of OTLP over HTTP: its URL, and the requests that it has decoded."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: SimpleQueue[Any] = SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            is_packed = self.headers.get("Content-Encoding") == "gzip"
            message = ExportTraceServiceRequest()
            message.ParseFromString(gzip.decompress(content) if is_packed else content)
            received.put((self.path, message))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("form", [(), (WORKERS,)], ids=["one process", "workers"])
def test_a_collector_receives_the_spans_of_a_server(form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers the engine's times come from its process."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "scores")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with collector() as (url, received):
        options = json.dumps({"otlp_traces_endpoint": url})
        with server_process(*form, f"--options={options}", "--delay=0.02") as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            response = httpx.post(f"{server.url}/v1/score", json=IDS_REQUEST, headers=headers, timeout=60)
            logged = server.wait_for_line(rf"trace_id={TRACE} span_id=(\w+)")[1]
            path, message = received.get(timeout=60)
    assert path == "/v1/traces"
    (batch,) = message.resource_spans
    resource = {each.key: each.value.string_value for each in batch.resource.attributes}
    assert resource["service.name"] == "scores" and resource["service.version"]
    spans = {each.name: each for each in batch.scope_spans[0].spans}
    assert [name for name in spans if name not in CLIENT_STAGES] == [*STAGES, "POST /v1/score"]
    request, steps = spans["POST /v1/score"], spans["steps"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert response.headers["traceresponse"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert logged == request.span_id.hex()
    assert steps.end_time_unix_nano - steps.start_time_unix_nano >= 0.02e9
    assert request.start_time_unix_nano <= steps.start_time_unix_nano < request.end_time_unix_nano


def test_a_collector_that_is_away_does_not_hold_up_the_end() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    options = json.dumps({"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"})
    with server_process(f"--options={options}") as server:
        assert httpx.post(f"{server.url}/v1/score", json=IDS_REQUEST, timeout=60).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
