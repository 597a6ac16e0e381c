"""Traces of requests for OpenTelemetry, with `--otlp-traces-endpoint`. Without it nothing here is imported or runs.

A sampled request is a SERVER span with one child for each stage of its path (`scoring.py`):

    POST /v1/score
      receive   the body arrives; left out below a millisecond
      prepare   JSON, checks, tokens, plan
      queue     until the scheduler's first step with a part of it
      steps     until its last step is done
      render    scores and JSON
      send      the response, at the speed of the client; left out below a millisecond

Spans are made when the request has ended, from the times that it has noted: a request that is not sampled costs the
sampler's decision and nothing else. Attributes have the names of OpenTelemetry (`http.*`) and vLLM (`gen_ai.*`).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from prefixwise._version import __version__
from prefixwise.contract.errors import BackendError
from prefixwise.engine.request_state import RequestState
from prefixwise.host import install_command
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import HEALTH_PATHS, RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import SpanContext

_UNTRACED_PATHS = (*HEALTH_PATHS, "/metrics")  # machines ask for them every few seconds
_UNTRACED_FOLDER = "/page/"
_CLOSE_SECONDS = 3.0  # for the collector to take the last spans
_OF_CLIENT = ("receive", "send")  # stages that are as long as the client makes them
_SHORT_SECONDS = 0.001  # of such a stage that says nothing; each span costs the exporter about 50 microseconds
_NANOSECONDS = 1_000_000_000

Attributes = dict[str, Any]


class SpanProcessor(Protocol):
    """What we need of an SDK's span processor."""

    def on_end(self, span: ReadableSpan) -> None: ...

    def shutdown(self) -> None: ...


def check_tracing(options: ServerOptions) -> None:
    """Raises BackendError where traces are asked for and their packages are not installed."""
    if options.otlp_traces_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        command = install_command("otel")
        message = f"--otlp-traces-endpoint needs the OpenTelemetry SDK; install it with: {command}"
        raise BackendError(message) from None


def open_tracing(options: ServerOptions) -> Tracing | None:
    """For this process: the exporter has a thread, which no fork takes along. Raises BackendError."""
    check_tracing(options)
    if options.otlp_traces_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = _resource()
    sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler  # of OTEL_TRACES_SAMPLER
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(options.otlp_traces_endpoint)), sampler, resource)


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, and what they leave open."""
    from opentelemetry.sdk.resources import Resource

    found = Resource.create()
    ours = {"service.version": __version__, "service.instance.id": str(uuid4())}
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        ours["service.name"] = "prefixwise"
    given = {name: value for name, value in found.attributes.items() if name != "service.name" or name not in ours}

    class OneResource(Resource):  # type: ignore[misc]
        """There is one in a process. The exporter asks each span's for its hash, and the SDK's makes JSON of it."""

        __hash__ = object.__hash__

    return OneResource({**ours, **given})


class Tracing:
    """Decides which requests of this process are traced, and hands their spans to the exporter."""

    def __init__(self, processor: SpanProcessor, sampler: Sampler, resource: Resource) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api = trace
        self.resource = resource
        self.scope = InstrumentationScope("prefixwise", __version__)
        self.processor = processor
        self.make_span = ReadableSpan
        self.unset, self.error = trace.Status(), trace.Status(trace.StatusCode.ERROR)
        self._sampler = sampler
        self._no_parent = Context()
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, context: RequestContext) -> None:
        """A request has arrived: sample it, by the `traceparent` of its client if there is one."""
        path = context.path
        if path in _UNTRACED_PATHS or path.startswith(_UNTRACED_FOLDER):
            return
        sent = context.headers.get(b"traceparent")
        parent_context, parent = self._no_parent, None
        if sent is not None:
            parent_context, parent = self._parent(sent, context.headers.get(b"tracestate"))
        trace_id = _random_id(128) if parent is None else parent.trace_id
        name = f"{context.method} {path}"
        result = self._sampler.should_sample(parent_context, trace_id, name, self.api.SpanKind.SERVER)
        is_sampled = result.decision.is_sampled()
        if not is_sampled and parent is None:
            return
        flags = self.api.TraceFlags(self.api.TraceFlags.SAMPLED if is_sampled else self.api.TraceFlags.DEFAULT)
        span = self.api.SpanContext(trace_id, _random_id(64), False, flags, result.trace_state)
        context.trace = RequestTrace(self, span, parent, context.arrival)
        context.add_header(b"traceresponse", f"00-{trace_id:032x}-{span.span_id:016x}-{flags:02x}".encode())

    def _parent(self, traceparent: bytes, tracestate: bytes | None) -> tuple[Any, SpanContext | None]:
        """None for a header that is none: W3C says that a trace begins here."""
        carrier = {"traceparent": traceparent.decode("latin-1")}
        if tracestate is not None:
            carrier["tracestate"] = tracestate.decode("latin-1")
        found = self._propagator.extract(carrier)
        parent = self.api.get_current_span(found).get_span_context()
        return (found, parent) if parent.is_valid else (self._no_parent, None)

    def close(self) -> None:
        """Export the last spans, but do not wait long for a collector that is not there."""
        closing = threading.Thread(target=self.processor.shutdown, name="prefixwise-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class RequestTrace:
    """The trace of one request: its ids, and when its stages ended."""

    __slots__ = ("_parent", "_stages", "_start", "_start_ns", "_tracing", "span")

    def __init__(self, tracing: Tracing, span: SpanContext, parent: SpanContext | None, arrival: float) -> None:
        self._tracing = tracing
        self._parent = parent
        self._start = arrival
        self._start_ns = time.time_ns() - int((time.monotonic() - arrival) * _NANOSECONDS)
        self._stages: list[tuple[str, float, Attributes | None]] = []  # each begins where the one before it ended
        self.span = span

    @property
    def ids(self) -> dict[str, str]:
        """For the log."""
        return {"trace_id": f"{self.span.trace_id:032x}", "span_id": f"{self.span.span_id:016x}"}

    def end_stage(self, name: str, at: float | None = None, attributes: Attributes | None = None) -> None:
        """A stage has ended, now or at this value of time.monotonic()."""
        self._stages.append((name, time.monotonic() if at is None else at, attributes))

    def end_steps(self, states: Sequence[RequestState]) -> None:
        """The requests of a call are done, or were given up."""
        started = [state.started for state in states if state.started is not None]
        if not started:
            self.end_stage("queue")
            return
        self.end_stage("queue", min(started))
        seconds = {
            "gen_ai.latency.time_in_model_prefill": max(state.prefill_seconds for state in states),
            "gen_ai.latency.time_in_model_inference": max(state.device_seconds for state in states),
        }
        self.end_stage("steps", None, seconds)

    def end(self, context: RequestContext, route: str, status: int, model: str) -> None:
        """The request has ended: hand its spans over."""
        if not self.span.trace_flags.sampled:
            return
        now = time.monotonic()
        if self._stages:
            self.end_stage("send", now)
        begin = self._start
        for name, end, attributes in self._stages:
            end = max(begin, end)
            if name not in _OF_CLIENT or end - begin >= _SHORT_SECONDS:
                own = self._tracing.api.SpanContext(self.span.trace_id, _random_id(64), False, self.span.trace_flags)
                self._export(name, own, self.span, attributes, begin, end)
            begin = end
        name = f"{context.method} {route}"
        attributes = _request_attributes(context, route, status, model, now - self._start)
        self._export(name, self.span, self._parent, attributes, self._start, now, status)

    def _export(
        self,
        name: str,
        span: SpanContext,
        parent: SpanContext | None,
        attributes: Mapping[str, Any] | None,
        begin: float,
        end: float,
        http_status: int | None = None,
    ) -> None:
        api, tracing = self._tracing.api, self._tracing
        is_error = http_status is not None and http_status >= 500  # 4xx are the client's, as the conventions say
        made = tracing.make_span(
            name,
            span,
            parent,
            tracing.resource,
            attributes or {},
            kind=api.SpanKind.INTERNAL if http_status is None else api.SpanKind.SERVER,
            status=tracing.error if is_error else tracing.unset,
            start_time=self._at(begin),
            end_time=self._at(end),
            instrumentation_scope=tracing.scope,
        )
        tracing.processor.on_end(made)

    def _at(self, moment: float) -> int:
        return self._start_ns + int((moment - self._start) * _NANOSECONDS)


def _request_attributes(context: RequestContext, route: str, status: int, model: str, seconds: float) -> Attributes:
    """Never bodies, keys or query strings."""
    attributes: Attributes = {
        "http.request.method": context.method,
        "http.route": route,
        "http.response.status_code": status,
        "url.path": context.path[:200],
        "url.scheme": context.scope.get("scheme", "http"),
        "gen_ai.request.id": context.id,
        "gen_ai.latency.e2e": seconds,
    }
    if status >= 500:
        attributes["error.type"] = str(status)
    stats = context.stats
    if stats is not None:
        attributes["gen_ai.response.model"] = model
        attributes["gen_ai.usage.prompt_tokens"] = stats.prompt_tokens
        attributes["gen_ai.latency.time_in_queue"] = stats.queue_seconds
        attributes["prefixwise.items"] = stats.items
        attributes["prefixwise.labels"] = stats.labels
        attributes["prefixwise.requests"] = stats.requests if stats.requests != 1 else None
        attributes["prefixwise.algorithm"] = stats.algorithm
        attributes["prefixwise.cached_tokens"] = stats.cached_tokens
    return {name: value for name, value in attributes.items() if value is not None}


def _random_id(bits: int) -> int:
    """As the SDK's: 0 is no id."""
    return random.getrandbits(bits) or 1
