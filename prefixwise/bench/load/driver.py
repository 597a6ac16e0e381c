"""Drives a server: open loop, where requests come when they come, or closed loop, where each waits for an answer.

In the open loop a slow answer delays no later request: send times are fixed beforehand, and latency counts from them.
Where more than `max_in_flight` would be in flight an arrival is dropped and counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter

import httpx

from prefixwise.bench.client import SCORE_PATH, CallError, checked_scores, decode_answer
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.load.arrivals import PhaseLength, Schedule
from prefixwise.bench.load.http_connection import ConnectionPool, ExchangeError, HttpAnswer
from prefixwise.bench.load.stats import DROPPED, Call

_NO_ANSWER = "http_error"
_FIRST_PAUSE_SEC = 0.05  # of a closed loop, where nobody answers; it doubles
_LONGEST_PAUSE_SEC = 1.0


@dataclass(frozen=True)
class LoadTarget:
    """Whom to send to, and with how much patience: seconds for one call, from its send to its last byte."""

    base_url: str
    timeout_sec: float = 180.0
    max_in_flight: int = 512
    api_key: str | None = None


class LoadDriver:
    """As many connections as it takes. Use it as an async context manager; one phase at a time."""

    def __init__(self, target: LoadTarget, maker: RequestMaker) -> None:
        self.finished: list[Call] = []  # of the phase, as they end: what there is when it is cut short
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
