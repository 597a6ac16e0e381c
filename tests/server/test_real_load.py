"""`prefixwise serve` under load on a real model: fairness, too many clients, clients that go, and a shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import orjson
import psutil
import pytest

from tests.server.app_client import error_of
from tests.server.real_requests import (
    TIMEOUT,
    Answer,
    Body,
    ask,
    ask_at_once,
    ask_one_by_one,
    async_client,
    fetch,
    leftovers,
    plain_request,
    scores_of,
    wait_for_requests,
)
from tests.server.server_process import ServerProcess, real_server

# What the process may have more afterwards: pools of allocators, threads' stacks, kept prefixes.
RSS_SLACK = 64 << 20


@pytest.fixture(scope="module")
def server(checkpoint_of: Callable[[str], Path]) -> Iterator[ServerProcess]:
    """Its steps are small, so that requests of few tokens take many of them."""
    options = ("--token-budget=512", "--shutdown-grace=600")
    with real_server(f"--model-path={checkpoint_of('medium')}", *options) as running:
        yield running


def timed_ask(server: ServerProcess, body: Body) -> tuple[Answer, float]:
    begin = monotonic()
    return ask(server, body), monotonic() - begin


@pytest.mark.parametrize(("prefix_len", "algorithm"), [(200, "prefill_extend"), (40, "packed")])
def test_a_small_request_does_not_wait_for_a_large_one(server: ServerProcess, prefix_len: int, algorithm: str) -> None:
    """Whatever algorithm the large one has."""
    large = {**plain_request(1, 400, prefix_len=prefix_len, item_len=9), "return_debug": True, "algorithm": algorithm}
    small = plain_request(2, 10, prefix_len=prefix_len, item_len=9)
    alone = ask(server, small)["scores"]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(timed_ask, server, large)
        wait_for_requests(server, 1)
        answer, small_seconds = timed_ask(server, small)
        assert not running.done()
        large_answer, large_seconds = running.result()
    print(f"{algorithm}: 10 items in {small_seconds:.3f} s, beside 400 in {large_seconds:.3f} s")
    assert large_answer["debug"]["algorithm"] == algorithm
    assert answer["scores"] == alone


OVERLOAD = [plain_request(seed, 10, item_len=8) for seed in range(20)]  # of 120 tokens each


@pytest.fixture(scope="module")
def narrow(checkpoint_of: Callable[[str], Path]) -> Iterator[ServerProcess]:
    """A fifth of what 200 clients send may wait."""
    with real_server(f"--model-path={checkpoint_of('medium')}", "--max-queued-tokens=4800") as running:
        yield running


def test_too_many_clients_get_right_answers_or_clear_refusals(
    narrow: ServerProcess,
) -> None:
    expected = scores_of(ask_one_by_one(narrow, OVERLOAD))
    before = rss_of(narrow)
    with HealthWatch(narrow) as health:
        statuses = asyncio.run(overload(narrow, expected))
    assert leftovers(narrow) == (0, 0, 0)
    grown = rss_of(narrow) - before
    print(f"{dict(statuses)}, slowest health {max(health.seconds):.3f} s, grown by {grown >> 10} KiB")
    assert statuses.keys() <= {200, 413, 429, 504}
    assert statuses.total() == 200
    assert min(statuses[200], statuses[429]) >= 20
    assert statuses[413] + statuses[504] >= 1, "20 ms are too few"
    assert health.seconds
    assert grown < RSS_SLACK
    assert scores_of(ask_one_by_one(narrow, OVERLOAD)) == expected


async def overload(server: ServerProcess, expected: list[Any]) -> Counter[int]:
    """How often each status came to 200 clients at once."""
    async with async_client(server) as client:
        clients = (score_or_be_refused(client, number, expected) for number in range(200))
        return Counter(await asyncio.gather(*clients))


async def score_or_be_refused(client: httpx.AsyncClient, number: int, expected: list[Any]) -> int:
    """The status, once the answer was found to be right. Every tenth client disconnects early."""
    which = number % len(OVERLOAD)
    headers = {"X-Request-Timeout": "0.02"} if number % 10 == 0 else {}
    response = await client.post("/v1/score", json=OVERLOAD[which], headers=headers)
    if response.status_code == 200:
        assert response.json()["scores"] == expected[which]
    elif response.status_code == 429:
        assert error_of(response)[2] in ("queue_full", "queue_too_long")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    else:
        assert error_of(response)[2] == ("deadline_too_short" if response.status_code == 413 else "deadline_exceeded")
    return response.status_code


def rss_of(server: ServerProcess) -> int:
    found: int = psutil.Process(server.process.pid).memory_info().rss
    return found


class HealthWatch:
    """Asks for /health all along, on a thread of its own; anything but 200 fails."""

    def __init__(self, server: ServerProcess) -> None:
        self.seconds: list[float] = []
        self._url = f"{server.url}/health"
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> HealthWatch:
        self._watching = self._threads.submit(self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._threads.shutdown()
        self._watching.result()

    def _watch(self) -> None:
        with httpx.Client(timeout=TIMEOUT) as client:
            while not self._is_over.is_set():
                begin = monotonic()
                assert client.get(self._url).status_code == 200
                self.seconds.append(monotonic() - begin)
                self._is_over.wait(0.02)  # often enough, and no load of its own


MOMENTS = ("in the head", "in the body", "before the answer", "at the answer")


async def hang_up(server: ServerProcess, seed: int) -> None:
    """Send a request, and go: while it is sent, while it waits or is computed, or when the answer begins."""
    rng = random.Random(seed)
    body = orjson.dumps(plain_request(seed, 60))
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    moment = MOMENTS[seed % len(MOMENTS)]
    sent = {"in the head": rng.randrange(len(head)), "in the body": len(head) + rng.randrange(len(body))}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write((head + body)[: sent.get(moment)])
    await writer.drain()
    if moment == "at the answer":
        await reader.read(1)
    else:
        await asyncio.sleep(rng.uniform(0, 0.5))  # a moment that nobody has chosen
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_clients_that_hang_up_leave_nothing_behind(server: ServerProcess) -> None:
    staying = [plain_request(seed, 10) for seed in range(5)]
    alone = scores_of(ask_one_by_one(server, staying))

    async def all_clients() -> list[Any]:
        async with async_client(server) as client:
            waiting = [asyncio.create_task(client.post("/v1/score", json=body)) for body in staying]
            await asyncio.gather(*(hang_up(server, seed) for seed in range(100)))  # 25 at each of the moments
            return [response.json()["scores"] for response in await asyncio.gather(*waiting)]

    before = num_gone(server)
    assert asyncio.run(all_clients()) == alone
    assert leftovers(server) == (0, 0, 0)
    assert scores_of(ask_one_by_one(server, staying)) == alone
    assert num_gone(server) - before >= 25 + 10  # all who went while they sent, and many who waited


def num_gone(server: ServerProcess) -> int:
    """How many requests to score the server has found without a client."""
    text = fetch("GET", f"{server.url}/metrics").text
    found = re.search(r'^prefixwise:requests_total\{route="/v1/score",status="499"\} (\S+)', text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def test_what_is_in_flight_at_a_sigterm_ends_well(server: ServerProcess) -> None:
    """The last test of this module: it ends the server."""
    bodies = [plain_request(seed, 40, prefix_len=200) for seed in range(5)]
    alone = scores_of(ask_one_by_one(server, bodies))
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(ask_at_once, server, bodies * 4)
        wait_for_requests(server, 20)
        server.signal(signal.SIGTERM)
        assert server.wait_for_line(r"SIGTERM: shutting down, (\d+) requests")[1] == "20"
        late = fetch("POST", f"{server.url}/v1/score", json=bodies[0])
        assert error_of(late) == (503, "server_error", "shutting_down", None)
        assert scores_of(answers.result()) == alone * 4
    assert server.wait() == 0
    assert server.log[-1].endswith("stopped")
