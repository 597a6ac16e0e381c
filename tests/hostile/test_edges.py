"""What a client can do to a server before its key is checked: headers, connections, pipelines, a log that is not read.

The figures in the comments are of the server before it had limits.
"""

from __future__ import annotations

import fcntl
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.hostile.attacks import HEAD, MB, TIMEOUT, connect, cost_of, many_connections, read_all, repeated, send_all
from tests.server.app_client import IDS_REQUEST, error_of, expected_logits
from tests.server.server_process import ServerProcess, server_process

SCORES = expected_logits([1, 2, 3], [[4, 5], [6], []], [7, 8])
KEY = "sesame-5f0c"
FILES = 256  # that a server may open
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
MAX_TAKEN = 16 * MB  # bytes of 60 MB: buffers of the kernel on both sides


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ServerProcess]]:
    """They start at the same time. No test leaves anything behind, except for `mute`, which ends."""
    commands = {
        "guarded": [f"--api-key={KEY}", f"--files={FILES}"],
        "open": [],
        "hasty": ['--options={"header_timeout": 3, "idle_timeout": 3}'],
        "mute": [],
    }
    with ExitStack() as stack:
        found = {name: stack.enter_context(server_process(*each, wait=False)) for name, each in commands.items()}
        for server in found.values():
            server.wait_until_ready()
        yield found


def score(server: ServerProcess, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/score", json=IDS_REQUEST, headers=headers, timeout=TIMEOUT)


def refused(server: ServerProcess, reason: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"X-API-Key": KEY}, timeout=TIMEOUT).text
    found = re.search(rf'^prefixwise:connections_refused_total\{{reason="{reason}"\}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


class TestConnections:
    def test_more_than_it_may_open_files_do_not_make_it_unreachable(self, servers: dict[str, ServerProcess]) -> None:
        server = servers["guarded"]
        with many_connections(server, FILES + 50):
            assert httpx.get(f"{server.url}/health", timeout=TIMEOUT).json() == {"status": "ok"}
            assert score(server, **{"X-API-Key": KEY}).json()["scores"] == SCORES
            assert refused(server, "too_many_connections") > 0
            server.wait_for_line(r"connections refused or closed: .*\d+ too_many_connections")
        assert any(re.search(r"at most \d+ connections instead of 4096", line) for line in server.log)

    def test_those_that_say_nothing_are_closed(self, servers: dict[str, ServerProcess]) -> None:
        """Before: never."""
        server = servers["hasty"]
        with ExitStack() as stack:
            half, paused = stack.enter_context(connect(server)), stack.enter_context(connect(server))
            half.sendall(HEAD)
            paused.sendall(HEAD + b"Content-Length: 100\r\n\r\n[")
            silent = stack.enter_context(many_connections(server, 20))
            assert [read_all(each) for each in silent] == [b""] * 20
            answers = [read_all(half), read_all(paused)]
        for answer, code in zip(answers, (b"header_timeout", b"idle_timeout"), strict=True):
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert code in answer

    def test_300_000_pipelined_requests_are_not_taken(self, servers: dict[str, ServerProcess]) -> None:
        server = servers["open"]
        request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with cost_of(server) as cost:
            _, answer = send_all(server, repeated(b"", request, 300_000 * len(request)))
        assert answer.count(b"HTTP/1.1 200 OK") < 3000  # 33 of them, or of each small piece that the kernel delivers
        assert cost.bytes < 30 * MB
        assert refused(server, "too_many_pipelined") == 1
        assert score(server).json()["scores"] == SCORES


class TestHeads:
    @pytest.mark.parametrize(
        ("name", "head", "part", "code"),
        [
            ("guarded", HEAD, b"a:b\r\n", "too_many_headers"),  # 1.2 GB of memory
            ("guarded", HEAD + b"long: ", b"x", "headers_too_large"),  # /health took 5 s
            ("guarded", b"GET /", b"x", "headers_too_large"),
            ("open", CHUNKED, b"a:b\r\n", "too_many_headers"),
            ("open", CHUNKED + b"long: ", b"x", "headers_too_large"),
        ],
        ids=["small", "endless", "url", "trailers", "endless-trailer"],
    )
    def test_60_megabytes_of_them_cost_next_to_nothing(
        self, servers: dict[str, ServerProcess], name: str, head: bytes, part: bytes, code: str
    ) -> None:
        server = servers[name]
        before = refused(server, code)
        with cost_of(server) as cost:
            taken, answer = send_all(server, repeated(head, part, 60 * MB))
        assert taken < MAX_TAKEN
        assert not answer or answer.startswith(b"HTTP/1.1 431 ")  # a reset may overtake it
        assert cost.bytes < 30 * MB
        assert cost.cpu_seconds < 2
        assert refused(server, code) == before + 1

    def test_a_request_without_host_is_refused(self, servers: dict[str, ServerProcess]) -> None:
        _, answer = send_all(servers["open"], [b"GET /health HTTP/1.1\r\n\r\n"])
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"invalid_host"' in answer


def test_a_log_that_nobody_reads_stops_nothing(servers: dict[str, ServerProcess]) -> None:
    """Before: the server froze when the pipe was full, after 511 requests with the usual 64 KiB."""
    server = servers["mute"]
    assert server.process.stderr is not None
    fcntl.fcntl(server.process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    server.reads_log.clear()
    with httpx.Client(timeout=TIMEOUT) as client:
        for number in range(150):
            answer = client.post(f"{server.url}/v1/score", json=IDS_REQUEST, headers={"X-Request-Id": str(number) * 40})
            assert answer.json()["scores"] == SCORES
    server.signal(signal.SIGTERM)
    assert server.process.wait(TIMEOUT) == 0


class TestWebPages:
    def test_a_page_of_another_site_cannot_score(self, servers: dict[str, ServerProcess]) -> None:
        """As a browser sends `fetch(url, {method: "POST", mode: "no-cors", body})`. Before: 200."""
        server = servers["open"]
        body = httpx.Request("POST", "http://x", json=IDS_REQUEST).content
        headers = {"Origin": "https://evil.example", "Content-Type": "text/plain;charset=UTF-8"}
        response = httpx.post(f"{server.url}/v1/score", content=body, headers=headers, timeout=TIMEOUT)
        assert error_of(response) == (403, "permission_error", "origin_not_allowed", None)

    def test_nor_can_one_whose_name_points_to_this_machine(self, servers: dict[str, ServerProcess]) -> None:
        response = score(servers["open"], Host="evil.example", Origin="http://evil.example")
        assert error_of(response) == (403, "permission_error", "host_not_allowed", None)

    def test_curl_can(self, servers: dict[str, ServerProcess]) -> None:
        """As the documentation has it: without a content type, which curl then makes that of a form."""
        assert (
            score(servers["open"], **{"Content-Type": "application/x-www-form-urlencoded"}).json()["scores"] == SCORES
        )

    def test_with_a_key_it_decides_alone(self, servers: dict[str, ServerProcess]) -> None:
        page = {"Origin": "https://evil.example"}
        assert score(servers["guarded"], **page).status_code == 401
        assert score(servers["guarded"], **page, **{"X-API-Key": KEY}).status_code == 200
