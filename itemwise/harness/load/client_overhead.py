"""What the client itself costs: the same calls to a server in this process that answers at once with zeros."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress

from itemwise.harness.artifacts import LoadGeometry, Spread
from itemwise.harness.geometry import RequestMaker
from itemwise.harness.load.arrivals import PhaseLength
from itemwise.harness.load.driver import LoadDriver, LoadTarget
from itemwise.harness.load.stats import spread_of

_CALLS = 50
_CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


async def measure_client_overhead(maker: RequestMaker, calls: int = _CALLS) -> Spread:
    """From the send to the answer, one call at a time. The first calls, which open the connection, are not in it."""
    answer = _canned_answer(maker.geometry)
    served: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(over := asyncio.Event())
        await _serve(answer, reader, writer)
        over.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with LoadDriver(LoadTarget(f"http://127.0.0.1:{port}"), maker) as driver:
            await driver.run_closed(1, PhaseLength(requests=3))
            done = await driver.run_closed(1, PhaseLength(requests=calls))
        await asyncio.gather(*(over.wait() for over in served))
    spread = spread_of([call.service_ms for call in done if call.failure is None])
    assert spread is not None
    return spread


def _canned_answer(geometry: LoadGeometry) -> bytes:
    scores = [[0.0] * len(geometry.label_token_ids)] * geometry.num_items
    body = json.dumps({"scores": scores}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _serve(answer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, until the client closes it."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = _CONTENT_LENGTH.search(head)
            await reader.readexactly(int(found[1]) if found else 0)
            writer.write(answer)
            await writer.drain()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
