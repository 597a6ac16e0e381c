"""Between the event loop and the engine: submit a job, wait for it, and give it up when nobody waits any more."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.responses import Response

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import DeadlineExceededError, InvalidValueError
from prefixwise.engine.job import Job, OnChange
from prefixwise.server.call import Call

TIMEOUT_HEADER = "X-Request-Timeout"
_NUMBER = re.compile(r"\s*[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?\s*")
LEAST_TIMEOUT = 0.001  # seconds; nothing is scored in less


async def run_job(call: Call, submit: Callable[[OnChange], Job]) -> Job:
    """The job, done. It is cancelled when the client goes, and when this coroutine is."""
    loop = asyncio.get_running_loop()
    waiter = _Waiter(loop)
    job = submit(waiter.notify)
    waiter.attach(job)
    watcher = loop.create_task(call.until_disconnected())
    watcher.add_done_callback(partial(_cancel_job, job))
    try:
        await waiter.done
    finally:
        watcher.cancel()
        job.cancel()  # does nothing to one that is done
    return job


def _cancel_job(job: Job, watcher: asyncio.Task[None]) -> None:
    if not watcher.cancelled():
        job.cancel()


class _Waiter:
    """A future of the event loop that the scheduler's thread can settle."""

    __slots__ = ("_job", "_loop", "done")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._job: Job | None = None

    def attach(self, job: Job) -> None:
        """On the event loop, right after the job was submitted; it may be done already."""
        self._job = job
        self._settle()

    def notify(self) -> None:
        """On the scheduler's thread, perhaps before `submit` has returned."""
        if self._job is None or self._job.is_done:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self._job is not None and self._job.is_done and not self.done.done():
            self.done.set_result(None)


Work = Callable[[float | None], Awaitable[Response]]  # takes the deadline, in seconds of time.monotonic()


async def within_deadline(call: Call, request_timeout: float, work: Work) -> Response:
    """The response, or DeadlineExceededError as soon as the time is up, whatever the request is waiting for."""
    seconds = allowed_seconds(call.headers.get(TIMEOUT_HEADER.lower().encode()), request_timeout)
    if seconds is None:
        return await work(None)
    deadline = call.arrival + seconds
    try:
        async with asyncio.timeout(deadline - time.monotonic()) as limit:
            return await work(deadline)
    except TimeoutError:
        if not limit.expired():
            raise
        raise too_late(seconds) from None


def too_late(seconds: float) -> DeadlineExceededError:
    """For a request that was allowed so long."""
    return DeadlineExceededError(f"the request must be done within {seconds:g} seconds of its arrival, and it is not")


def allowed_seconds(sent: bytes | None, request_timeout: float) -> float | None:
    """What the server allows, or the caller's header where that is less; None: any time. Raises InvalidValueError."""
    if sent is None:
        return request_timeout or None
    text = sent.decode("latin-1")
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not (math.isfinite(seconds) and seconds >= LEAST_TIMEOUT):
        message = f"{TIMEOUT_HEADER} must be a number of seconds of at least {LEAST_TIMEOUT}, got {quote(text)}"
        raise InvalidValueError(message, code="invalid_request_timeout", param=TIMEOUT_HEADER)
    return min(seconds, request_timeout) if request_timeout else seconds
