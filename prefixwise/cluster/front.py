"""The front: receives HTTP from Ray Serve's proxies and has every request answered by a replica.

It loads no model. It reads the query to find the request's home, retries elsewhere when a replica dies with the request
or its queue is full, and merges the responses of all replicas for routes such as `/metrics`. Retries are safe: a score
is the same wherever and however often it is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import orjson
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter
from starlette.requests import Request
from starlette.responses import Response

from prefixwise.cluster.exchange import HttpRequest, HttpResponse, merge_metrics
from prefixwise.cluster.routing import RequestKey, key_of
from prefixwise.cluster.tickets import Ticket, known_replicas, ledger
from prefixwise.contract.errors import InternalError, InvalidValueError, RequestError, UnavailableError
from prefixwise.server.middleware import without_slash
from prefixwise.server.scoring import TIMEOUT_HEADER, allowed_seconds, deadline_error

log = logging.getLogger("prefixwise")

MAX_ATTEMPTS = 4  # replicas per request
_PAUSE_SECONDS = 0.1  # after a dead replica, longer each time
_HEALTH_SECONDS = 5.0  # for a replica to report its health
_GRACE_SECONDS = 1.0  # beyond a request's timeout, so that its replica is the one that reports it
_QUEUE_FULL = 429
_OK = 200
_NOT_FOUND = 404
_REQUEST_ID_HEADER = b"x-request-id"  # Serve reads or makes it, and adds it to the response itself
_TIMEOUT_HEADER = TIMEOUT_HEADER.lower().encode()
_GONE = (RayActorError, ObjectLostError, RayServeException)  # a replica, its response, or all replicas for the moment


class Front:
    """Serve's ingress. Any number may run: they share nothing."""

    def __init__(self, replicas: DeploymentHandle, max_request_bytes: int, request_timeout: float) -> None:
        self._replicas = replicas
        self._max_request_bytes = max_request_bytes
        self._request_timeout = request_timeout
        self._retries = Counter(
            "prefixwise_cluster_retries", "Requests sent to another replica, by reason.", tag_keys=("reason",)
        )

    async def __call__(self, http: Request) -> Response:
        request = await _read(http, self._max_request_bytes)
        found = await self._answer_in_time(request)
        response = Response(found.body, found.status)
        response.raw_headers = [(name, value) for name, value in found.headers if name != _REQUEST_ID_HEADER]
        return response

    async def _answer_in_time(self, request: HttpRequest) -> HttpResponse:
        """A response in any case."""
        seconds = self._allowed_seconds(request)
        end = None if seconds is None else time.monotonic() + seconds
        try:
            async with asyncio.timeout(None if seconds is None else seconds + _GRACE_SECONDS):
                return await self._answer(request, end)
        except TimeoutError:
            return _refusal(deadline_error(seconds or 0.0))
        except Exception:
            log.exception("a request failed")
            return _refusal(InternalError("an internal error occurred; the log of the fronts has the details"))

    def _allowed_seconds(self, request: HttpRequest) -> float | None:
        try:
            return allowed_seconds(request.header(_TIMEOUT_HEADER), self._request_timeout)
        except InvalidValueError:  # the replica reports it
            return self._request_timeout or None

    async def _answer(self, request: HttpRequest, end: float | None) -> HttpResponse:
        if request.path == "/metrics" and request.method == "GET":
            return await self._metrics(request)
        if request.path == "/v1/prefix" and request.method == "GET":
            return await self._prefixes(request)
        if request.path.startswith("/v1/prefix/") and request.method == "DELETE":
            return await self._release(request)
        if request.path == "/health":
            return await self._health(request)
        return await self._send(request, key_of(request), end)

    async def _send(self, request: HttpRequest, key: RequestKey, end: float | None = None) -> HttpResponse:
        """The first response other than "queue full", or the last one. `end`: the deadline, by time.monotonic()."""
        avoid: frozenset[str] = frozenset()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if attempt > 1 and end is not None:
                request = _with_seconds_left(request, end)
            try:
                response = await self._ask(request, Ticket(key, avoid=avoid))
            except _GONE as error:
                log.warning("attempt %d: the replica is gone: %s", attempt, type(error).__name__)
                self._retries.inc(tags={"reason": "replica_gone"})
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
                continue
            if response.status != _QUEUE_FULL or attempt >= min(MAX_ATTEMPTS, len(known_replicas())):
                return response
            self._retries.inc(tags={"reason": "queue_full"})
            avoid |= {response.replica}
        message = "the replicas went away while they scored this request; send it again"
        return _refusal(UnavailableError(message, code="replicas_gone"))

    async def _ask(self, request: HttpRequest, ticket: Ticket) -> HttpResponse:
        """A client that disconnects cancels this, and so the replica's work."""
        with ledger().open(ticket):
            response: HttpResponse = await self._replicas.answer.remote(request, ticket)
        return response

    async def _health(self, request: HttpRequest) -> HttpResponse:
        """Healthy if any replica answers."""
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                return await self._send(request, RequestKey())
        except TimeoutError:
            return _refusal(_not_ready())

    # Routes that ask all replicas

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        pages: dict[str, str] = {}
        async for response in self._ask_all(request):
            if response.status != _OK:
                return response
            pages[response.replica] = response.body.decode()
            like = response
        return like.with_body(merge_metrics(pages).encode()) if pages else _refusal(_not_ready())

    async def _prefixes(self, request: HttpRequest) -> HttpResponse:
        prefixes: list[object] = []
        async for response in self._ask_all(request):
            if response.status != _OK:
                return response
            prefixes += [{**prefix, "replica": response.replica} for prefix in orjson.loads(response.body)["data"]]
            like = response
        return like.with_body(orjson.dumps({"object": "list", "data": prefixes}))

    async def _release(self, request: HttpRequest) -> HttpResponse:
        """Release the prefix on the replica that has it."""
        async for response in self._ask_all(request):
            if response.status != _NOT_FOUND:
                return response
        return response

    async def _ask_all(self, request: HttpRequest) -> AsyncIterator[HttpResponse]:
        """One after another: Serve distinguishes the calls of one request by their order alone."""
        first = await self._send(request, RequestKey())
        yield first
        for other in known_replicas():
            if other == first.replica:
                continue
            try:
                response = await self._ask(request, Ticket(RequestKey(), only=other))
            except _GONE as error:
                log.warning("replica %s did not answer: %s", other, type(error).__name__)
                continue
            if response.replica == other:  # else it is gone by now
                yield response


async def _read(http: Request, max_bytes: int) -> HttpRequest:
    """Reads at most one byte more than allowed, which is enough for the replica to refuse the request."""
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            break
    client = None if http.client is None else (http.client.host, http.client.port)
    headers = tuple((bytes(name), bytes(value)) for name, value in http.headers.raw)
    body = b"".join(parts)[: max_bytes + 1]
    path = without_slash(http.scope["path"])
    return HttpRequest(http.method, path, http.scope["query_string"], headers, body, client)


def _with_seconds_left(request: HttpRequest, end: float) -> HttpRequest:
    """The remaining timeout for another replica, which counts from the arrival there."""
    left = max(0.001, end - time.monotonic())
    return request.with_header(_TIMEOUT_HEADER, f"{left:.3f}".encode())


def _not_ready() -> UnavailableError:
    return UnavailableError("no replica is ready; try again soon", code="not_ready")


def _refusal(error: RequestError) -> HttpResponse:
    """The error as a response, in the form of all errors."""
    body = orjson.dumps(error.to_body())
    return HttpResponse(error.status, ((b"content-type", b"application/json"),), b"").with_body(body)
