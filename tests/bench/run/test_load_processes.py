"""Several client processes: together they send what one would have sent, and none may be missing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from prefixwise.bench.run.load_driver import LoadDriver, LoadTarget, PhaseLength, Schedule, poisson_schedule
from prefixwise.bench.run.load_processes import ClientProcessError, ClientProcesses, _Client, deal
from prefixwise.bench.run.load_stats import DROPPED, Call, ClientUse, summarise
from prefixwise.bench.run.load_worker import Message, read_message, read_report, report_message
from tests.bench.load_samples import small_requests
from tests.bench.run.slow_server import slow_server

SCORES = json.dumps({"scores": [[0.5, 0.5], [0.25, 0.75]]}).encode()
BUSY = json.dumps({"error": {"code": "queue_full"}}).encode()
LENGTH = re.compile(rb"Content-Length: (\d+)")


class Recorder:
    """Scores requests whose body has an even sum of bytes; for the others its queue is full."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.ended: list[asyncio.Event] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended.append(end := asyncio.Event())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                found = LENGTH.search(await reader.readuntil(b"\r\n\r\n"))
                assert found is not None
                self.bodies.append(body := await reader.readexactly(int(found[1])))
                status, answer = (503, BUSY) if sum(body) % 2 else (200, SCORES)
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(answer)) + answer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        end.set()


def sent_by(
    make: Callable[[LoadTarget], LoadDriver | ClientProcesses], schedules: list[Schedule]
) -> tuple[list[list[Call]], list[bytes], list[ClientUse]]:
    """The calls of every phase, all bodies, and what each client did in the last phase."""

    async def run() -> tuple[list[list[Call]], list[bytes], list[ClientUse]]:
        recorder = Recorder()
        async with await asyncio.start_server(recorder.serve, "127.0.0.1", 0, backlog=100) as server:
            target = LoadTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with make(target) as sender:
                phases = [await sender.run_open(schedule) for schedule in schedules]
            await asyncio.gather(*(end.wait() for end in recorder.ended))
        return phases, sorted(recorder.bodies), sender.clients

    return asyncio.run(run())


def test_several_processes_send_what_one_would_have_sent() -> None:
    """The same requests at the same intended times with the same outcomes, in a second phase, too; and the merged
    counts and errors are the same."""
    length = PhaseLength(requests=41)
    schedules = [poisson_schedule(400.0, length, seed) for seed in (1, 2)]
    one, bodies_of_one, _ = sent_by(lambda target: LoadDriver(target, small_requests()), schedules)
    several, bodies, clients = sent_by(lambda target: ClientProcesses(target, small_requests(), 3), schedules)
    assert bodies == bodies_of_one and len(set(bodies)) == 82
    for phase, expected in zip(several, one, strict=True):
        assert [(call.intended, call.failure) for call in phase] == [(call.intended, call.failure) for call in expected]
    assert {call.failure for call in several[1]} == {None, "queue_full"}
    assert [len(client.calls) for client in clients] == [14, 14, 13]
    merged = summarise(several[1], num_items=2, send_sec=schedules[1].send_sec, clients=clients)
    alone = summarise(one[1], num_items=2, send_sec=schedules[1].send_sec)
    for name in ("arrivals", "sent", "answered", "errors_by_code", "qps_offered"):
        assert getattr(merged, name) == getattr(alone, name), name
    assert all(call.sent >= call.intended and call.done > call.sent for call in several[1])  # by one clock
    assert all(client.cpu_sec > 0 for client in clients)


def test_a_closed_loop_has_exactly_so_many_in_flight() -> None:
    """The server answers only when five are there: with fewer nobody would be answered."""

    async def run(url: str) -> tuple[list[Call], list[int]]:
        async with ClientProcesses(LoadTarget(url, timeout_sec=60.0), small_requests(), 2) as sender:
            calls = await sender.run_closed(5, PhaseLength(requests=50))
            return calls, [len(client.calls) for client in sender.clients]

    with slow_server(0.0, together=5) as url:
        calls, shares = asyncio.run(run(url))
        stats = httpx.get(f"{url}/stats").json()
    assert [call.failure for call in calls] == [None] * 50
    assert shares == [30, 20]
    assert max(stats["in_flight"]) == 5
    assert calls == sorted(calls, key=lambda call: call.done)


def kill(client: _Client) -> None:
    client._process.kill()


def cut_its_lifeline(client: _Client) -> None:
    client._stdin.close()


@pytest.mark.parametrize(
    ("fault", "ending"), [(kill, "was ended by SIGKILL"), (cut_its_lifeline, "ended with status 1")]
)
def test_a_process_that_ends_fails_the_run_and_all_end(fault: Callable[[_Client], None], ending: str) -> None:
    async def run(url: str) -> list[int | None]:
        async with ClientProcesses(LoadTarget(url), small_requests(), 2) as sender:
            phase = asyncio.create_task(sender.run_closed(2, PhaseLength(seconds=60.0)))
            async with httpx.AsyncClient() as http:
                while len((await http.get(f"{url}/stats")).json()["in_flight"]) < 10:
                    await asyncio.sleep(0.01)
            fault(sender._processes[1])
            with pytest.raises(ClientProcessError, match=rf"client process 2 of 2 {ending}.* before its report"):
                await phase
            assert sender.finished == []
        return [client._process.returncode for client in sender._processes]

    with slow_server(0.001) as url:
        assert all(code is not None for code in asyncio.run(run(url)))


def test_a_process_whose_clock_is_another_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: _Client, message: Message) -> Message:
        return Message({"clock": -1.0})

    async def run() -> None:
        async with ClientProcesses(LoadTarget("http://127.0.0.1:9"), small_requests(), 1):
            raise AssertionError("it has started")

    monkeypatch.setattr(_Client, "ask", answer)
    with pytest.raises(ClientProcessError, match=r"expected its clock between .*, got -1\.0"):
        asyncio.run(run())


def over_a_pipe(message: Message) -> Message | None:
    async def run() -> Message | None:
        reader = asyncio.StreamReader()
        reader.feed_data(message.encode())
        reader.feed_eof()
        return await read_message(reader)

    return asyncio.run(run())


def test_a_report_is_read_as_it_was_written() -> None:
    calls = [Call(0.1, 0.2, 1 / 3), Call(0.4, 0.4, 0.4, DROPPED), Call(0.5, 0.6, 0.7, "timeout"), Call(1.0, 1.0, 2.0)]
    written = ClientUse(calls, 0.25, 1.5)
    message = over_a_pipe(report_message(written))
    assert message is not None
    assert read_report(message) == written


def test_half_a_message_is_the_end() -> None:
    async def run(data: bytes) -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader)

    whole = Message({"a": 1}, (1.0, 2.0)).encode()
    assert [asyncio.run(run(whole[:end])) for end in (0, 5, len(whole) - 1)] == [None] * 3


def test_shares_differ_by_one_at_most() -> None:
    assert (deal(7, 3), deal(2, 3), deal(6, 3)) == ([3, 2, 2], [1, 1, 0], [2, 2, 2])
