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
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from threading import get_ident
from typing import TypeVar

from starlette.responses import Response

from prefixwise.contract.errors import CancelledError, DeadlineExceededError, InvalidValueError, quote
from prefixwise.engine.request_state import RequestState
from prefixwise.server.answers import PIECE_BYTES, StreamedJson, whole_json
from prefixwise.server.context import JsonResponse, RequestContext, RequestStats, decode_object, read_body
from prefixwise.server.dialects.base import Body, Call, Dialect, map_tokenizer_error
from prefixwise.server.service import Service

# Below these bounds the work is shorter than a switch to another thread and back.
_INLINE_BYTES = 64 * 1024
_INLINE_SCORES = 10_000  # items x labels
LARGE_BYTES = 256 * 1024  # of a body whose preparation may take seconds
_REPEATED = ("suffix", "item_first", "algorithm", "requests")  # make millions of tokens of a small body with many items

Result = TypeVar("Result")

TIMEOUT_HEADER = "X-Request-Timeout"
LEAST_TIMEOUT = 0.001  # seconds; nothing is scored in less
_NUMBER = re.compile(r"\s*[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?\s*")


async def score(service: Service, context: RequestContext, *, dialects: tuple[Dialect, ...]) -> Response:
    """Score what the body asks for. `dialects`: those of the path; the first that matches it applies, else the last.

    Raises RequestError if the request cannot be scored.
    """
    if len({type(each).error_body for each in dialects}) == 1:  # else the form of the error depends on the body
        service.engine.scheduler.admission.check()
    async with time_limit(context, service.options.request_timeout) as deadline:
        content = await read_body(context, service.options.max_request_bytes)
        context.end_stage("receive")
        call = await _prepare(service, context, dialects, content)
        response_bytes = _admit_response(service, context, call, len(content))
        del content
        context.end_stage("prepare")
        states = await _run(service, context, call, deadline)
        response = await _render(service, context, call, states, is_small=response_bytes <= PIECE_BYTES)
        context.end_stage("render")
        return response


async def _prepare(service: Service, context: RequestContext, dialects: tuple[Dialect, ...], content: bytes) -> Call:
    """On the event loop if that is quick, else on the thread pool."""
    if len(content) >= _INLINE_BYTES:
        work_on_all = partial(_decode_and_prepare, service, context, dialects, content)
        call = await while_connected(context, service.in_pool(work_on_all, is_large=len(content) >= LARGE_BYTES))
    else:
        body = decode_object(content)
        dialect = _choose(context, dialects, body)
        work = partial(_prepare_body, service, dialect, body)
        is_long = dialect.has_text(body) or any(name in body for name in _REPEATED)
        call = await service.in_pool(work) if is_long else work()
    _record_prepared(service, context, call)
    return call


def _decode_and_prepare(
    service: Service, context: RequestContext, dialects: tuple[Dialect, ...], content: bytes
) -> Call:
    body = decode_object(content)
    return _prepare_body(service, _choose(context, dialects, body), body)


def _choose(context: RequestContext, dialects: tuple[Dialect, ...], body: Body) -> Dialect:
    dialect = next((each for each in dialects if each.matches(body)), dialects[-1])
    context.error_body = dialect.error_body
    return dialect


def _prepare_body(service: Service, dialect: Dialect, body: Body) -> Call:
    with map_tokenizer_error():
        return dialect.prepare_call(service, body)


def _record_prepared(service: Service, context: RequestContext, call: Call) -> None:
    scorings = [each.scoring for each in call.prepared]
    plans = [each.plan for each in scorings if each.plan is not None]
    context.stats = RequestStats(
        requests=len(call.requests),
        items=sum(each.num_items for each in scorings),
        labels=max((each.request.num_labels for each in scorings), default=0),
        prompt_tokens=sum(each.prompt.prompt_tokens for each in scorings),
        algorithm=",".join(sorted({plan.algorithm for plan in plans})) or None,
    )
    for plan in plans:
        service.metrics.count_algorithm(plan.algorithm)


def _admit_response(service: Service, context: RequestContext, call: Call, sent_bytes: int) -> int:
    """Take the memory that the response may need, before anything is scored. Returns its bytes.

    Raises response_too_large, body_memory_full.
    """
    size, largest = call.max_response_bytes(sent_bytes), service.options.max_response_bytes
    if size > largest:
        message = (
            f"a response must have at most {largest} bytes (--max-response-bytes), got a request whose response may "
            f"have {size}; ask for fewer items, labels, hidden states or documents in one call"
        )
        raise InvalidValueError(message, code="response_too_large")
    context.body_share.take(size)
    return size


async def _run(service: Service, context: RequestContext, call: Call, deadline: float | None) -> list[RequestState]:
    """The states of the prepared requests, done. They are queued together, so that they share steps."""
    completions = [Completion() for _ in call.prepared]
    states = [
        service.engine.state_of(each.scoring, deadline=deadline, on_change=done.notify, priority=each.priority)
        for each, done in zip(call.prepared, completions, strict=True)
    ]
    service.engine.submit_all(states)
    try:
        await wait_for_all(context, completions, states)
    finally:  # a request that was cancelled has waited, too
        _record_states(service, context, [state for state in states if not state.is_refused])
    raise_refusal(states)
    return states


def raise_refusal(states: Sequence[RequestState]) -> None:
    """Raises the error of requests that an engine in another process has refused, after `submit_all` has returned."""
    for state in states:
        if state.is_refused and state.error is not None:
            raise state.error


def _record_states(service: Service, context: RequestContext, states: Sequence[RequestState]) -> None:
    if context.trace is not None:
        context.trace.end_steps(states)
    for state in states:
        service.metrics.observe_queue(state.queue_seconds)
    if context.stats is not None and states:
        context.stats.queue_seconds = max(state.queue_seconds for state in states)
        context.stats.device_seconds = max(state.device_seconds for state in states)  # they share forwards
        context.stats.cached_tokens = sum(state.cached_tokens for state in states)


async def _render(
    service: Service, context: RequestContext, call: Call, states: Sequence[RequestState], *, is_small: bool
) -> Response:
    """`is_small`: the response is one piece. A larger one becomes JSON while it is sent."""
    scorings = [each.scoring for each in call.prepared]
    work = partial(call.dialect.render_call, service, context, call, states)
    is_quick = sum(each.num_values for each in scorings) < _INLINE_SCORES
    value = work() if is_quick else await service.in_pool(work)
    for scoring, state in zip(scorings, states, strict=True):
        if state.error is None:
            service.metrics.count_scores(scoring.num_items - len(scoring.item_errors), scoring.prompt.prompt_tokens)
    return JsonResponse(whole_json(value)) if is_small else StreamedJson(value)


class Completion:
    """Lets the event loop wait for a request that the scheduler's thread runs. Submit it with `on_change=notify`."""

    __slots__ = ("_done", "_loop", "_state", "_thread")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._state: RequestState | None = None

    def notify(self) -> None:
        """The scheduler's thread calls it, perhaps before `submit` has returned; in an HTTP worker, the event loop."""
        if get_ident() == self._thread:
            self._settle()
        elif self._state is None or self._state.is_done:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so no coroutine waits
                self._loop.call_soon_threadsafe(self._settle)

    async def wait(self, context: RequestContext, state: RequestState) -> None:
        """Return when the request is done. Cancels it if the client disconnects or this coroutine is cancelled."""
        await wait_for_all(context, [self], [state])

    def watch(self, state: RequestState) -> asyncio.Future[None]:
        """Is done when the request is."""
        self._state = state
        self._settle()  # it may be done already
        return self._done

    def release(self) -> None:
        """Break the reference cycle with the request, so that its logits do not wait for the garbage collector."""
        self._state = None

    def _settle(self) -> None:
        if self._state is not None and self._state.is_done and not self._done.done():
            self._done.set_result(None)


async def wait_for_all(
    context: RequestContext, completions: Sequence[Completion], states: Sequence[RequestState]
) -> None:
    """Return when all requests are done. Cancels them if the client disconnects or this coroutine is cancelled."""
    done = [completion.watch(state) for completion, state in zip(completions, states, strict=True)]
    watcher = asyncio.get_running_loop().create_task(context.until_disconnected())
    watcher.add_done_callback(partial(_cancel_states, states))
    try:
        for each in done:
            await each
    finally:
        watcher.cancel()
        for completion, state in zip(completions, states, strict=True):
            state.cancel()  # has no effect on a request that is done
            completion.release()


def _cancel_states(states: Sequence[RequestState], watcher: asyncio.Task[None]) -> None:
    if not watcher.cancelled():
        for state in states:
            state.cancel()


async def while_connected(context: RequestContext, work: Coroutine[None, None, Result]) -> Result:
    """Wait for the work. Cancels it if the client disconnects: then raises CancelledError."""
    loop = asyncio.get_running_loop()
    task, watcher = loop.create_task(work), loop.create_task(context.until_disconnected())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledError
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


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
