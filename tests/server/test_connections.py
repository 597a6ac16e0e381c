"""The limits of connections, with a transport and a clock of the test's own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from prefixwise.server.config import ServerOptions
from prefixwise.server.connections import RESERVE, Connections
from prefixwise.server.http_protocol import HttpProtocol
from prefixwise.server.metrics import Metrics

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n"


class Transport(asyncio.Transport):
    """Holds what is written until `read` takes it."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 2)})
        self.sent = b""
        self.num_writes = 0
        self.unsent = 0
        self.state = "open"

    def write(self, data: Any) -> None:
        self.sent += data
        self.num_writes += 1

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.state != "open"

    def close(self) -> None:
        self.state = "closed" if self.state == "open" else self.state

    def abort(self) -> None:
        self.state = "aborted"

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Server:
    """A server without a socket. `hold` keeps its requests from being answered."""

    def __init__(self, *, breaks_off: bool = False, **options: Any) -> None:
        self._breaks_off = breaks_off  # behind the head
        self.metrics = Metrics()
        self.connections = Connections(ServerOptions(**options), self.metrics)
        self._config = uvicorn.Config(
            self._app, interface="asgi3", lifespan="off", ws="none", log_config=None, proxy_headers=False
        )
        self._state = ServerState()
        self.hold = asyncio.Event()
        self.hold.set()
        self.paths: list[str] = []

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        self.paths.append(scope["path"])
        await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if not self._breaks_off:
            await send({"type": "http.response.body", "body": b"ok"})

    def connect(self, address: str = "1.2.3.4") -> HttpProtocol:
        protocol = HttpProtocol(self.connections, self._config, self._state, {}, asyncio.get_running_loop())
        protocol.connection_made(Transport(address))
        return protocol

    def after(self, seconds: float) -> None:
        """The sweep, so many seconds from now."""
        self.connections.sweep(list(self._state.connections), asyncio.get_running_loop().time() + seconds)  # type: ignore[arg-type]

    def refused(self) -> dict[str, float]:
        samples = [each for family in self.metrics._registry.collect() for each in family.samples]
        name = "prefixwise:connections_refused_total"
        return {each.labels["reason"]: each.value for each in samples if each.name == name}


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def transport_of(protocol: HttpProtocol) -> Any:
    return protocol.transport


def code_of(protocol: HttpProtocol) -> tuple[int, str]:
    """Status and code of the error that was sent, after which the connection is closed."""
    head, _, body = transport_of(protocol).sent.partition(b"\r\n\r\n")
    assert transport_of(protocol).state == "closed"
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """The test on an event loop."""

    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"GET /x HTTP/1.1\r\nHost: a\r\n", b"a:b\r\n" * 20], (431, "too_many_headers")),
        ([b"GET /x HTTP/1.1\r\nHost: a\r\nlong: ", b"x" * 600, b"x" * 600], (431, "headers_too_large")),
        ([b"GET /x HTTP/1.1\r\nHost: a\r\nlong: " + b"x" * 1200 + b"\r\n\r\n"], (431, "headers_too_large")),
        ([b"GET /" + b"x" * 1200 + b" HTTP/1.1\r\nHost: a\r\n\r\n"], (431, "headers_too_large")),
        ([b"\r\n" * 600, b"\r\n"], (431, "headers_too_large")),
        ([POST.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked"), b"0\r\n", b"a:b\r\n" * 20],
         (431, "too_many_headers")),
        ([POST.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked"), b"0\r\na:", b"x" * 600, b"x" * 600],
         (431, "headers_too_large")),
        ([b"GET /x HTTP/1.1\r\nAccept: a\r\n\r\n"], (400, "invalid_host")),
        ([b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"], (400, "invalid_host")),
        ([b"hello there\r\n\r\n"], (400, "invalid_http")),
    ],
    ids=["headers", "endless", "one", "url", "blank-lines", "trailers", "long-trailer", "no-host", "hosts", "no-http"],
)  # fmt: skip
def test_a_head_beyond_its_limits_is_refused(parts: list[bytes], expected: tuple[int, str]) -> None:
    async def run() -> None:
        server = Server(max_headers=10, max_header_bytes=1000)
        protocol = server.connect()
        for part in parts:
            protocol.data_received(part)
        assert code_of(protocol) == expected
        assert server.refused() == {expected[1]: 1}
        protocol.data_received(GET * 3)  # what is on its way is not read
        await settle()
        assert server.paths == []

    asyncio.run(run())


@in_loop
async def test_a_response_is_written_at_once() -> None:
    """Two writes, one of its head, would wake the client twice."""
    protocol = Server().connect()
    for number in (1, 2):
        protocol.data_received(GET)
        await settle()
        sent = transport_of(protocol).sent
        assert (sent.count(b"200 OK"), sent[-2:], transport_of(protocol).num_writes) == (number, b"ok", number)


@in_loop
async def test_a_client_that_waits_before_its_body_hears_at_once() -> None:
    protocol = Server().connect()
    protocol.data_received(POST[:-2] + b"Expect: 100-continue\r\n\r\n")
    await settle()
    assert transport_of(protocol).sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    protocol.data_received(b"y" * 10)
    await settle()
    assert transport_of(protocol).sent.endswith(b"ok")
    assert transport_of(protocol).num_writes == 2


@in_loop
async def test_the_response_to_head_is_its_head() -> None:
    protocol = Server().connect()
    protocol.data_received(GET.replace(b"GET", b"HEAD"))
    await settle()
    assert transport_of(protocol).sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert transport_of(protocol).sent.endswith(b"\r\n\r\n")


@in_loop
async def test_a_response_that_breaks_off_behind_its_head_shows_it() -> None:
    server = Server(breaks_off=True)
    protocol = server.connect()
    protocol.data_received(GET)
    await settle()
    assert transport_of(protocol).sent.endswith(b"content-length: 2\r\n\r\n")
    assert transport_of(protocol).state == "closed"


@in_loop
async def test_a_head_and_a_body_within_the_limits_are_served() -> None:
    server = Server(max_headers=10, max_header_bytes=1000)
    protocol = server.connect()
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nlong: " + b"x" * 800 + b"\r\nContent-Length: 5000\r\n\r\n"
    for _ in range(3):
        protocol.data_received(head + b"y" * 2000)
        protocol.data_received(b"y" * 3000 + b"GET /behind")  # the body is no part of the next head
        protocol.data_received(b" HTTP/1.1\r\nHost: a\r\n\r\n")
        await settle()
    protocol.data_received(b"GET /old HTTP/1.0\r\n\r\n")  # which has no Host
    await settle()
    assert server.paths == ["/x", "/behind"] * 3 + ["/old"]
    assert server.refused() == {}


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_a_request_that_offers_another_protocol_is_served_with_its_body(size: int) -> None:
    """As Java's HttpClient sends it: without TLS it offers HTTP/2. The bytes arrive in parts of this size."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n"
    chunked = POST.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked")[:-2] + offer
    sent = POST[:-2] + offer + b"0123456789" + chunked + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n" + GET[:-2] + offer + GET
    bodies: list[bytes] = []

    async def run() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            bodies.append(body)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        protocol = Server().connect()
        protocol.app = app
        for start in range(0, len(sent), size):
            protocol.data_received(sent[start : start + size])
            await settle()
        assert not protocol.is_head_due
        assert transport_of(protocol).state == "open"

    asyncio.run(run())
    assert bodies == [b"0123456789", b"abcde", b"", b""]


@in_loop
async def test_pipelined_requests_beyond_the_limit_are_not_read() -> None:
    server = Server(max_pipelined_requests=3)
    protocol = server.connect()
    server.hold.clear()
    protocol.data_received(GET * 1000)
    assert len(protocol.pipeline) == 3
    protocol.data_received(GET * 1000)
    server.hold.set()
    await settle()
    transport = transport_of(protocol)
    assert transport.sent.count(b"HTTP/1.1 200 OK") == len(server.paths) == 4
    assert transport.sent.count(b"connection: close") == 1
    assert transport.state == "closed"
    assert server.refused() == {"too_many_pipelined": 1}


@pytest.mark.parametrize(("version", "sent"), [(b"1.0", b""), (b"1.1", b"HTTP/1.1 100 Continue\r\n\r\n")])
def test_a_client_of_http_1_0_is_never_told_to_continue(version: bytes, sent: bytes) -> None:
    async def run() -> None:
        protocol = Server().connect()
        head = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").replace(b"1.1", version)
        protocol.data_received(head)
        await settle()
        assert transport_of(protocol).sent == sent
        protocol.data_received(b"x" * 10)
        await settle()
        assert transport_of(protocol).sent.startswith(sent + b"HTTP/1.1 200 OK")

    asyncio.run(run())


@pytest.mark.parametrize("num_before", [1, 2, 3])
@pytest.mark.parametrize(
    "behind",
    [
        b"hello there\r\n\r\n",
        POST.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked") + b"2\r\nab\r\nhello\r\n",
    ],
    ids=["no request", "a body that breaks off"],
)
def test_an_error_behind_requests_does_not_replace_their_responses(num_before: int, behind: bytes) -> None:
    async def run() -> None:
        server = Server()
        protocol = server.connect()
        server.hold.clear()
        protocol.data_received(GET * num_before + behind)
        await settle()
        assert transport_of(protocol).sent == b""
        server.hold.set()
        await settle()
        assert transport_of(protocol).sent.count(b"HTTP/1.1 ") == num_before
        assert transport_of(protocol).sent.count(b"HTTP/1.1 200 OK") == len(server.paths) == num_before
        assert transport_of(protocol).sent.count(b"connection: close") == 1
        assert transport_of(protocol).state == "closed"
        assert server.refused() == {"invalid_http": 1}

    asyncio.run(run())


@in_loop
async def test_a_silent_connection_is_closed() -> None:
    server = Server(header_timeout=10, keep_alive_timeout=20)
    silent, slow, served = (server.connect() for _ in range(3))
    slow.data_received(GET[:-4])
    served.data_received(GET)
    await settle()
    server.after(9)
    assert [transport_of(each).state for each in (silent, slow, served)] == ["open"] * 3
    server.after(11)
    assert transport_of(silent).state == "closed"
    assert transport_of(silent).sent == b""
    assert code_of(slow) == (408, "header_timeout")
    assert transport_of(served).state == "open"
    served.data_received(b"\r\n")  # no request
    server.after(21)
    assert transport_of(served).state == "closed"
    assert server.refused() == {"header_timeout": 2}


@in_loop
async def test_a_body_that_pauses_is_refused() -> None:
    server = Server(idle_timeout=10)
    protocol = server.connect()
    protocol.data_received(POST + b"12345")
    await settle()
    server.after(9)
    assert transport_of(protocol).state == "open"
    server.after(11)
    assert code_of(protocol) == (408, "idle_timeout")
    assert server.refused() == {"idle_timeout": 1}


@in_loop
async def test_a_body_that_arrives_byte_by_byte_is_refused() -> None:
    """Also by routes that have no deadline of their own."""
    server = Server(idle_timeout=10, request_timeout=20, min_transfer_rate=0)
    protocol = server.connect()
    protocol.data_received(POST + b"12345")
    await settle()
    for seconds in (9, 18, 24):
        protocol.heard += 9
        server.after(seconds)
        assert transport_of(protocol).state == "open"
    protocol.heard += 9
    server.after(26)
    assert code_of(protocol) == (408, "idle_timeout")


@in_loop
async def test_a_body_must_arrive_at_the_least_rate() -> None:
    """In each `idle_timeout` seconds; the time in which the server does not listen does not count."""
    server = Server(idle_timeout=10, min_transfer_rate=10)
    protocol = server.connect()
    protocol.data_received(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
    for seconds, size, is_paused in ((5, 200, False), (11, 0, False), (20, 0, True), (29, 50, False)):
        protocol.data_received(b"x" * size)
        await settle()
        protocol.heard += seconds
        protocol.flow.read_paused = is_paused
        server.after(seconds)
        assert transport_of(protocol).state == "open"
    protocol.heard += 31
    server.after(31)
    assert code_of(protocol) == (408, "slow_transfer")
    assert server.refused() == {"slow_transfer": 1}


@in_loop
async def test_a_request_in_progress_has_no_idle_timeout() -> None:
    server = Server(idle_timeout=10, header_timeout=10, keep_alive_timeout=10)
    protocol = server.connect()
    server.hold.clear()
    protocol.data_received(POST + b"1234567890")
    await settle()
    server.after(1000)
    assert transport_of(protocol).state == "open"
    server.hold.set()
    await settle()
    assert transport_of(protocol).sent.startswith(b"HTTP/1.1 200 OK")


@in_loop
async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Also if the connection is closed on our side: it would stay until everything is sent."""
    server = Server(idle_timeout=10, min_transfer_rate=0)
    reads, stuck, closing = (server.connect() for _ in range(3))
    for protocol in (reads, stuck, closing):
        protocol.data_received(GET)
        transport_of(protocol).unsent = 1000
    await settle()
    transport_of(closing).close()
    server.after(0)
    transport_of(reads).unsent = 900
    server.after(9)
    assert transport_of(stuck).state == "open"
    server.after(11)
    assert [transport_of(each).state for each in (reads, stuck, closing)] == ["open", "aborted", "aborted"]


@in_loop
async def test_a_client_that_reads_byte_by_byte_is_cut_off() -> None:
    """When its handler is done with the response; `test_answers.py` has those in progress."""
    server = Server(idle_timeout=10, min_transfer_rate=100)
    protocol = server.connect()
    protocol.data_received(GET)
    await settle()
    for seconds in (5, 10, 15, 19):
        transport_of(protocol).unsent = 1000 - seconds
        server.after(seconds)
        assert transport_of(protocol).state == "open"
    transport_of(protocol).unsent = 979
    server.after(21)
    assert transport_of(protocol).state == "aborted"
    assert server.refused() == {"slow_transfer": 1}


@in_loop
async def test_requests_behind_another_are_dropped_with_their_connection() -> None:
    server = Server()
    protocol = server.connect()
    server.hold.clear()
    protocol.data_received(GET * 5)
    await settle()
    protocol.connection_lost(None)
    server.hold.set()
    await settle()
    assert server.paths == ["/x"]
    assert transport_of(protocol).sent == b""


@in_loop
async def test_a_request_hears_that_its_client_is_gone_also_with_others_behind_it() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            heard.append((await receive())["type"])

    protocol = Server().connect()
    protocol.app = app
    protocol.data_received(GET * 3)
    await settle()
    protocol.connection_lost(None)
    await settle()
    assert heard == ["http.request", "http.disconnect"]


@in_loop
async def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest() -> None:
    server = Server(max_connections=3)
    first, second, third = (server.connect(f"1.1.1.{number}") for number in range(3))
    first.data_received(GET)
    await settle()  # it waits again, but for a shorter time
    server.connect("1.1.1.9")
    assert [transport_of(each).state for each in (first, second, third)] == ["open", "closed", "open"]
    assert server.refused() == {"too_many_connections": 1}


@in_loop
async def test_if_all_are_busy_a_reserve_answers_health_alone() -> None:
    server = Server(max_connections=3)
    busy = [server.connect(f"1.1.1.{number}") for number in range(3)]
    server.hold.clear()
    for protocol in busy:
        protocol.data_received(GET)
    await settle()
    probe, client = server.connect("2.2.2.2"), server.connect("2.2.2.2")
    client.data_received(GET)
    probe.data_received(GET.replace(b"/x", b"/health"))
    server.hold.set()
    await settle()
    assert code_of(client) == (503, "too_many_connections")
    assert transport_of(probe).sent.startswith(b"HTTP/1.1 200 OK")
    assert all(transport_of(each).sent.startswith(b"HTTP/1.1 200 OK") for each in busy)


@pytest.mark.parametrize(
    ("addresses", "is_one"),
    [
        (("1.1.1.1", "1.1.1.1"), True),
        (("1.1.1.1", "1.1.1.2"), False),
        (("::ffff:1.1.1.1", "::ffff:1.1.1.2"), False),
        (("2001:db8::1", "2001:db8::2:1"), True),  # one /64 network
        (("2001:db8:0:1::1", "2001:db8:0:2::1"), False),
    ],
)
def test_an_address_has_its_own_limit(addresses: tuple[str, str], is_one: bool) -> None:
    async def run() -> None:
        server = Server(max_connections_per_address=1)
        for address in addresses:
            protocol = server.connect(address)
            protocol.data_received(GET)
            await settle()
        assert (b" 503 " in transport_of(protocol).sent) == is_one
        protocol.connection_lost(None)

    asyncio.run(run())


@in_loop
async def test_a_closed_connection_makes_room() -> None:
    server = Server(max_connections_per_address=1)
    for _ in range(3):
        protocol = server.connect()
        protocol.data_received(GET)
        await settle()
        assert transport_of(protocol).sent.startswith(b"HTTP/1.1 200 OK")
        protocol.connection_lost(None)
    assert server.metrics._registry.get_sample_value("prefixwise:connections") == 0


@in_loop
async def test_the_reserve_is_bounded_and_renewed() -> None:
    server = Server(max_connections=1)
    server.hold.clear()
    server.connect().data_received(GET)
    await settle()
    reserve = [server.connect() for _ in range(RESERVE)]
    assert [transport_of(each).state for each in reserve] == ["open"] * RESERVE
    probe = server.connect()
    assert transport_of(reserve[0]).state == "closed"
    server.hold.set()
    probe.data_received(GET.replace(b"/x", b"/health"))
    await settle()
    assert transport_of(probe).sent.startswith(b"HTTP/1.1 200 OK")


def test_the_log_says_it_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = Server(max_connections=2)
        for _ in range(7):
            server.connect()
        server.after(0)
        server.connect()
        server.after(1)
        assert caplog.messages == ["connections refused or closed: 5 too_many_connections; open: 2"]
        server.after(11)
        assert caplog.messages[1:] == ["connections refused or closed: 1 too_many_connections; open: 2"]

    with caplog.at_level(logging.WARNING, "prefixwise"):
        asyncio.run(run())
