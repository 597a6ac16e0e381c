"""What a client can make the server hold: bodies that never end, responses that nobody reads.

The figures in the comments are of the server before it had limits.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import httpx
import orjson
import pytest

from tests.hostile.attacks import HEAD, MB, TIMEOUT, connect, cost_of, read_all
from tests.server.app_client import IDS_REQUEST, error_of, expected_logits
from tests.server.server_process import ServerProcess, server_process

SCORES = expected_logits([1, 2, 3], [[4, 5], [6], []], [7, 8])
FULL = (503, "server_error", "body_memory_full", None)
BODY_BYTES = "prefixwise:body_bytes"
COMMANDS = {
    "usual": [],
    "tight": ["--max-request-bytes=4000000", '--options={"max_response_bytes": 20000000, "max_body_memory": 45000000}'],
    "hasty": ['--options={"idle_timeout": 2, "min_transfer_rate": 10000000}'],
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ServerProcess]]:
    """They start at the same time. No test leaves anything behind."""
    with ExitStack() as stack:
        found = {name: stack.enter_context(server_process(*each, wait=False)) for name, each in COMMANDS.items()}
        for server in found.values():
            server.wait_until_ready()
        yield found


def score(server: ServerProcess) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/score", json=IDS_REQUEST, timeout=TIMEOUT)


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def body_of(num_items: int, num_labels: int) -> bytes:
    """A request whose response has so many numbers, each of about 18 bytes."""
    labels = [7 + index % 500 for index in range(num_labels)]
    return orjson.dumps(
        {"query": [1, 2], "items": [[3]] * num_items, "label_token_ids": labels, "score_mode": "logprob"}
    )


def post(server: ServerProcess, path: bytes, body: bytes) -> socket.socket:
    """A connection whose client has sent a request and reads the start of the response, and no more."""
    connection = socket.socket()
    connection.settimeout(TIMEOUT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    method = b"POST" if body else b"GET"
    connection.sendall(method + b" " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body))
    connection.sendall(body)
    return connection


def wait_for_start(connection: socket.socket) -> bytes:
    start = b""
    while b"\r\n\r\n" not in start:
        start += connection.recv(64)
    return start.split(b"\r\n")[0]


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < end


class TestSlowReaders:
    def test_six_of_them_hold_little(self, servers: dict[str, ServerProcess]) -> None:
        """Six responses of 38 MB, which take 16 MB each as numbers. Before: 460 MB."""
        server, body = servers["usual"], body_of(400, 5000)
        with ExitStack() as stack, cost_of(server) as cost:
            readers = [stack.enter_context(post(server, b"/v1/score", body)) for _ in range(6)]
            assert [wait_for_start(each) for each in readers] == [b"HTTP/1.1 200 OK"] * 6
            assert score(server).json()["scores"] == SCORES
        assert cost.bytes < 340 * MB
        wait_until(lambda: not metric(server, BODY_BYTES))

    def test_a_reader_gets_every_byte(self, servers: dict[str, ServerProcess]) -> None:
        response = httpx.post(f"{servers['usual'].url}/v1/score", content=body_of(100, 5000), timeout=TIMEOUT)
        assert response.headers["transfer-encoding"] == "chunked"
        assert len(response.content) > 8 * MB
        assert [len(row) for row in response.json()["scores"]] == [5000] * 100

    def test_http_1_0_gets_it_with_its_length(self, servers: dict[str, ServerProcess]) -> None:
        body = body_of(100, 500)
        with connect(servers["usual"]) as connection:
            connection.sendall(b"POST /v1/score HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            head, _, content = read_all(connection).partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(content) in head
        assert len(orjson.loads(content)["scores"]) == 100

    def test_one_request_cannot_ask_for_more_than_a_response_may_have(self, servers: dict[str, ServerProcess]) -> None:
        """Before: 36 KB asked, 188 MB answered."""
        server, body = servers["usual"], body_of(1000, 9000)
        assert len(body) < 60_000
        with cost_of(server) as cost:
            response = httpx.post(f"{server.url}/v1/score", content=body, timeout=TIMEOUT)
        assert error_of(response) == (400, "invalid_value_error", "response_too_large", None)
        assert cost.bytes < 20 * MB

    def test_beyond_the_budget_requests_are_refused_and_small_ones_are_served(
        self, servers: dict[str, ServerProcess]
    ) -> None:
        server, body = servers["tight"], body_of(150, 5000)  # may have 18.75 MB: more than the kernel's buffers
        with ExitStack() as stack:
            readers = [stack.enter_context(post(server, b"/v1/score", body)) for _ in range(2)]
            assert [wait_for_start(each) for each in readers] == [b"HTTP/1.1 200 OK"] * 2
            refused = httpx.post(f"{server.url}/v1/score", content=body, timeout=TIMEOUT)
            assert refused.status_code == 503
            assert error_of(refused) == FULL
            assert refused.headers["retry-after"] == "1"
            assert score(server).json()["scores"] == SCORES
            assert 37 * MB < metric(server, BODY_BYTES) < 38 * MB
        wait_until(lambda: not metric(server, BODY_BYTES))
        assert httpx.post(f"{server.url}/v1/score", content=body, timeout=TIMEOUT).status_code == 200

    def test_one_that_reads_too_slowly_is_cut(self, servers: dict[str, ServerProcess]) -> None:
        """A byte now and then. Before: it could go on for days."""
        server = servers["hasty"]
        with post(server, b"/v1/score", body_of(400, 5000)) as reader:
            wait_for_start(reader)
            # Either may notice first: the response on its way, or the sweep, which sees that nothing leaves.
            names = [
                f'prefixwise:connections_refused_total{{reason="{why}"}}' for why in ("slow_transfer", "idle_timeout")
            ]
            wait_until(lambda: bool(reader.recv(1)) and sum(metric(server, name) for name in names) == 1)
        wait_until(lambda: not metric(server, BODY_BYTES))

    @pytest.mark.parametrize("path", [b"/openapi.json", b"/page/swagger-ui-bundle.js"])
    def test_pages_that_need_no_key_are_held_once(self, servers: dict[str, ServerProcess], path: bytes) -> None:
        server = servers["usual"]
        with ExitStack() as stack:
            wait_for_start(stack.enter_context(post(server, path, b"")))  # made on first use
            with cost_of(server) as cost:
                readers = [stack.enter_context(post(server, path, b"")) for _ in range(100)]
                assert {wait_for_start(each) for each in readers} == {b"HTTP/1.1 200 OK"}
        assert cost.bytes < 40 * MB  # of two pieces each, and what a connection costs


class TestSlowSenders:
    def test_bodies_that_do_not_end_hold_no_more_than_the_budget(self, servers: dict[str, ServerProcess]) -> None:
        """Each announces 4 MB and sends most of it; before: all of it was held for ten minutes."""
        server, large = servers["tight"], b" " * (3 * MB)
        with ExitStack() as stack, cost_of(server) as cost:
            senders = []
            for _ in range(20):
                connection = stack.enter_context(connect(server))
                connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (4 * MB))
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(large)
                senders.append(connection)
            wait_until(lambda: len(select.select(senders, (), (), 1)[0]) >= 5)
            refused = select.select(senders, (), (), 0)[0]
            assert all(each.recv(100).startswith(b"HTTP/1.1 503 ") for each in refused)
            assert score(server).json()["scores"] == SCORES
            assert metric(server, BODY_BYTES) <= 45 * MB
        assert cost.bytes < 100 * MB
        wait_until(lambda: not metric(server, BODY_BYTES))

    def test_those_that_only_announce_take_nothing_from_others(self, servers: dict[str, ServerProcess]) -> None:
        server = servers["tight"]
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(connect(server)).sendall(HEAD + b"Content-Length: 4000000\r\n\r\n{")
            body = b" " * (3 * MB) + orjson.dumps(IDS_REQUEST)
            response = httpx.post(f"{server.url}/v1/score", content=body, timeout=TIMEOUT)
            assert response.json()["scores"] == SCORES
