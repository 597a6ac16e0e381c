"""A server that takes `delay` seconds for every request, however many there are: what is slower is the client.

    python -m tests.bench.run.slow_server --delay 0.3
    with slow_server(0.3) as url: ...

It scores two items with two labels. `/stats` has for each request how many were in flight, this one with them, and how
many connections there were. The request with the number `hang` (from 0 on) takes `hang_seconds` more. With `together`
requests wait until so many are there, and are then answered all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.request import urlopen

_CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ANSWER = json.dumps({"scores": [[0.5, 0.5], [0.5, 0.5]]}).encode()
_INFO = json.dumps({"vocab_size": 512}).encode()


@dataclass
class SlowServer:
    delay: float
    hang: int | None = None
    hang_seconds: float = 0.0
    together: int = 1
    connections: int = 0
    in_flight: int = 0
    seen: list[int] = field(default_factory=list)
    all_there: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = _CONTENT_LENGTH.search(head)
                await reader.readexactly(int(found[1]) if found else 0)
                body = await self._answer(head)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    async def _answer(self, head: bytes) -> bytes:
        if b" /stats " in head:
            return json.dumps({"in_flight": self.seen, "connections": self.connections}).encode()
        if b" /v1/score " not in head:
            return _INFO
        self.in_flight += 1
        self.seen.append(self.in_flight)
        await self._wait_for_others()
        await asyncio.sleep(self.delay + (self.hang_seconds if self.hang == len(self.seen) - 1 else 0.0))
        self.in_flight -= 1
        return _ANSWER

    async def _wait_for_others(self) -> None:
        if len(self.seen) % self.together == 0:
            self.all_there.set()
            self.all_there = asyncio.Event()
        else:
            await self.all_there.wait()


async def main(server: SlowServer) -> None:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1000) as listening:
        print(listening.sockets[0].getsockname()[1], flush=True)
        await listening.serve_forever()


@contextmanager
def slow_server(
    delay: float, *, hang: int | None = None, hang_seconds: float = 0.0, together: int = 1
) -> Iterator[str]:
    """Its address, in a process of its own."""
    options = [f"--delay={delay}", f"--hang-seconds={hang_seconds}", f"--together={together}"]
    options += [] if hang is None else [f"--hang={hang}"]
    command = [sys.executable, "-m", "tests.bench.run.slow_server", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def wait_for_calls(url: str, number: int) -> None:
    """Until so many have come to it."""
    until = time.monotonic() + 60
    while True:
        with urlopen(f"{url}/stats", timeout=60) as answer:
            if len(json.load(answer)["in_flight"]) >= number:
                return
        assert time.monotonic() < until, f"there were no {number} calls"
        time.sleep(0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--hang", type=int)
    parser.add_argument("--hang-seconds", type=float, default=0.0)
    parser.add_argument("--together", type=int, default=1)
    asyncio.run(main(SlowServer(**vars(parser.parse_args()))))
