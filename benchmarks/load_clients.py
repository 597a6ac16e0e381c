"""What a request costs the load generator: our HTTP client against aiohttp's, in turns, CPU microseconds a request.

The server is a process of its own that answers every request at once with the same bytes.

    python -m benchmarks.load_clients [--requests N] [--rounds N]

The last line is JSON: {"in_flight": {"ours": us, "aiohttp": us}}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median

from benchmarks.ports import free_port
from prefixwise.bench.run.load_http import ConnectionPool

REQUEST = json.dumps({"query": [1] * 300, "items": [[2] * 20] * 10, "label_token_ids": [1, 2]}).encode()
ANSWER = json.dumps({"scores": [[0.5, 0.5]] * 10}).encode()
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n".encode()
JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
IN_FLIGHT = (1, 64, 256)

Send = Callable[[], Awaitable[bytes]]


class Stub(asyncio.Protocol):
    """Answers whole requests of REQUEST's length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0 and len(self._received) >= end + 4 + len(REQUEST):
            self._received = self._received[end + 4 + len(REQUEST) :]
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
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=JSON) as session:

        async def ours() -> bytes:
            return (await pool.send(request)).body

        async def theirs() -> bytes:
            async with session.post(f"{url}/v1/score", data=REQUEST) as answer:
                return await answer.read()

        assert await ours() == await theirs() == ANSWER
        found = {}
        for in_flight in IN_FLIGHT:
            pairs = [
                (await cost(ours, in_flight, num_requests), await cost(theirs, in_flight, num_requests))
                for _ in range(rounds)
            ]
            found[in_flight] = {"ours": median(each[0] for each in pairs), "aiohttp": median(each[1] for each in pairs)}
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
            found = asyncio.run(compare(port, options.requests, options.rounds))
        finally:
            server.terminate()
    for in_flight, costs in found.items():
        ratio = costs["aiohttp"] / costs["ours"]
        print(f"{in_flight:4} in flight: ours {costs['ours']:.0f} us, aiohttp {costs['aiohttp']:.0f} us, x {ratio:.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
