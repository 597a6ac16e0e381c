"""Drives a server: open loop, where requests come when they come, or closed loop, where each waits for an answer.

In the open loop a slow answer delays no later request: send times are fixed beforehand, and latency counts from them.
Where more than `max_in_flight` would be in flight an arrival is dropped and counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter

import httpx

from itemwise.harness.client import SCORE_PATH, CallError, checked_scores, decode_answer
from itemwise.harness.geometry import RequestMaker
from itemwise.harness.load.arrivals import PhaseLength, Schedule
from itemwise.harness.load.stats import DROPPED, Call

_KEPT_SECONDS = 2.0  # less than servers keep an idle connection: one that is just being closed would look like an error


@dataclass(frozen=True)
class LoadTarget:
    """Whom to send to, and with how much patience."""

    base_url: str
    timeout_sec: float = 180.0
    max_in_flight: int = 512
    api_key: str | None = None


class LoadDriver:
    """One client with as many connections as it takes. Use it as an async context manager; one phase at a time."""

    def __init__(self, target: LoadTarget, maker: RequestMaker) -> None:
        self._target = target
        self._maker = maker
        self._shape = maker.request(0)
        self._next_number = 0  # goes on from phase to phase, so that what is measured was not warmed up
        self._in_flight = 0
        headers = {"Content-Type": "application/json"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT_SECONDS)
        # Patience is for the whole call; httpx has one for each read only.
        self._http = httpx.AsyncClient(base_url=target.base_url, headers=headers, limits=limits, timeout=None)

    async def __aenter__(self) -> LoadDriver:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def run_open(self, schedule: Schedule) -> list[Call]:
        """Every arrival of the schedule, in its order, once the last is answered."""
        begin = perf_counter()
        tasks = []
        for intended in schedule.times:
            body = self._next_body()
            await asyncio.sleep(max(0.0, begin + intended - perf_counter()))
            tasks.append(asyncio.create_task(self._arrive(body, begin, intended)))
        return await asyncio.gather(*tasks)

    async def run_closed(self, concurrency: int, length: PhaseLength) -> list[Call]:
        """`concurrency` requests in flight all the time; what is intended is what is done."""
        begin = perf_counter()
        calls: list[Call] = []
        begun = 0

        async def keep_sending() -> None:
            nonlocal begun
            while not length.is_over(perf_counter() - begin, begun):
                begun += 1
                body = self._next_body()
                calls.append(await self._send(body, begin, None))

        await asyncio.gather(*(keep_sending() for _ in range(concurrency)))
        return calls

    def _next_body(self) -> bytes:
        self._next_number += 1
        return self._maker.body(self._next_number - 1)

    async def _arrive(self, body: bytes, begin: float, intended: float) -> Call:
        if self._in_flight >= self._target.max_in_flight:
            now = perf_counter() - begin
            return Call(intended, now, now, DROPPED)
        self._in_flight += 1
        try:
            return await self._send(body, begin, intended)
        finally:
            self._in_flight -= 1

    async def _send(self, body: bytes, begin: float, intended: float | None) -> Call:
        sent = perf_counter()
        response, failure = await self._post(body)
        done = perf_counter()  # an answer is read through only after the clock has stopped
        if response is not None:
            failure = self._problem_with(response)
        return Call(sent - begin if intended is None else intended, sent - begin, done - begin, failure)

    async def _post(self, body: bytes) -> tuple[httpx.Response | None, str | None]:
        try:
            async with asyncio.timeout(self._target.timeout_sec):
                return await self._http.post(SCORE_PATH, content=body), None
        except TimeoutError:
            return None, "timeout"
        except httpx.HTTPError:
            return None, "http_error"

    def _problem_with(self, response: httpx.Response) -> str | None:
        try:
            checked_scores(decode_answer(response, 0.0), self._shape, 0.0)
        except CallError as error:
            return error.code if error.reason == "http_error" and error.code else error.reason
        return None
