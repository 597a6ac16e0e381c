"""The pool against servers that do to a connection what servers do."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from prefixwise.bench.run import load_http as http_connection
from prefixwise.bench.run.load_http import ConnectionPool, ExchangeError, HttpAnswer

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n"


CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbody"


UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nbody"


HANG = b""


Use = Callable[[ConnectionPool], Awaitable[Any]]


class Script:
    """A server that gives its next answer to each request, and closes the connection behind some of them."""

    def __init__(self, *answers: bytes, close_after: tuple[int, ...] = ()) -> None:
        self.answers = answers
        self.close_after = close_after
        self.requests: list[bytes] = []
        self.ended: list[asyncio.Event] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended.append(end := asyncio.Event())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                number = len(self.requests)
                self.requests.append(head + await reader.readexactly(length))
                writer.write(self.answers[number])
                await writer.drain()
                if number in self.close_after:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        end.set()

    @property
    def connections(self) -> int:
        return len(self.ended)


def against(make: Callable[[], Script], use: Use, path: str = "") -> Script:
    async def run() -> Script:
        script = make()
        async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
            pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}", {"X-Some": "thing"})
            await use(pool)
            await pool.close()
            await asyncio.gather(*(end.wait() for end in script.ended))
        return script

    return asyncio.run(run())


async def send(pool: ConnectionPool, body: bytes = b"{}") -> HttpAnswer:
    return await pool.send(pool.request("/v1/score", body))


def sending(times: int) -> Use:
    async def use(pool: ConnectionPool) -> None:
        for _ in range(times):
            assert (await send(pool)).body == b"body"

    return use


def failing(pool: ConnectionPool) -> Coroutine[Any, Any, None]:
    async def use() -> None:
        with pytest.raises(ExchangeError):
            await send(pool)

    return use()


def test_a_request_is_what_a_server_expects() -> None:
    script = against(lambda: Script(SIZED), sending(1), path="/behind/")
    head, _, body = script.requests[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /behind/v1/score HTTP/1.1"
    assert lines[1].startswith("Host: 127.0.0.1:")
    assert lines[-2:] == ["X-Some: thing", "Content-Length: 2"]
    assert body == b"{}"


@pytest.mark.parametrize("answer", [SIZED, CHUNKED])
def test_a_connection_is_kept(answer: bytes) -> None:
    script = against(lambda: Script(answer, answer, answer), sending(3))
    assert (script.connections, len(script.requests)) == (1, 3)


def test_a_connection_that_the_server_wants_closed_is_not_used_again() -> None:
    script = against(lambda: Script(CLOSING, SIZED), sending(2))
    assert (script.connections, len(script.requests)) == (2, 2)


def test_a_body_may_end_with_the_connection() -> None:
    assert against(lambda: Script(UNTIL_CLOSED, close_after=(0,)), sending(1)).connections == 1


def test_a_connection_that_was_closed_while_idle_is_noticed() -> None:
    """Whether the news has come or not: the request is sent, once, over a new one."""

    async def use(pool: ConnectionPool) -> None:
        await send(pool)
        await asyncio.sleep(0.05)
        assert (await send(pool)).status == 200

    script = against(lambda: Script(SIZED, SIZED, close_after=(0,)), use)
    assert (script.connections, len(script.requests)) == (2, 2)


def test_a_connection_that_is_closed_under_a_request_is_tried_once_more() -> None:
    """The second request over the first connection gets no byte: sent again, over a new one, it is answered."""
    script = against(lambda: Script(SIZED, HANG, SIZED, close_after=(1,)), sending(2))
    assert (script.connections, len(script.requests)) == (2, 3)


def test_it_is_not_tried_a_third_time() -> None:
    async def use(pool: ConnectionPool) -> None:
        await send(pool)
        await failing(pool)

    script = against(lambda: Script(SIZED, HANG, HANG, close_after=(1, 2)), use)
    assert len(script.requests) == 3


def test_a_new_connection_that_is_closed_is_a_failure_at_once() -> None:
    assert len(against(lambda: Script(HANG, close_after=(0,)), failing).requests) == 1


def test_half_an_answer_is_a_failure_and_not_sent_again() -> None:
    async def use(pool: ConnectionPool) -> None:
        await send(pool)
        await failing(pool)

    script = against(lambda: Script(SIZED, SIZED[:-1], close_after=(1,)), use)
    assert len(script.requests) == 2


def test_garbage_is_a_failure_and_its_connection_is_closed() -> None:
    async def use(pool: ConnectionPool) -> None:
        with pytest.raises(ExchangeError, match="expected an HTTP status line"):
            await send(pool)
        await send(pool)

    assert against(lambda: Script(b"SSH-2.0-x\r\n\r\n", SIZED), use).connections == 2


def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    assert against(lambda: Script(SIZED + b"more", SIZED), sending(2)).connections == 2


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one() -> None:
    async def use(pool: ConnectionPool) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await send(pool)
        assert (await send(pool)).body == b"body"

    script = against(lambda: Script(HANG, SIZED), use)
    assert (script.connections, len(script.requests)) == (2, 2)


def test_an_old_connection_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_KEPT_SECONDS", 0.0)
    assert against(lambda: Script(SIZED, SIZED), sending(2)).connections == 2


def test_there_are_as_many_connections_as_requests_in_flight() -> None:
    async def use(pool: ConnectionPool) -> None:
        await asyncio.gather(*(send(pool) for _ in range(20)))
        await asyncio.gather(*(send(pool) for _ in range(20)))

    assert against(lambda: Script(*[SIZED] * 40), use).connections == 20


def test_the_clock_stops_as_the_last_byte_is_read() -> None:
    """The reader of the answer is busy for 50 ms after it came; the time of the answer does not know."""

    async def use(pool: ConnectionPool) -> None:
        task = asyncio.create_task(send(pool))
        begin = perf_counter()
        while not task.done():
            await asyncio.sleep(0)
        end = perf_counter()
        await asyncio.sleep(0.05)
        assert begin < (await task).read_at <= end

    against(lambda: Script(SIZED), use)


def test_large_bodies_go_both_ways() -> None:
    large = b"x" * 3_000_000
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + large

    async def use(pool: ConnectionPool) -> None:
        assert (await send(pool, large)).body == large
        assert (await send(pool, large)).body == large

    script = against(lambda: Script(answer, answer), use)
    assert script.connections == 1
    assert all(request.endswith(large) for request in script.requests)


def test_one_that_is_in_use_when_the_pool_closes_is_closed_when_it_has_answered() -> None:
    script = Script(SIZED)

    async def use(pool: ConnectionPool) -> None:
        task = asyncio.create_task(send(pool))
        await asyncio.sleep(0)
        await pool.close()
        assert (await task).body == b"body"
        async with asyncio.timeout(5):
            await script.ended[0].wait()

    against(lambda: script, use)


def test_nobody_there_is_a_failure() -> None:
    async def run() -> None:
        with pytest.raises(ExchangeError, match="Connect call failed"):
            await send(ConnectionPool("http://127.0.0.1:9", {}))

    asyncio.run(run())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_with_a_certificate_that_is_trusted_and_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    files = ("-keyout", str(key), "-out", str(certificate))
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *name]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def run() -> int:
        script = Script(SIZED, CHUNKED)
        async with await asyncio.start_server(script.serve, "127.0.0.1", 0, ssl=context) as server:
            url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(ExchangeError, match="certificate verify failed"):
                await send(ConnectionPool(url, {}))
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            pool = ConnectionPool(url, {})
            assert [(await send(pool)).body, (await send(pool)).body] == [b"body", b"body"]
            await pool.close()
            await asyncio.gather(*(end.wait() for end in script.ended))
        return script.connections

    assert asyncio.run(run()) == 1
