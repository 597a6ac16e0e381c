"""Sends a phase from several client processes on this machine, so that one event loop is not the limit.

The schedule of an open loop is made once and dealt out arrival by arrival: together the processes send what one would
have sent, the same requests at the same times. A closed loop's requests in flight are dealt out. All processes count
from one moment of one clock (`perf_counter`: the machine's monotonic clock, the same in every process, which is checked
at the start), and report every call, so that percentiles are of all calls and not of averages. A process that ends
before it has reported ends the run: no result is of fewer requests than were asked for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.processes import ending
from prefixwise.bench.run.load_driver import LoadTarget, PhaseLength, Schedule
from prefixwise.bench.run.load_stats import Call, ClientUse
from prefixwise.bench.run.load_worker import Message, read_message, read_report, settings_message
from prefixwise.contract.errors import PrefixwiseError

_LEAD_SEC = 0.02  # from the word to begin to the begin: every process has it by then
_GRACE_SEC = 10.0  # for a process to report what it has done, or to end


class ClientProcessError(PrefixwiseError):
    """A client process failed, and the run with it: requests that it should have sent are missing."""


def deal(total: int, num_shares: int) -> list[int]:
    """Whole shares that differ by at most one, the larger ones first."""
    each, rest = divmod(total, num_shares)
    return [each + (share < rest) for share in range(num_shares)]


class _Client:
    """One process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    async def ask(self, message: Message) -> Message:
        """Raises ClientProcessError."""
        await self.tell(message)
        return await self.receive()

    async def tell(self, message: Message) -> None:
        with suppress(ConnectionError):  # `receive` finds out why
            self._stdin.write(message.encode())
            await self._stdin.drain()

    async def receive(self) -> Message:
        """Raises ClientProcessError."""
        message = await read_message(self._stdout)
        if message is None:
            status = await self._process.wait()
            raise ClientProcessError(
                f"{self._name} {ending(status)} before its report: its requests are missing, so there is no result"
            )
        return message

    async def start(self, settings: Message) -> None:
        """Raises ClientProcessError, also where its clock is not ours."""
        before = perf_counter()
        clock = (await self.ask(settings)).fields["clock"]
        if not before <= clock <= perf_counter():
            raise ClientProcessError(
                f"{self._name}: expected its clock between {before} and {perf_counter()}, got {clock}: this machine "
                "does not let times of several processes be compared; give --client-processes 1"
            )

    async def end(self) -> None:
        self._stdin.close()
        try:
            async with asyncio.timeout(_GRACE_SEC):
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


class ClientProcesses:
    """A `LoadSender` of several processes. Use it as an async context manager: it starts and ends them."""

    def __init__(self, target: LoadTarget, maker: RequestMaker, num_processes: int) -> None:
        assert 1 <= num_processes <= target.max_in_flight
        self.finished: list[Call] = []
        self.clients: list[ClientUse] = []
        limits = deal(target.max_in_flight, num_processes)
        self._settings = [settings_message(replace(target, max_in_flight=limit), maker) for limit in limits]
        self._processes: list[_Client] = []
        self._next_number = 0

    async def __aenter__(self) -> ClientProcesses:
        try:
            for place in range(len(self._settings)):
                name = f"client process {place + 1} of {len(self._settings)}"
                self._processes.append(_Client(name, await _start_process()))
            starting = zip(self._processes, self._settings, strict=True)
            await asyncio.gather(*(client.start(settings) for client, settings in starting))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end()

    async def _end(self) -> None:
        await asyncio.gather(*(client.end() for client in self._processes), return_exceptions=True)

    async def run_open(self, schedule: Schedule) -> list[Call]:
        """Every arrival of the schedule, in its order. Raises ClientProcessError."""
        num = len(self._processes)
        shares = [schedule.times[place::num] for place in range(num)]
        await self._run([Message({"mode": "open"}, share) for share in shares])
        calls = list[Call | None]([None] * len(schedule.times))
        for place, (use, share) in enumerate(zip(self.clients, shares, strict=True)):
            if len(use.calls) != len(share):
                raise ClientProcessError(f"expected {len(share)} calls of a client process, got {len(use.calls)}")
            calls[place::num] = use.calls
        self._next_number += len(calls)
        return [call for call in calls if call is not None]

    async def run_closed(self, concurrency: int, length: PhaseLength) -> list[Call]:
        """In the order of their ends. Each process has its share of the requests, too. Raises ClientProcessError."""
        num = len(self._processes)
        requests = None if length.requests is None else deal(length.requests, concurrency)
        orders: list[dict[str, Any]] = [
            {
                "mode": "closed",
                "concurrency": share,
                "seconds": length.seconds,
                "requests": None if requests is None else sum(requests[place::num]),
            }
            for place, share in enumerate(deal(concurrency, num))
        ]
        await self._run([Message(order) for order in orders])
        self._next_number += num * max(len(use.calls) for use in self.clients)
        return self.finished

    async def _run(self, orders: Sequence[Message]) -> None:
        """Fills in `clients` and `finished`."""
        self.finished, self.clients = [], []
        num = len(self._processes)
        for place, order in enumerate(orders):
            order.fields.update(first=self._next_number + place, step=num)
        asking = zip(self._processes, orders, strict=True)
        await asyncio.gather(*(client.ask(order) for client, order in asking))
        start = Message({"begin": perf_counter() + _LEAD_SEC})
        reports = [asyncio.create_task(client.ask(start)) for client in self._processes]
        try:
            await asyncio.wait(reports, return_when=asyncio.FIRST_EXCEPTION)
            self._keep([report.result() for report in reports if report.done()])
        except asyncio.CancelledError:
            await self._stop(reports)
            raise
        finally:
            for report in reports:
                report.cancel()

    async def _stop(self, reports: Sequence[asyncio.Task[Message]]) -> None:
        """Let each process report what it has done; where one does not, nothing is known of the phase."""
        ended = [report for report in reports if report.cancelling()]  # with all tasks of the event loop, by SIGTERM
        if ended:
            await asyncio.wait(ended)
        for client in self._processes:
            await client.tell(Message({"stop": True}))
        asked = [
            asyncio.create_task(client.receive()) if report.cancelled() else report
            for client, report in zip(self._processes, reports, strict=True)
        ]
        await asyncio.wait(asked, timeout=_GRACE_SEC)
        with suppress(ClientProcessError, asyncio.InvalidStateError):
            self._keep([report.result() for report in asked])

    def _keep(self, reports: Sequence[Message]) -> None:
        self.clients = [read_report(report) for report in reports]
        self.finished = sorted((call for use in self.clients for call in use.calls), key=lambda call: call.done)


async def _start_process() -> asyncio.subprocess.Process:
    """In a session of its own: Ctrl-C is for us, and we end it."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "prefixwise.bench.run.load_worker")
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
