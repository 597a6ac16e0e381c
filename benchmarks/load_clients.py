"""What a request costs the load generator, in CPU microseconds: `bench load`, our HTTP client alone, and aiohttp's.

`bench load` makes every body and checks every answer, the other two send one body and read bytes. They take turns. The
server is a process of its own that answers every request at once with the same bytes.

    python -m benchmarks.load_clients [--requests N] [--rounds N]

The last line is JSON: {"in_flight": {"bench_load": us, "ours": us, "aiohttp": us}}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median

from benchmarks.ports import free_port
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry
from prefixwise.bench.run.load_driver import LoadDriver, LoadTarget, PhaseLength, fine_event_loop
from prefixwise.bench.run.load_http import ConnectionPool

GEOMETRY = LoadGeometry(
    query_tokens=300, num_items=10, item_tokens=20, label_token_ids=[1, 2], vocab_size=151_936, distinct_queries=0
)
REQUEST = RequestMaker(GEOMETRY, seed=0).body(0)
ANSWER = json.dumps({"scores": [[0.5, 0.5]] * 10}).encode()
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n".encode()
JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
IN_FLIGHT = (1, 64, 256)

Send = Callable[[], Awaitable[bytes]]


class Stub(asyncio.Protocol):
    """Answers whole requests."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end_of_head := self._received.find(b"\r\n\r\n")) >= 0:
            found = CONTENT_LENGTH.search(self._received, 0, end_of_head)
            end = end_of_head + 4 + (int(found[1]) if found else 0)
            if len(self._received) < end:
                return
            self._received = self._received[end:]
            self._transport.write(HEAD + ANSWER)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


async def cost(send: Send, in_flight: int, num_requests: int) -> float:
    """CPU microseconds of this process a request."""
    left = num_requests

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await send()

    begun = time.process_time()
    await asyncio.gather(*(client() for _ in range(in_flight)))
    return (time.process_time() - begun) / num_requests * 1e6


async def compare(port: int, num_requests: int, rounds: int) -> dict[int, dict[str, float]]:
    import aiohttp

    url = f"http://127.0.0.1:{port}"
    pool = ConnectionPool(url, JSON)
    request = pool.request("/v1/score", REQUEST)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=JSON) as session,
        LoadDriver(LoadTarget(url), RequestMaker(GEOMETRY, seed=0)) as driver,
    ):

        async def ours() -> bytes:
            return (await pool.send(request)).body

        async def theirs() -> bytes:
            async with session.post(f"{url}/v1/score", data=REQUEST) as answer:
                return await answer.read()

        async def whole(in_flight: int) -> float:
            calls = await driver.run_closed(in_flight, PhaseLength(requests=num_requests))
            assert all(call.failure is None for call in calls)
            return driver.clients[0].cpu_sec / num_requests * 1e6

        assert await ours() == await theirs() == ANSWER
        found: dict[int, dict[str, float]] = {}
        for in_flight in IN_FLIGHT:
            costs: dict[str, list[float]] = {"bench_load": [], "ours": [], "aiohttp": []}
            for _ in range(rounds):
                costs["bench_load"].append(await whole(in_flight))
                costs["ours"].append(await cost(ours, in_flight, num_requests))
                costs["aiohttp"].append(await cost(theirs, in_flight, num_requests))
            found[in_flight] = {name: median(each) for name, each in costs.items()}
    await pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.load_clients", "--serve", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            with asyncio.Runner(loop_factory=fine_event_loop) as runner:
                found = runner.run(compare(port, options.requests, options.rounds))
        finally:
            server.terminate()
    for in_flight, costs in found.items():
        whole, ours, theirs = costs["bench_load"], costs["ours"], costs["aiohttp"]
        print(
            f"{in_flight:4} in flight: bench load {whole:.0f} us ({1e6 / whole:,.0f} requests per CPU second), "
            f"HTTP alone {ours:.0f} us, aiohttp {theirs:.0f} us, x {theirs / ours:.2f}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
