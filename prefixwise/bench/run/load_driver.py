"""Sends requests open-loop or closed-loop from one event loop, on a schedule that is fixed before the first request.

What a request costs here bounds the load of a client process, so it is little: bodies are put together from JSON that
was made before, no request has a task or a timer of its own, and an answer is read through after its clock has stopped.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import select
import selectors
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from time import perf_counter, process_time
from typing import Protocol

import httpx
import numpy as np

from prefixwise.bench.client import SCORE_PATH, CallError, checked_scores, decode_answer
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.run.load_http import ConnectionPool, Exchange, ExchangeError, HttpAnswer
from prefixwise.bench.run.load_stats import DROPPED, Call, ClientUse


@dataclass(frozen=True)
class PhaseLength:
    """How long a phase lasts: whichever comes first, where both are given."""

    seconds: float | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        assert self.seconds is not None or self.requests is not None

    def is_over(self, elapsed: float, num_requests: int) -> bool:
        """Has the phase ended: may no further request begin?"""
        too_late = self.seconds is not None and elapsed >= self.seconds
        return too_late or (self.requests is not None and num_requests >= self.requests)


@dataclass(frozen=True)
class Schedule:
    """Send times in seconds from the start, ascending, and how long the process that made them was watched."""

    times: tuple[float, ...]
    send_sec: float


def poisson_schedule(rate_qps: float, length: PhaseLength, seed: int) -> Schedule:
    """Arrivals of many clients that do not know of each other: the gaps are exponential."""
    rng = np.random.default_rng([seed, 1])
    times: list[float] = []
    time = float(rng.exponential(1 / rate_qps))
    while not length.is_over(time, len(times)):
        times.append(time)
        time += float(rng.exponential(1 / rate_qps))
    ended_by_count = length.requests is not None and len(times) == length.requests
    return Schedule(tuple(times), times[-1] if ended_by_count and times else length.seconds or 0.0)


_NO_ANSWER = "http_error"


_FIRST_PAUSE_SEC = 0.05  # of a closed loop without answers; it doubles


_LONGEST_PAUSE_SEC = 1.0


@dataclass(frozen=True)
class LoadTarget:
    """The server and the limits: seconds for one call, from its send to its last byte."""

    base_url: str
    timeout_sec: float = 180.0
    max_in_flight: int = 512
    api_key: str | None = None


_OnCall = Callable[[Call], None]


_OnAnswer = Callable[[HttpAnswer | ExchangeError | None], None]  # None: there was none in time


class _CpuClock:
    """CPU seconds of this process, and seconds, until it is stopped."""

    def __init__(self) -> None:
        self._begun = process_time(), perf_counter()
        self._stopped: tuple[float, float] | None = None

    def stop(self) -> None:
        self._stopped = process_time(), perf_counter()

    def read(self) -> tuple[float, float]:
        cpu, now = self._stopped or (process_time(), perf_counter())
        return cpu - self._begun[0], now - self._begun[1]


@contextmanager
def _without_collections() -> Iterator[None]:
    """The garbage collector stops everything for milliseconds, the longer the more calls there are; a phase makes next
    to no garbage that needs it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LoadSender(Protocol):
    """What sends a phase and waits for its answers: one phase at a time. The attributes are those of the last phase,
    of one that was cut short, too."""

    finished: list[Call]
    clients: list[ClientUse]

    async def run_open(self, schedule: Schedule) -> list[Call]:
        """Every arrival of the schedule, in its order, once the last is answered."""

    async def run_closed(self, concurrency: int, length: PhaseLength) -> list[Call]:
        """`concurrency` requests in flight all the time; what is intended is what is done."""


class LoadDriver:
    """A `LoadSender` in this process, with as many connections as it takes. Use it as an async context manager."""

    def __init__(self, target: LoadTarget, maker: RequestMaker) -> None:
        self.finished: list[Call] = []
        self.clients: list[ClientUse] = []
        self.numbers = count()  # go on from phase to phase, so that what is measured was not warmed up
        self._target = target
        self._maker = maker
        self._shape = maker.request(0)
        self._begin = 0.0
        self._in_flight: dict[Exchange, tuple[float, _OnAnswer]] = {}  # oldest first: when it times out, what ends it
        self._timeouts: asyncio.TimerHandle | None = None  # of the oldest
        self._drained = asyncio.Event()
        headers = {"Content-Type": "application/json"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._pool = ConnectionPool(target.base_url, headers)

    async def __aenter__(self) -> LoadDriver:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._pool.close()

    async def run_open(self, schedule: Schedule, begin: float | None = None) -> list[Call]:
        """`begin`: by `perf_counter`; now where it is left out."""
        calls: dict[int, Call] = {}
        async with self._phase(begin) as use:
            for arrival, intended in enumerate(schedule.times):
                request = self._next_request()
                await asyncio.sleep(max(0.0, self._begin + intended - perf_counter()))
                self._arrive(request, intended, partial(calls.__setitem__, arrival))
            use.stop()
            await self._drained.wait()
        return [calls[arrival] for arrival in range(len(schedule.times))]

    async def run_closed(self, concurrency: int, length: PhaseLength, begin: float | None = None) -> list[Call]:
        """`begin`: by `perf_counter`; now where it is left out."""
        begun = 0

        async def keep_sending() -> None:
            nonlocal begun
            pause = _FIRST_PAUSE_SEC
            while not length.is_over(perf_counter() - self._begin, begun):
                begun += 1
                call = await self._call(self._next_request())
                if call.failure != _NO_ANSWER:
                    pause = _FIRST_PAUSE_SEC
                    continue
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SEC)

        async with self._phase(begin) as use:
            await asyncio.gather(*(keep_sending() for _ in range(concurrency)))
            use.stop()
        return self.finished

    @asynccontextmanager
    async def _phase(self, begin: float | None) -> AsyncIterator[_CpuClock]:
        """From its begin on; what is in flight when it is cut short is cancelled."""
        self.finished, self.clients = [], []
        now = perf_counter()
        self._begin = now if begin is None else begin
        await asyncio.sleep(max(0.0, self._begin - now))
        self._drained.set()
        clock = _CpuClock()
        with _without_collections():
            try:
                yield clock
            except BaseException:
                await self._cancel()
                raise
            finally:
                self.clients = [ClientUse(self.finished, *clock.read())]

    def _next_request(self) -> bytes:
        return self._pool.request(SCORE_PATH, self._maker.body(next(self.numbers)))

    def _arrive(self, request: bytes, intended: float, on_call: _OnCall) -> None:
        if len(self._in_flight) < self._target.max_in_flight:
            self._send(request, intended, on_call)
            return
        now = perf_counter() - self._begin
        self.finished.append(dropped := Call(intended, now, now, DROPPED))
        on_call(dropped)

    async def _call(self, request: bytes) -> Call:
        waiter: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self._send(request, None, lambda call: None if waiter.done() else waiter.set_result(call))
        return await waiter

    def _send(self, request: bytes, intended: float | None, on_call: _OnCall) -> None:
        """`intended`: now where it is None."""
        now = perf_counter()
        sent = now - self._begin

        def end(found: HttpAnswer | ExchangeError | None) -> None:
            del self._in_flight[exchange]
            if isinstance(found, HttpAnswer):  # its clock stopped at its last byte; only now is it read through
                done, failure = found.read_at, self._problem_with(found)
            else:
                done, failure = perf_counter(), "timeout" if found is None else _NO_ANSWER
            call = Call(sent if intended is None else intended, sent, done - self._begin, failure)
            self.finished.append(call)
            on_call(call)
            if not self._in_flight:
                self._drained.set()

        exchange = self._pool.begin(request, end)
        self._in_flight[exchange] = now + self._target.timeout_sec, end
        self._drained.clear()
        if self._timeouts is None:
            self._end_expired()

    def _end_expired(self) -> None:
        """End the requests that had no answer in time; called again when the oldest of the rest would be one. One
        timer does for all: they have the same time and are in the order of their sends."""
        self._timeouts = None
        for exchange, (until, end) in list(self._in_flight.items()):
            left = until - perf_counter()
            if left > 0:
                self._timeouts = asyncio.get_running_loop().call_later(left, self._end_expired)
                return
            exchange.cancel()
            end(None)

    async def _cancel(self) -> None:
        cut_short = list(self._in_flight)
        self._in_flight.clear()
        for exchange in cut_short:
            exchange.cancel()
        for exchange in cut_short:
            await exchange.cancelled()

    def _problem_with(self, answer: HttpAnswer) -> str | None:
        num_labels = len(self._maker.geometry.label_token_ids)
        if answer.status == 200 and _are_scores(answer.body, self._maker.geometry.num_items, num_labels):
            return None
        try:
            response = httpx.Response(answer.status, content=answer.body)
            checked_scores(decode_answer(response, 0.0), self._shape, 0.0)
        except CallError as error:
            return error.code if error.reason == "http_error" and error.code else error.reason
        return None


def _are_scores(body: bytes, num_items: int, num_labels: int) -> bool:
    """Has every item its finite numbers, all with a fraction? The usual answer, in a tenth of the time that
    `checked_scores` takes to say what is wrong with any other."""
    try:
        scores = json.loads(body)["scores"]
        flat = list(chain.from_iterable(scores))
        return (
            len(scores) == num_items
            and set(map(type, scores)) == {list}
            and set(map(len, scores)) == {num_labels}
            and set(map(type, flat)) == {float}
            and math.isfinite(sum(flat))
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


if sys.platform == "linux":

    class _FineSelector(selectors.EpollSelector):
        """Waits for as long as it is asked to. epoll itself takes whole milliseconds, which asyncio rounds up: every
        send would be late by half a millisecond and more."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                select.select((self.fileno(),), (), (), timeout)
                timeout = 0
            return super().select(timeout)


def fine_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop that wakes when it is to, within tens of microseconds: for `asyncio.Runner`."""
    return asyncio.SelectorEventLoop(_FineSelector()) if sys.platform == "linux" else asyncio.new_event_loop()
