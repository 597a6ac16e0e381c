"""A real server process: how it starts, what it does with connections, and how it ends."""

from __future__ import annotations

import errno
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from prefixwise.contract.errors import BackendError
from prefixwise.host import NO_THREAD
from prefixwise.server.config import ServerOptions
from prefixwise.server.launch import bind
from tests.server.app_client import IDS_REQUEST, error_of, expected_logits
from tests.server.real_requests import fetch, wait_for_requests
from tests.server.server_process import Form, ServerProcess, server_process

SCORES = expected_logits([1, 2, 3], [[4, 5], [6], []], [7, 8])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """For tests that leave it as it was."""
    with server_process("--max-request-bytes=2000") as running:
        yield running


def score(url: str) -> httpx.Response:
    return fetch("POST", f"{url}/v1/score", json=IDS_REQUEST)


class TestStart:
    def test_it_says_that_it_is_not_ready_while_the_model_loads(self, form: Form, tmp_path: Path) -> None:
        with server_process(*form, f"--load-until={tmp_path / 'there'}", wait=False) as starting:
            starting.wait_until_listening()
            assert error_of(fetch("GET", f"{starting.url}/health"))[2] == "not_ready"
            assert fetch("GET", f"{starting.url}/v1/models").status_code == 200
            (tmp_path / "there").touch()
            starting.wait_for_line("ready on")
            assert fetch("GET", f"{starting.url}/health").json() == {"status": "ok"}
            assert score(starting.url).json()["scores"] == SCORES

    def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(self, form: Form) -> None:
        with server_process(*form, "--fail=no such folder", wait=False) as failing:
            assert failing.wait() == 1
        assert failing.log[-1] == "error: no such folder"
        assert not any("Traceback" in line for line in failing.log)

    def test_no_room_for_the_engine_s_threads_ends_it_with_one_line(self, form: Form) -> None:
        with server_process(*form, "--no-threads", wait=False) as failing:
            assert failing.wait() == 1
        assert failing.log[-1] == f"error: the model cannot be loaded: {NO_THREAD}"
        assert not any("Traceback" in line for line in failing.log)

    def test_a_port_in_use_fails_before_the_model_is_loaded(self, form: Form) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with server_process(*form, f"--port={port}", "--load-seconds=60", wait=False) as second:
                assert second.wait() == 1
        assert second.log == [
            f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port or --host"
        ]

    def test_too_few_open_files_end_it_with_one_line(self, form: Form) -> None:
        with server_process(*form, "--files=24", wait=False) as failing:
            assert failing.wait() == 1
        assert failing.log == [
            "error: a server needs to open at least 64 files, and this process may open 24; raise ulimit -n"
        ]

    def test_a_host_of_a_family_that_the_machine_does_not_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As IPv6 where it is switched off."""

        def no_socket(*_: object) -> NoReturn:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

        monkeypatch.setattr("prefixwise.server.launch.socket.socket", no_socket)
        with pytest.raises(BackendError, match="cannot listen on ::1 port 80: Address family not supported"):
            bind(ServerOptions(host="::1", port=80))

    def test_a_signal_while_the_model_loads_ends_it(self, form: Form) -> None:
        with server_process(*form, "--load-seconds=60", wait=False) as starting:
            starting.wait_until_listening()
            fetch("GET", f"{starting.url}/health")
            starting.signal(signal.SIGTERM)
            assert starting.wait() == 0

    def test_the_log_can_be_read_by_machines(self) -> None:
        with server_process("--log-json", wait=False) as running:
            running.wait_for_line("ready on")
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
        records = [json.loads(line) for line in running.log]
        (configuration,) = [record["configuration"] for record in records if record["message"] == "configuration"]
        assert configuration["model"] == "fake-model"

    def test_the_key_is_never_logged(self) -> None:
        with server_process("--api-key=hush-hush") as running:
            for headers in ({}, {"Authorization": "Bearer hush-hush"}, {"X-API-Key": "hush-hush!"}):
                fetch("GET", f"{running.url}/server_info?api_key=hush-hush", headers=headers)
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
        assert sum("route=" in line for line in running.log) == 3
        assert not any("hush-hush" in line for line in running.log)


class TestConnections:
    def talk(self, server: ServerProcess, *parts: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            for part in parts:
                connection.sendall(part)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        return answer

    def test_bytes_that_are_not_http_get_the_usual_error_body(self, server: ServerProcess) -> None:
        head, _, body = self.talk(server, b"hello there\r\n\r\n").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"x-request-id: " in head
        assert json.loads(body)["error"]["code"] == "invalid_http"

    def test_a_body_that_is_too_large_can_read_its_refusal(self, server: ServerProcess) -> None:
        """All of it is sent before the answer is read: the connection must not be cut while it is."""
        size = 20_000_000
        head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
        answer = self.talk(server, head, b" " * size)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer
        assert b"request_too_large" in answer

    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    def test_so_can_any_body_that_is_refused_unread_on_a_last_request(
        self, server: ServerProcess, version: str
    ) -> None:
        """nginx speaks HTTP/1.0 with servers unless told otherwise, and makes 502 of a connection that is reset."""
        size = 10_000_000
        head = f"POST /nowhere HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
        answer = self.talk(server, head.encode(), b" " * size)
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert answer.count(b"connection: close") == 1

    def test_so_can_one_that_does_not_say_how_large_it_is(self, server: ServerProcess) -> None:
        head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        answer = self.talk(server, head, *[chunk] * 10, b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")

    def test_a_body_that_is_too_large_gets_no_100_continue(self, server: ServerProcess) -> None:
        head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\nExpect: 100-continue\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")

    def test_nothing_follows_a_body_that_was_not_asked_for(self, server: ServerProcess) -> None:
        """The client may send the body or not: only the end of the connection says where the next request begins."""
        head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\nExpect: 100-continue\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head)
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"connection: close" in answer

    def test_a_connection_serves_many_requests(self, server: ServerProcess) -> None:
        with httpx.Client(timeout=60, verify=False) as client:
            for _ in range(5):
                assert client.post(f"{server.url}/v1/score", json=IDS_REQUEST).json()["scores"] == SCORES
                assert error_of(client.post(f"{server.url}/v1/score", content=b"no json"))[2] == "invalid_json"

    def test_headers_give_nothing_away(self, server: ServerProcess) -> None:
        assert "server" not in fetch("GET", f"{server.url}/health").headers


class TestStop:
    def test_an_idle_server_stops_at_once(self, form: Form) -> None:
        with server_process(*form) as running:
            score(running.url)
            running.signal(signal.SIGINT)
            assert running.wait() == 0
        assert running.log[-1].endswith("stopped")

    def test_a_closed_terminal_drains_it(self, form: Form, tmp_path: Path) -> None:
        """The shell and the kernel may each send SIGHUP, so a second one does not cut requests off."""
        held = f"--hold-until={tmp_path / 'let-go'}"
        with server_process(*form, held) as running, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(score, running.url)
            wait_for_requests(running, 1)
            running.signal(signal.SIGHUP)
            # Two with the one that has just asked how many there are.
            running.wait_for_line("SIGHUP: shutting down, [12] requests in flight")
            running.signal(signal.SIGHUP)
            for _ in range(4):  # idle workers do not leave before the busy one
                assert error_of(score(running.url))[2] == "shutting_down"
            (tmp_path / "let-go").touch()
            assert answer.result().json()["scores"] == SCORES
            assert running.wait() == 0

    def test_under_nohup_it_outlives_the_terminal(self, form: Form) -> None:
        with server_process(*form, "--nohup") as running:
            running.signal(signal.SIGHUP)
            assert score(running.url).json()["scores"] == SCORES
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
        assert not any("SIGHUP" in line for line in running.log)

    def test_requests_in_flight_are_answered_and_new_ones_refused(self, form: Form, tmp_path: Path) -> None:
        held = f"--hold-until={tmp_path / 'let-go'}"
        with server_process(*form, held) as running, ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(score, running.url) for _ in range(8)]
            wait_for_requests(running, 8)
            running.signal(signal.SIGTERM)
            running.wait_for_line("SIGTERM: shutting down")
            # The socket still listens, and says why there is no work.
            late = score(running.url)
            assert error_of(late) == (503, "server_error", "shutting_down", None)
            assert late.headers["connection"] == "close"
            assert error_of(fetch("GET", f"{running.url}/health"))[2] == "shutting_down"
            (tmp_path / "let-go").touch()
            assert [answer.result().json()["scores"] for answer in answers] == [SCORES] * 8
            assert running.wait() == 0

    def test_requests_longer_than_the_grace_period_get_503(self, form: Form, tmp_path: Path) -> None:
        held = f"--hold-until={tmp_path / 'let-go'}"
        with server_process(*form, held, "--shutdown-grace=0.2") as running, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(score, running.url)
            wait_for_requests(running, 1)
            running.signal(signal.SIGTERM)
            assert error_of(answer.result()) == (503, "server_error", "shutting_down", None)
            (tmp_path / "let-go").touch()
            assert running.wait() == 0

    def test_a_device_that_hangs_does_not_keep_it_alive(self, form: Form) -> None:
        options = ("--delay=600", "--shutdown-grace=0.1", "--engine-seconds=0.5")
        with server_process(*form, *options) as running, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(score, running.url)
            wait_for_requests(running, 1)
            running.signal(signal.SIGTERM)
            assert error_of(answer.result())[2] == "shutting_down"
            assert running.wait() == 0
        assert "still busy after 0.5 s: exiting without it" in running.log[-1]

    def test_a_second_signal_does_not_wait(self, form: Form) -> None:
        with server_process(*form, "--delay=30") as running, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(score, running.url)
            wait_for_requests(running, 1)
            running.signal(signal.SIGTERM)
            running.wait_for_line("shutting down")
            running.signal(signal.SIGINT)
            assert running.wait() == 128 + signal.SIGINT
            with pytest.raises(httpx.HTTPError):
                answer.result()
