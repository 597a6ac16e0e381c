"""What the load generator itself costs: calls to a server in this process that answers at once with zeros."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress

from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry, Spread
from prefixwise.bench.run.load_driver import LoadDriver, LoadTarget, PhaseLength, Schedule
from prefixwise.bench.run.load_stats import spread_of

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
