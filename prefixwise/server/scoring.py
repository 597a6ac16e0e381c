"""The path of a scoring request: read the body, prepare it, let the engine run it, render the result.

Every API that scores takes it; the dialect says what its JSON means (`dialects/`). Also here, for the other handlers:
waiting for the scheduler (`Completion`) and the request's deadline (`time_limit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import orjson
from starlette.responses import Response

from prefixwise.contract.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    InvalidValueError,
    TokenizerError,
    quote,
)
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.server.context import JsonResponse, RequestContext, RequestStats, decode_object, read_body
from prefixwise.server.dialects.base import Body, Dialect, Prepared
from prefixwise.server.service import Service

# Below these bounds the work is shorter than a switch to another thread and back.
_INLINE_BYTES = 64 * 1024
_INLINE_SCORES = 10_000  # items x labels

TIMEOUT_HEADER = "X-Request-Timeout"
LEAST_TIMEOUT = 0.001  # seconds; nothing is scored in less
_NUMBER = re.compile(r"\s*[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?\s*")


async def score(service: Service, context: RequestContext, *, dialects: tuple[Dialect, ...]) -> Response:
    """Score the request in the body. `dialects`: those of the path; the first that matches the body applies.

    Raises RequestError if the request cannot be scored.
    """
    if len(dialects) == 1:  # else the form of the error depends on the body
        service.engine.scheduler.admission.check()
    async with time_limit(context, service.options.request_timeout) as deadline:
        content = await read_body(context, service.options.max_request_bytes)
        prepared = await _prepare(service, context, dialects, content)
        state = await _run(service, context, prepared, deadline)
        return await _render(service, context, prepared, state)


async def _prepare(
    service: Service, context: RequestContext, dialects: tuple[Dialect, ...], content: bytes
) -> Prepared:
    """On the event loop if that is quick, else on the thread pool."""
    if len(content) >= _INLINE_BYTES:
        prepared = await service.in_pool(partial(_decode_and_prepare, service, context, dialects, content))
    else:
        body = decode_object(content)
        dialect = _choose(context, dialects, body)
        work = partial(_prepare_body, service, dialect, body)
        prepared = await service.in_pool(work) if dialect.has_text(body) else work()
    _record_prepared(service, context, prepared.scoring)
    return prepared


def _decode_and_prepare(
    service: Service, context: RequestContext, dialects: tuple[Dialect, ...], content: bytes
) -> Prepared:
    body = decode_object(content)
    return _prepare_body(service, _choose(context, dialects, body), body)


def _choose(context: RequestContext, dialects: tuple[Dialect, ...], body: Body) -> Dialect:
    dialect = next(each for each in dialects if each.matches(body))
    context.error_body = dialect.error_body
    return dialect


def _prepare_body(service: Service, dialect: Dialect, body: Body) -> Prepared:
    with map_tokenizer_error():
        return dialect.prepare(service, body)


@contextmanager
def map_tokenizer_error() -> Iterator[None]:
    """Text for a model without a tokenizer is an error of the request."""
    try:
        yield
    except TokenizerError as error:
        raise InvalidRequestError(str(error), code="no_tokenizer") from None


def _record_prepared(service: Service, context: RequestContext, scoring: PreparedRequest) -> None:
    context.stats = RequestStats(
        items=scoring.num_items,
        labels=scoring.request.num_labels,
        prompt_tokens=scoring.prompt.prompt_tokens,
    )
    if scoring.plan is not None:
        context.stats.algorithm = scoring.plan.algorithm
        service.metrics.count_algorithm(scoring.plan.algorithm)


async def _run(service: Service, context: RequestContext, prepared: Prepared, deadline: float | None) -> RequestState:
    completion = Completion()
    state = service.engine.submit(
        prepared.scoring, deadline=deadline, on_change=completion.notify, priority=prepared.priority
    )
    try:
        await completion.wait(context, state)
    finally:  # a request that was cancelled has waited, too
        _record_state(service, context, state)
    return state


def _record_state(service: Service, context: RequestContext, state: RequestState) -> None:
    service.metrics.observe_queue(state.queue_seconds)
    if context.stats is not None:
        context.stats.queue_seconds = state.queue_seconds
        context.stats.device_seconds = state.device_seconds
        context.stats.cached_tokens = state.cached_tokens


async def _render(service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> Response:
    scoring = prepared.scoring
    work = partial(_render_body, service, context, prepared, state)
    is_small = scoring.num_items * scoring.request.num_labels < _INLINE_SCORES
    content = work() if is_small else await service.in_pool(work)
    if context.stats is not None:
        service.metrics.count_scores(context.stats, len(scoring.item_errors))
    return JsonResponse(content)


def _render_body(service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> bytes:
    return orjson.dumps(prepared.dialect.render(service, context, prepared, state))


class Completion:
    """Lets the event loop wait for a request that the scheduler's thread runs. Submit it with `on_change=notify`."""

    __slots__ = ("_done", "_loop", "_state")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._state: RequestState | None = None

    def notify(self) -> None:
        """The scheduler's thread calls it, perhaps before `submit` has returned."""
        if self._state is None or self._state.is_done:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so no coroutine waits
                self._loop.call_soon_threadsafe(self._settle)

    async def wait(self, context: RequestContext, state: RequestState) -> None:
        """Return when the request is done. Cancels it if the client disconnects or this coroutine is cancelled."""
        self._state = state
        self._settle()  # it may be done already
        watcher = self._loop.create_task(context.until_disconnected())
        watcher.add_done_callback(partial(_cancel_state, state))
        try:
            await self._done
        finally:
            watcher.cancel()
            state.cancel()  # has no effect on a request that is done

    def _settle(self) -> None:
        if self._state is not None and self._state.is_done and not self._done.done():
            self._done.set_result(None)


def _cancel_state(state: RequestState, watcher: asyncio.Task[None]) -> None:
    if not watcher.cancelled():
        state.cancel()


@asynccontextmanager
async def time_limit(context: RequestContext, request_timeout: float) -> AsyncIterator[float | None]:
    """The request's deadline, of time.monotonic(); None: no limit. Raises DeadlineExceededError when it passes."""
    seconds = allowed_seconds(context.headers.get(TIMEOUT_HEADER.lower().encode()), request_timeout)
    if seconds is None:
        yield None
        return
    deadline = context.arrival + seconds
    try:
        async with asyncio.timeout(deadline - time.monotonic()) as limit:
            yield deadline
    except TimeoutError:
        if not limit.expired():
            raise
        raise deadline_error(seconds) from None


def deadline_error(seconds: float) -> DeadlineExceededError:
    """The error of a request that had so many seconds."""
    return DeadlineExceededError(f"the request must be done within {seconds:g} seconds of its arrival, and it is not")


def allowed_seconds(sent: bytes | None, request_timeout: float) -> float | None:
    """The server's timeout, or the client's header if that is less; None: no limit. Raises InvalidValueError."""
    if sent is None:
        return request_timeout or None
    text = sent.decode("latin-1")
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not (math.isfinite(seconds) and seconds >= LEAST_TIMEOUT):
        message = f"{TIMEOUT_HEADER} must be a number of seconds of at least {LEAST_TIMEOUT}, got {quote(text)}"
        raise InvalidValueError(message, code="invalid_request_timeout", param=TIMEOUT_HEADER)
    return min(seconds, request_timeout) if request_timeout else seconds
