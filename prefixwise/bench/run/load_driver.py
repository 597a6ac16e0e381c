"""Sends requests open-loop or closed-loop, on a schedule that is fixed before the first request.

Also measures the client itself: calls to a server in this process that answers at once with zeros.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import httpx
import numpy as np

from prefixwise.bench.client import SCORE_PATH, CallError, checked_scores, decode_answer
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry, Spread
from prefixwise.bench.run.load_http import ConnectionPool, ExchangeError, HttpAnswer
from prefixwise.bench.run.load_stats import DROPPED, Call, spread_of


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


class LoadDriver:
    """As many connections as it takes. Use it as an async context manager; one phase at a time."""

    def __init__(self, target: LoadTarget, maker: RequestMaker) -> None:
        self.finished: list[Call] = []  # of the phase, as they end: the result when it is cut short
        self._target = target
        self._maker = maker
        self._shape = maker.request(0)
        self._next_number = 0  # goes on from phase to phase, so that what is measured was not warmed up
        self._in_flight = 0
        headers = {"Content-Type": "application/json"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._pool = ConnectionPool(target.base_url, headers)

    async def __aenter__(self) -> LoadDriver:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._pool.close()

    async def run_open(self, schedule: Schedule) -> list[Call]:
        """Every arrival of the schedule, in its order, once the last is answered."""
        self.finished = []
        begin = perf_counter()
        tasks = []
        async with asyncio.TaskGroup() as in_flight:  # an interrupt ends them, too
            for intended in schedule.times:
                request = self._next_request()
                await asyncio.sleep(max(0.0, begin + intended - perf_counter()))
                tasks.append(in_flight.create_task(self._arrive(request, begin, intended)))
        return [task.result() for task in tasks]

    async def run_closed(self, concurrency: int, length: PhaseLength) -> list[Call]:
        """`concurrency` requests in flight all the time; what is intended is what is done."""
        self.finished = []
        begin = perf_counter()
        begun = 0

        async def keep_sending() -> None:
            nonlocal begun
            pause = _FIRST_PAUSE_SEC
            while not length.is_over(perf_counter() - begin, begun):
                begun += 1
                call = await self._send(self._next_request(), begin, None)
                if call.failure != _NO_ANSWER:
                    pause = _FIRST_PAUSE_SEC
                    continue
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SEC)

        await asyncio.gather(*(keep_sending() for _ in range(concurrency)))
        return self.finished

    def _next_request(self) -> bytes:
        self._next_number += 1
        return self._pool.request(SCORE_PATH, self._maker.body(self._next_number - 1))

    async def _arrive(self, request: bytes, begin: float, intended: float) -> Call:
        if self._in_flight >= self._target.max_in_flight:
            now = perf_counter() - begin
            self.finished.append(dropped := Call(intended, now, now, DROPPED))
            return dropped
        self._in_flight += 1
        try:
            return await self._send(request, begin, intended)
        finally:
            self._in_flight -= 1

    async def _send(self, request: bytes, begin: float, intended: float | None) -> Call:
        sent = perf_counter()
        answer, failure = await self._exchange(request)
        if answer is None:
            done = perf_counter()
        else:  # its clock stopped at its last byte; only now is it read through
            done, failure = answer.read_at, self._problem_with(answer)
        call = Call(sent - begin if intended is None else intended, sent - begin, done - begin, failure)
        self.finished.append(call)
        return call

    async def _exchange(self, request: bytes) -> tuple[HttpAnswer | None, str | None]:
        try:
            async with asyncio.timeout(self._target.timeout_sec):
                return await self._pool.send(request), None
        except TimeoutError:
            return None, "timeout"
        except ExchangeError:
            return None, _NO_ANSWER

    def _problem_with(self, answer: HttpAnswer) -> str | None:
        try:
            response = httpx.Response(answer.status, content=answer.body)
            checked_scores(decode_answer(response, 0.0), self._shape, 0.0)
        except CallError as error:
            return error.code if error.reason == "http_error" and error.code else error.reason
        return None


MOST_IN_FLIGHT = 256  # both ends of every connection are open files of this process


_CALLS = 50


_PATIENCE_SEC = 5.0  # until all others wait


_CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


async def measure_client_overhead(maker: RequestMaker, in_flight: int = 1, calls: int = _CALLS) -> Spread | None:
    """From the send to the answer, of one call after another while `in_flight - 1` others wait. The first calls, which
    open the connection, are not in it. None where this machine does not let it connect to itself."""
    stub = _Stub(_canned_answer(maker.geometry), num_held=in_flight - 1)
    async with await asyncio.start_server(stub.serve, "127.0.0.1", 0, backlog=MOST_IN_FLIGHT) as server:
        target = LoadTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with LoadDriver(target, maker) as others, LoadDriver(target, maker) as driver:
            waiting = asyncio.create_task(others.run_open(Schedule((0.0,) * (in_flight - 1), 0.0)))
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE_SEC):
                        await stub.all_held.wait()
                stub.num_held = stub.held  # where it took fewer, those must do
                await driver.run_closed(1, PhaseLength(requests=3))
                done = await driver.run_closed(1, PhaseLength(requests=calls))
            finally:  # of a run that is interrupted, too: the server ends when all have their answers
                stub.release.set()
            await waiting
        await asyncio.gather(*(over.wait() for over in stub.served))
    return spread_of([call.service_ms for call in done if call.failure is None])


class _Stub:
    """Keeps the first requests waiting until they are released; answers all others at once."""

    def __init__(self, answer: bytes, num_held: int) -> None:
        self.num_held = num_held
        self.all_held = asyncio.Event()
        self.release = asyncio.Event()
        self.served: list[asyncio.Event] = []
        self._answer = answer
        self.held = 0
        if not num_held:
            self.all_held.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until the client closes it."""
        self.served.append(over := asyncio.Event())
        try:
            await self._answer_all(reader, writer)
        finally:  # of a run that is interrupted, too
            writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        over.set()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = _CONTENT_LENGTH.search(head)
                await reader.readexactly(int(found[1]) if found else 0)
                await self._wait_for_turn()
                writer.write(self._answer)
                await writer.drain()

    async def _wait_for_turn(self) -> None:
        if self.held == self.num_held:
            return
        self.held += 1
        if self.held == self.num_held:
            self.all_held.set()
        await self.release.wait()


def _canned_answer(geometry: LoadGeometry) -> bytes:
    scores = [[0.0] * len(geometry.label_token_ids)] * geometry.num_items
    body = json.dumps({"scores": scores}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
