"""The front: receives HTTP from Ray Serve's proxies and has every request answered by a replica.

It loads no model. It reads the query to find the request's home, retries elsewhere when a replica dies with the
request, cannot take it or returns something else than a response, and merges the responses of all replicas for routes
such as `/metrics`. Retries are safe: a score is the same wherever and however often it is computed.

It reads no body that a replica will refuse unread: of a client without the key, or larger than is allowed. The replica
gets the rest of such a request, and its error is the response.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import orjson
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter
from starlette.requests import Request
from starlette.responses import Response

from prefixwise.cluster.exchange import HttpRequest, HttpResponse, checked_response, merge_metrics
from prefixwise.cluster.options import ClusterOptions, Secret
from prefixwise.cluster.routing import RequestKey, key_of
from prefixwise.cluster.tickets import Ticket, known_replicas, ledger
from prefixwise.contract.errors import InternalError, InvalidValueError, RequestError, ServiceError, UnavailableError
from prefixwise.server.body_memory import BodyMemory, BodyShare
from prefixwise.server.context import HEALTH_PATHS
from prefixwise.server.middleware import needs_key, sent_key, without_slash
from prefixwise.server.scoring import TIMEOUT_HEADER, allowed_seconds, deadline_error

log = logging.getLogger("prefixwise")

MAX_ATTEMPTS = 4  # replicas per request
_PAUSE_SECONDS = 0.1  # after a dead replica, longer each time
_HEALTH_SECONDS = 5.0  # for a replica to report its health, or its part of a response of all
_LARGE_BYTES = 64 * 2**10  # of a body whose query is worth a thread
_GRACE_SECONDS = 1.0  # beyond a request's timeout, so that its replica is the one that reports it
_RETRY_SECONDS = 1  # for clients, while no replica is ready
_REASONS = {429: "queue_full", 503: "unavailable"}  # statuses that another replica may not have
_OK = 200
_NOT_FOUND = 404
_REQUEST_ID_HEADER = b"x-request-id"  # Serve reads or makes it, and adds it to the response itself
_TIMEOUT_HEADER = TIMEOUT_HEADER.lower().encode()


class BadResponseError(Exception):
    """A replica returned something that is no response."""


_GONE = (RayActorError, ObjectLostError, RayServeException)  # a replica, its response, or all replicas for the moment
_FAILED = (*_GONE, BadResponseError)


class Front:
    """Serve's ingress. Any number may run: they share nothing."""

    def __init__(self, replicas: DeploymentHandle, options: Mapping[str, Any], api_key: Secret) -> None:
        server = ClusterOptions.from_json(options).with_key(api_key.value).server
        self._replicas = replicas
        self._max_request_bytes = server.max_request_bytes
        self._request_timeout = server.request_timeout
        self._key = None if server.api_key is None else server.api_key.encode()
        self._body_memory = BodyMemory(server.max_body_memory)
        self._retries = Counter(
            "prefixwise_cluster_retries", "Requests sent to another replica, by reason.", tag_keys=("reason",)
        )

    async def __call__(self, http: Request) -> Response:
        share = self._body_memory.share()
        try:
            found = await self._answer_in_time(await self._read(http, share))
        except RequestError as error:
            found = _refusal(error)
        finally:
            share.give_back()
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

    async def _read(self, http: Request, share: BodyShare) -> HttpRequest:
        """Raises body_memory_full. At most one byte more than allowed: enough for the replica to refuse the request."""
        client = None if http.client is None else (http.client.host, http.client.port)
        headers = tuple((bytes(name), bytes(value)) for name, value in http.headers.raw)
        path = without_slash(http.scope["path"])
        request = HttpRequest(http.method, path, http.scope["query_string"], headers, b"", client)
        if not self._has_key(request) or _announced(request) > self._max_request_bytes:
            return request
        share.check(_announced(request))
        parts: list[bytes] = []
        size = 0
        async for part in http.stream():
            share.take(len(part))
            parts.append(part)
            size += len(part)
            if size > self._max_request_bytes:
                break
        return replace(request, body=b"".join(parts)[: self._max_request_bytes + 1])

    def _has_key(self, request: HttpRequest) -> bool:
        if self._key is None or not needs_key(request.path):
            return True
        return hmac.compare_digest(sent_key(dict(request.headers)), self._key)

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
        if request.path in HEALTH_PATHS:
            return await self._health(request)
        is_large = len(request.body) > _LARGE_BYTES
        key = await asyncio.to_thread(key_of, request) if is_large else key_of(request)
        return await self._send(request, key, end)

    async def _send(self, request: HttpRequest, key: RequestKey, end: float | None = None) -> HttpResponse:
        """The first response of a replica that takes it, or the last one. `end`: the deadline, by time.monotonic()."""
        avoid: frozenset[str] = frozenset()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if attempt > 1 and end is not None:
                request = _with_seconds_left(request, end)
            try:
                response = await self._ask(request, Ticket(key, avoid=avoid))
            except _FAILED as error:
                log.warning("attempt %d: no response of the replica: %s: %s", attempt, type(error).__name__, error)
                is_gone = isinstance(error, _GONE)
                self._retries.inc(tags={"reason": "replica_gone" if is_gone else "bad_response"})
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
                continue
            if response.status not in _REASONS or attempt >= min(MAX_ATTEMPTS, len(known_replicas())):
                return response
            self._retries.inc(tags={"reason": _REASONS[response.status]})
            avoid |= {response.replica}
        message = "the replicas went away while they scored this request; send it again"
        return _refusal(UnavailableError(message, code="replicas_gone"))

    async def _ask(self, request: HttpRequest, ticket: Ticket) -> HttpResponse:
        """A client that disconnects cancels this, and so the replica's work."""
        with ledger().open(ticket):
            found = await self._replicas.answer.remote(request, ticket)
        try:
            return checked_response(found)
        except ValueError as error:
            raise BadResponseError(str(error)) from None

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
            pages[response.replica] = response.body.decode("utf-8", "replace")
            like = response
        return like.with_body(merge_metrics(pages).encode()) if pages else _refusal(_not_ready())

    async def _prefixes(self, request: HttpRequest) -> HttpResponse:
        prefixes: list[object] = []
        async for response in self._ask_all(request):
            if response.status != _OK:
                return response
            prefixes += _prefixes_of(response)
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
                async with asyncio.timeout(_HEALTH_SECONDS):  # one that hangs must not hide the others
                    response = await self._ask(request, Ticket(RequestKey(), only=other))
            except (*_FAILED, TimeoutError) as error:
                log.warning("replica %s did not answer: %s", other, type(error).__name__)
                continue
            if response.replica == other:  # else it is gone by now
                yield response


def _announced(request: HttpRequest) -> int:
    """The size of the body as its header says; 0 where it does not."""
    sent = request.header(b"content-length") or b""
    return int(sent) if sent.isdigit() else 0


def _prefixes_of(response: HttpResponse) -> list[dict[str, object]]:
    """Those of one replica, with its name."""
    try:
        return [{**prefix, "replica": response.replica} for prefix in orjson.loads(response.body)["data"]]
    except (ValueError, LookupError, TypeError) as error:
        log.warning("replica %s returned no list of prefixes: %s", response.replica, error)
        return []


def _with_seconds_left(request: HttpRequest, end: float) -> HttpRequest:
    """The remaining timeout for another replica, which counts from the arrival there."""
    left = max(0.001, end - time.monotonic())
    return request.with_header(_TIMEOUT_HEADER, f"{left:.3f}".encode())


def _not_ready() -> UnavailableError:
    return UnavailableError("no replica is ready; try again soon", code="not_ready", retry_after=_RETRY_SECONDS)


def _refusal(error: RequestError) -> HttpResponse:
    """The error as a response, in the form of all errors."""
    body = orjson.dumps(error.to_body())
    found = HttpResponse(error.status, ((b"content-type", b"application/json"),), b"").with_body(body)
    seconds = error.retry_after if isinstance(error, ServiceError) else None
    return found if seconds is None else found.with_header(b"retry-after", str(seconds).encode())
